"""One connection of an engine's process to the daemon, with the client's own `PendingCalls` behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    Refused,
    RequestError,
    Stale,
    TransportError,
)
from kvcached_client.protocol.engine import (
    Acquired,
    Bye,
    Header,
    Held,
    Release,
    Released,
    Request,
    decode_reply,
    raise_for_error,
)
from kvcached_client.transport.calls import Answer, Orphan, PendingCalls
from kvcached_client.types import LeaseId, RequestId, TransferId
from tests.simulation.process import Outcome, Process
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

R = TypeVar("R", bound=Header)
T = TypeVar("T")
PATIENCE_US = 120 * MS
#: Fields that the history tells.
_TOLD = (
    "request", "lease", "transfer", "shard", "start", "blocks", "hit", "ready", "depth", "fence", "session", "code",
)  # fmt: skip
#: How often a request is sent with one id.
TRIES = 3


def is_not_written_down(error: RequestError) -> bool:
    """Whether a namespace is cleared, and the record of generations does not say so yet."""
    return error.code == ErrorCode.INTERNAL and "restart of the machine" in str(error)


class Line:
    """Asks, waits, asks again with the same id, and gives back what came too late.

    Attributes:
        epoch: that requests name.
        on_give_back: told of each lease that nobody wants, before it is given back.
        session: of the client.
    """

    def __init__(self, world: World, process: Process) -> None:
        self.epoch = 0
        self.on_give_back: Callable[[LeaseId], None] = lambda _: None
        self.session = PendingCalls()
        self._world = world
        self._process = process
        self._connection = world.network.open(process, self._receive)
        self._waiting: dict[RequestId, Outcome[Answer]] = {}
        self._tries: dict[RequestId, int] = {}
        self._granted: set[LeaseId] = set()
        self._strays: list[Orphan] = []
        self._returned: set[LeaseId] = set()

    def close(self) -> None:
        """Nothing comes by it any more: who waits is told so."""
        self._world.network.close(self._connection)
        for outcome in list(self._waiting.values()):
            outcome.fail(DaemonUnreachable("closed"))
        self._waiting.clear()

    def next_id(self) -> RequestId:
        return self.session.next_id()

    async def ask(
        self,
        request: Request,
        expected: type[R],
        frames: Sequence[bytes] = (),
        *,
        tries: int = TRIES,
        patience_us: int = PATIENCE_US,
    ) -> tuple[R, list[bytes]]:
        """Send a request, and again with the same id where no answer comes.

        Raises:
            DeadlineExceeded: none came at all; or the line was closed (DaemonUnreachable).
            RequestError: the daemon refused.
        """
        if self._connection.closed:
            raise DaemonUnreachable("closed")
        request_id = RequestId(request.id)
        outcome = self._waiting[request_id] = Outcome()
        self._tries[request_id] = tries
        self._send(request, frames, patience_us)
        answer = await outcome
        reply = raise_for_error(answer.reply)
        if not isinstance(reply, expected):
            raise Broken(f"{in_words(request)} is answered by {reply}")
        return reply, answer.frames

    def tell(self, request: Request, frames: Sequence[bytes] = ()) -> None:
        """Send what has no reply."""
        parts = self.session.send(request, frames, deadline_ns=0)
        self._world.network.to_daemon(self._connection, parts, f"{in_words(request)}, one way")

    def tell_goodbye(self) -> None:
        """Close, and end what may be open without waiting for an answer."""
        bye = Bye(id=self.next_id())
        parts = self.session.send(bye, deadline_ns=0)
        self._world.network.to_daemon(self._connection, parts, f"Bye {bye.id}, nobody waits")
        self.close()

    def _send(self, request: Request, frames: Sequence[bytes], patience_us: int) -> None:
        request_id = RequestId(request.id)
        self._tries[request_id] -= 1
        now_us = self._world.scheduler.now_us
        parts = self.session.send(request, frames, deadline_ns=(now_us + patience_us) * 1000)
        self._world.network.to_daemon(self._connection, parts, in_words(request))
        self._process.after(
            patience_us, f"waited for reply {request_id}", lambda: self._overdue(request, frames, patience_us)
        )

    def _overdue(self, request: Request, frames: Sequence[bytes], patience_us: int) -> None:
        request_id = RequestId(request.id)
        outcome = self._waiting.get(request_id)
        if outcome is None or outcome.done:
            return
        if self._tries[request_id]:
            self._world.seen["request sent again"] += 1
            self._send(request, frames, patience_us)
            return
        self._world.seen["request given up"] += 1
        self.session.expire(self._world.scheduler.now_us * 1000)
        del self._waiting[request_id]
        outcome.fail(DeadlineExceeded(f"no reply to {in_words(request)}"))

    def _receive(self, parts: list[bytes]) -> None:
        request_id = self.session.receive(parts)
        if request_id is None:
            self._take_unasked(parts)
        else:
            answer = self.session.take(request_id)
            if answer is None:
                raise Broken(f"no answer to {request_id}, which has come")
            self._note_grant(answer)
            outcome = self._waiting.pop(request_id)
            if isinstance(answer.reply, Acquired | Held) and answer.reply.lease in self._returned:
                outcome.fail(DeadlineExceeded(f"lease {answer.reply.lease} is on its way back"))
            else:
                outcome.set(answer)
        for lease, load in self.session.orphans():
            self.session.drop_orphan(lease)
            self._granted.add(lease)
            self._world.seen["lease granted too late"] += 1
            self._world.seen["lease with a load granted too late"] += bool(load)
            self._process.start(self._give_back(lease, load))
        self._give_back_strays()

    def _note_grant(self, answer: Answer) -> None:
        if isinstance(answer.reply, Acquired | Held):
            self._granted.add(LeaseId(answer.reply.lease))

    def _take_unasked(self, parts: list[bytes]) -> None:
        """A reply that nobody waits for. It may grant a lease that nobody has ever heard of.

        Only a request that is there twice makes such a grant. Real clients send no acquire twice, and ZeroMQ doubles no
        message, so `PendingCalls` does not look for it.
        """
        self._world.seen["reply that nobody waits for"] += 1
        reply = decode_reply(parts[0])
        if isinstance(reply, Acquired | Held):
            load = reply.transfer if isinstance(reply, Held) else 0
            self._strays.append(Orphan(LeaseId(reply.lease), TransferId(load)))

    def _give_back_strays(self) -> None:
        """Once no acquire is under way that may get the same lease."""
        if self.session._acquire_names:
            return
        for lease, load in self._strays:
            if lease not in self._granted and lease not in self.session._orphans:
                self._granted.add(lease)
                self._world.seen["lease granted to a doubled request"] += 1
                self._process.start(self._give_back(lease, load))
        self._strays.clear()

    async def _give_back(self, lease: LeaseId, load: TransferId) -> None:
        self._returned.add(lease)
        self.on_give_back(lease)
        release = Release(id=self.next_id(), epoch=self.epoch, lease=lease, call_off=load)
        try:
            await attempt(self.ask(release, Released, tries=20))
        except Refused as error:  # two acquires of one name were given up, and both got this lease
            if error.code != ErrorCode.ALREADY_RELEASED:
                raise


def in_words(message: Header) -> str:
    """A message for the history: no tokens, which are not of the seed."""
    fields = {name: getattr(message, name) for name in _TOLD if hasattr(message, name)}
    return f"{type(message).__name__} {message.id} {fields}" if fields else f"{type(message).__name__} {message.id}"


async def attempt(asked: Awaitable[T]) -> T | None:
    """What was asked for; None where the session is over or nobody answers."""
    try:
        return await asked
    except (Stale, TransportError):
        return None
