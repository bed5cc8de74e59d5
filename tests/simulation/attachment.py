"""Connections to the attach socket, and the processes at their ends as the daemon sees them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, TypeVar

from kvcached.process.access import Grants
from kvcached.process.identity import ProcessIdentity
from kvcached_client.errors import DaemonUnreachable, KvcachedError, RequestError
from kvcached_client.protocol.attach import Identified, Joined, JoinedHost
from kvcached_client.types import SessionId, ShardIndex
from tests.access.grants import OWN
from tests.simulation.process import Outcome, Process
from tests.simulation.scheduler import MS

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World

T = TypeVar("T")
_DEATH_SEEN_US: Final = (50, 20 * MS)
_ATTACH_US: Final = (50, 2 * MS)


class Attachment:
    """A connection to the attach socket of one daemon, and the process at its end as that daemon holds it.

    Attributes:
        joined: a shard has got its memory by it.
        on_closed: told when the daemon closes it, or is dead.
    """

    def __init__(self, world: World, process: Process, daemon: Daemon | None = None) -> None:
        self.process = process
        self.joined = False
        self.closed = False
        self.on_closed: Callable[[], None] = lambda: None
        self._world = world
        self._daemon = daemon or world.daemon
        self._fail: Callable[[KvcachedError], None] = lambda _: None
        self._daemon.attachments[self] = None
        process.on_death.append(self._ends)

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def identity(self) -> ProcessIdentity:
        return self.process.identity

    @property
    def grants(self) -> Grants:
        return OWN

    def is_dead(self) -> bool:
        return self.process.dead

    is_seen = True

    def is_same_process(self, other: Attachment) -> bool:
        return self.process is other.process

    def close(self) -> None:
        """The daemon needs to know no more whether the process lives."""

    async def identify(self) -> Identified:
        """Present the process.

        Raises:
            DaemonUnreachable: there is no daemon.
        """
        return await self._ask("identify", lambda: self._daemon.service.identify(self))

    async def join(self, session: SessionId, token: bytes, shard: int) -> tuple[Joined | JoinedHost, tuple[int, ...]]:
        """Ask for a shard's memory.

        Raises:
            RequestError: the daemon refuses.
            DaemonUnreachable: there is none.
        """

        def join() -> tuple[Joined | JoinedHost, tuple[int, ...]]:
            joined = self._daemon.service.join(self, session, token, ShardIndex(shard))
            self.joined = True
            self._daemon.crews[session].join(shard, self.process)
            return joined

        return await self._ask(f"join session {session} as shard {shard}", join)

    def hang_up(self) -> None:
        """The process closes it, and lives on."""
        if not self.closed:
            self.closed = True
            self._daemon.process.after(
                self._delay(), "an attach connection closed", self._daemon.checked(self._is_closed)
            )

    def dropped(self, why: str) -> None:
        """The daemon has closed it: its process sees that soon."""
        if self.closed:
            return
        self.closed = True

        def see() -> None:
            self._fail(DaemonUnreachable(why))
            self.on_closed()

        self.process.after(self._delay(), f"sees its attach connection closed: {why}", see)

    def _ends(self) -> None:
        """The process dies: the kernel closes its sockets, and its pidfd tells, in any order."""
        daemon = self._daemon
        for what, act in (("socket closed", self._is_closed), ("dead", lambda: daemon.see_death(self))):
            delay_us = self._world.chance.spread(*_DEATH_SEEN_US)
            daemon.process.after(delay_us, f"sees {self.process.name} {what}", daemon.checked(act))

    def _is_closed(self) -> None:
        if self in self._daemon.watched and not self._daemon.service.peer_closed(self):
            self._daemon.forget(self)

    async def _ask(self, what: str, serve: Callable[[], T]) -> T:
        outcome: Outcome[T] = Outcome()
        self._fail = outcome.fail
        if self._daemon.process.dead:
            self.process.after(self._delay(), "finds no daemon", lambda: outcome.fail(DaemonUnreachable("no daemon")))

        def serve_now() -> None:
            if self.process.dead or self.closed:
                return
            try:
                answer = serve()
            except RequestError as error:
                refusal = error
                self.process.after(self._delay(), f"is refused: {error.code}", lambda: outcome.fail(refusal))
                return
            self._daemon.watched[self] = None
            self.process.after(self._delay(), f"gets its answer to {what}", lambda: outcome.set(answer))

        act = self._daemon.checked(serve_now)
        self._daemon.process.after(self._delay(), f"attach: {self.process.name}: {what}", act)
        return await outcome

    def _delay(self) -> int:
        return self._world.chance.spread(*_ATTACH_US)


@dataclass
class Crew:
    """The processes of one session: who could write what it was given."""

    processes: list[Process]
    shards: dict[int, list[Process]] = field(default_factory=dict)

    def join(self, shard: int, process: Process) -> None:
        self.processes.append(process)
        self.shards.setdefault(shard, []).append(process)
