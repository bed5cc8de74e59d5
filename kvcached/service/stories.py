"""What the log tells of requests, copies and sessions; and the verb that sets its level.

At debug each request of an engine is a line. At other levels it costs one look at the level.
"""

from __future__ import annotations

import logging
from typing import Final

from kvcached.core.messages import LoadsEnded, SessionEnded, SessionExpired
from kvcached.log import log_at_every_level, set_level
from kvcached.service.pending import Answer, Respond, Verb
from kvcached.service.sessions import EngineGroups
from kvcached_client.protocol import engine as wire
from kvcached_client.types import ShardIndex, TransferId

#: What a line shows of a request and its reply, where they have it. Neither keys nor tokens of the session.
_SHOWN: Final = (
    *("lease", "request", "tokens", "start", "blocks", "hit", "ready", "depth", "adopted", "duplicates"),
    *("transfer", "shard", "kind", "error", "code", "message"),
)

_log: Final = logging.getLogger(__name__)


class RequestStories:
    """Tells of requests and of the copies that they caused.

    Attributes:
        by_type: serves the verb that sets the level.
    """

    def __init__(self, groups: EngineGroups) -> None:
        self._groups = groups
        self.by_type: dict[type[wire.Header], Verb] = {wire.SetLogLevel: self._set_level}

    def begin(self, peer: bytes, request: wire.Request, respond: Respond) -> Respond:
        """What is to be called with the answer to a request: `respond`, and before it a line in the log."""
        if not _log.isEnabledFor(logging.DEBUG) or isinstance(request, wire.Heartbeat):
            return respond
        group = self._groups.of_connection(peer)
        session = getattr(request, "session", 0) if group is None else group.session
        if not session:
            return respond
        fields = {"session": session, "pid": 0 if group is None else group.scheduler.pid, **_shown(request)}
        if not getattr(request, "reply", True):
            _tell(request, "no reply wanted", fields)
            return respond

        def answered(answer: Answer) -> None:
            _tell(request, str(type(answer.header).__struct_config__.tag), {**fields, **_shown(answer.header)})
            respond(answer)

        return answered

    def loads_ended(self, effect: LoadsEnded) -> None:
        """No load of a lease is under way any more."""
        _log.debug(
            "loads are over: session %(session)d, lease %(lease)d", {"session": effect.session, "lease": effect.lease}
        )

    def settled(self, transfer: TransferId, shard: ShardIndex, error: str, corrupt: int) -> None:
        """A shard is through with a transfer."""
        fields = {"transfer": transfer, "shard": shard}
        if error:
            _log.warning("transfer %(transfer)d failed on shard %(shard)d: %(error)s", {**fields, "error": error})
        if corrupt:
            words = "%(corrupt)d stored blocks had changed and are dropped; shard %(shard)d, load %(transfer)d"
            _log.warning(words, {**fields, "corrupt": corrupt})
        _log.debug("transfer %(transfer)d is over on shard %(shard)d", fields)

    def expired(self, effect: SessionExpired, *, may_return: bool) -> None:
        """A session is over, and its processes may still write; or it is silent, and may rejoin."""
        level = logging.WARNING if effect.quarantined_slots else logging.INFO
        words = "session %(session)d is over: %(slots)d slots are set aside until its processes are dead"
        if may_return:
            words += ", or it rejoins: it may not have heard that it was back"
        _log.log(level, words, {"session": effect.session, "slots": effect.quarantined_slots})

    def ended(self, effect: SessionEnded) -> None:
        """Nobody of a session writes any more."""
        words = "session %(session)d ended: %(slots)d slots are free again"
        _log.info(words, {"session": effect.session, "slots": effect.freed_slots})

    def _set_level(self, _: bytes, request: wire.SetLogLevel, __: list[bytes]) -> Answer:
        before = set_level(request.level)
        fields = {"level": request.level, "before": before}
        log_at_every_level(_log, "log level: %(level)s, was %(before)s", fields)  # else a silent log has no reason
        return Answer(wire.LogLevelSet(id=request.id, level=request.level, before=before))


def _shown(message: wire.Header) -> dict[str, object]:
    shown = {name: getattr(message, name) for name in _SHOWN if hasattr(message, name)}
    if isinstance(message, wire.Acquired) and message.loads:
        shown["loads"] = [ticket.transfer for ticket in message.loads]
    return shown


def _tell(request: wire.Request, outcome: str, fields: dict[str, object]) -> None:
    words = ", ".join(f"{name} %({name})s" for name in fields)
    verb = str(type(request).__struct_config__.tag)
    _log.debug("%(verb)s: %(outcome)s: " + words, {"verb": verb, "outcome": outcome, **fields})
