"""The verbs of an engine of before a restart that comes back, and goes on with what it holds."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

from kvcached.admission import Admission
from kvcached.answers import Answer
from kvcached.core.cache import Cache
from kvcached.core.declarations import Declarations
from kvcached.membership import Membership, Peer
from kvcached_client import protocol as wire
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import FenceSequence, SessionId


class ReturnVerbs:
    """Serves `declare` and `declare_over`; `rejoin` is the service's, which opens the session's answers."""

    def __init__(self, cache: Cache, membership: Membership, admission: Admission, now_ms: Callable[[], int]) -> None:
        self._core = Declarations(cache)
        self._membership = membership
        self._admission = admission
        self._now_ms = now_ms
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Declare: self._declare,
            wire.DeclareOver: self._over,
        }

    def rejoin(self, connection: bytes, request: wire.Rejoin) -> tuple[wire.Welcome, Peer]:
        """Go on with a session of before the restart.

        Raises:
            RequestError: another version or layout, no living process, or nothing is left of that session.
        """
        group, peer = self._admission.find_earlier(connection, request)
        session = self._core.resume(group.session, self._now_ms())
        self._membership.resume(group, connection, peer)
        return self._admission.welcome_back(request, session, group), peer

    def _declare(self, connection: bytes, request: wire.Declare, frames: list[bytes]) -> Answer:
        keys, held, own = frames
        lease = self._core.declare(
            self._session(connection),
            request.epoch,
            request.request,
            request.tokens,
            request.hit,
            keys,
            array("i", held),
            array("i", own),
            FenceSequence(request.fence),
        )
        return Answer(wire.Declared(id=request.id, lease=lease))

    def _over(self, connection: bytes, request: wire.DeclareOver, _: list[bytes]) -> Answer:
        return Answer(wire.DeclareEnded(id=request.id, freed=self._core.over(self._session(connection), request.epoch)))

    def _session(self, connection: bytes) -> SessionId:
        group = self._membership.of_connection(connection)
        if group is None:
            raise request_error(
                ErrorCode.NO_SESSION, "this connection has no session, or none any more", "rejoin, or say hello"
            )
        return group.session
