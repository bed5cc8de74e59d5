"""What engines of both kinds have in common: processes that live and die together, sessions, and requests to serve."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvcached_client.errors import DaemonFailure, ErrorCode, Stale, TransportError
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES
from tests.simulation.attachment import Attachment
from tests.simulation.daemon import HEARTBEAT_INTERVAL_MS
from tests.simulation.line import Line
from tests.simulation.process import Outcome, Process, every
from tests.simulation.scheduler import MS

if TYPE_CHECKING:
    from tests.simulation.world import World

T = TypeVar("T")
#: Requests that an engine runs at once.
_AT_ONCE = 2
#: Requests that it serves after it was told to leave.
_LAST_REQUESTS = 3
_THINK_US = (10 * MS, 400 * MS)


class EngineSession:
    """A session as its engine believes it to be.

    Attributes:
        over: the daemon said so, or the engine has ended it.
        is_lost: the daemon has closed a connection of it.
        signalled: the highest fence that has signalled.
        attachments: connections to the attach socket that belong to it.
        prompts: last keys of prompts that were acquired in it, or in one that it goes on from.
    """

    def __init__(self, number: int, token: bytes, epoch: int, line: Line) -> None:
        self.number = number
        self.token = token
        self.epoch = epoch
        self.line = line
        self.over = False
        self.is_lost = False
        self.attachments: list[Attachment] = []
        self.prompts: set[bytes] = set()

    def known_blocks(self, keys: bytes) -> int:
        """How many leading blocks of a prompt are one that was acquired; the daemon may be another one since."""
        for end in range(len(keys), 0, -KEY_SIZE_BYTES):
            if keys[end - KEY_SIZE_BYTES : end] in self.prompts:
                return end // KEY_SIZE_BYTES
        return 0

    @property
    def signalled(self) -> int:
        return 0

    def lost(self) -> None:
        """The daemon has closed the attach connection: it is dead."""
        self.over = self.is_lost = True
        self.line.close()


S = TypeVar("S", bound=EngineSession)


class Engine(ABC):
    """An engine. When one of its processes dies, all of them do, and it is started again.

    Attributes:
        processes: of its present life, the scheduler first.
        left: it has said goodbye and will not come back.
        served: requests so far.
    """

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.processes: list[Process] = []
        self.left = False
        self.served = 0
        self._lives = 0
        self._falling = False
        self._to_serve: int | None = None
        self._requests = 0

    @property
    def scheduler(self) -> Process:
        """The process that decides."""
        return self.processes[0]

    def start(self) -> None:
        """Begin a life."""
        self._lives += 1
        self._falling = False
        count = self.process_count()
        self.processes = [self.world.new_process(f"{self.name}.{self._lives}/{index}") for index in range(count)]
        for process in self.processes:
            process.on_death.append(self._falls)
        self.prepare()
        self.scheduler.start(self._live())

    def finish(self) -> None:
        """Serve some requests more, then leave."""
        self._to_serve = self.served + _LAST_REQUESTS

    @abstractmethod
    def prepare(self) -> None:
        """Its processes are new."""

    @abstractmethod
    def is_copying(self) -> bool:
        """Whether one of its processes is writing, or about to."""

    @abstractmethod
    def process_count(self) -> int:
        """How many processes it has in its next life."""

    @abstractmethod
    async def open_session(self) -> EngineSession | None:
        """Say hello and let the shards join; None where that did not work."""

    @abstractmethod
    async def serve(self, session: Any) -> None:
        """One request, from its prompt to its end."""

    @abstractmethod
    def part(self, session: Any) -> bool:
        """The session is over, and another one is to come; False where only new processes can have one."""

    async def come_back(self, session: Any) -> EngineSession | None:
        """Go on in another session with what one that is over held; None where that is not possible."""
        del session
        return None

    def works_to_go_on_with(self, session: Any) -> list[Coroutine[Any, Any, None]]:
        """What is left of requests that were begun in the session before."""
        del session
        return []

    # --- life -------------------------------------------------------------------------------------------------------

    def _falls(self) -> None:
        """One of its processes is dead: the others are killed, and it is started again."""
        if self._falling or self.left:
            return
        self._falling = True
        chance, scheduler = self.world.chance, self.world.scheduler
        longest_us = chance.spread(1 * MS, 400 * MS)
        for process in self.processes:
            scheduler.after(chance.number(0, longest_us), f"{process.name} is killed", process.kill)
        scheduler.after(longest_us + chance.spread(2 * MS, 300 * MS), f"{self.name} is started again", self.start)

    async def _live(self) -> None:
        while not self._is_through():
            session = await self.open_session()
            if session is None:
                await self.scheduler.sleep(self.world.chance.spread(20 * MS, 300 * MS), "tries again later")
                continue
            while session is not None:
                await self._serve_in(session)
                if not session.over:
                    await self._leave(session)
                    break
                self.world.seen["session found to be over"] += 1
                before, session = session, await self.come_back(session)
                if session is None and not self.part(before):
                    self._exit()
                    return
        self.left = True
        self._exit()

    async def _serve_in(self, session: EngineSession) -> None:
        """Until it is over, or enough is served."""
        self.scheduler.start(self._beat(session))
        works = [*self.works_to_go_on_with(session), *(self._serve_on(session) for _ in range(_AT_ONCE))]
        await every([self._go(work) for work in works])

    def _is_through(self) -> bool:
        return self._to_serve is not None and self.served >= self._to_serve

    def _exit(self) -> None:
        """All processes end."""
        for process in self.processes:
            delay_us = self.world.chance.spread(10, 20 * MS)
            self.world.scheduler.after(delay_us, f"{process.name} exits", process.kill)

    async def _leave(self, session: EngineSession) -> None:
        """Goodbye."""
        self.part(session)
        try:
            await session.line.ask(wire.Bye(id=session.line.next_id()), wire.Goodbye)
        except (Stale, TransportError):
            self.world.seen["goodbye without an answer"] += 1
        session.over = True
        session.line.close()

    async def _serve_on(self, session: EngineSession) -> None:
        """Request after request."""
        while not (session.over or self._is_through()):
            await self.served_one(session, self.serve(session))
            await self.think()

    async def served_one(self, session: EngineSession, request: Coroutine[Any, Any, None]) -> None:
        """One request, whatever becomes of it."""
        try:
            await request
            self.served += 1
        except Stale:
            session.over = True
        except TransportError:
            self.world.seen["request failed for want of an answer"] += 1
        except DaemonFailure as error:
            if error.code != ErrorCode.DRAINING:
                raise
            self.world.seen["request not taken while the daemon drains"] += 1

    async def _beat(self, session: EngineSession) -> None:
        """Say that the session lives, by a connection that does nothing else."""
        line = Line(self.world, self.scheduler)
        while not session.over:
            await self.scheduler.sleep(HEARTBEAT_INTERVAL_MS * MS, "heartbeat is due")
            if session.over:
                break
            beat = wire.Heartbeat(
                id=line.next_id(), session=session.number, token=session.token, fence=session.signalled
            )
            try:
                await line.ask(beat, wire.Alive, tries=1)
            except Stale:
                session.over = True
            except TransportError:
                self.world.seen["heartbeat without an answer"] += 1
        line.close()

    # --- steps ------------------------------------------------------------------------------------------------------

    async def think(self) -> None:
        await self.scheduler.sleep(self.world.chance.spread(*_THINK_US), "computes")

    def next_name(self) -> str:
        """For a request."""
        self._requests += 1
        return f"{self.name}.{self._lives}-{self._requests}"

    def _go(self, coroutine: Coroutine[Any, Any, None]) -> Outcome[None]:
        """Run a coroutine beside this one, in the scheduler's process; the outcome says when it is through."""
        return run_on(self.scheduler, lambda: coroutine)


def run_on(process: Process, work: Callable[[], Coroutine[Any, Any, T]]) -> Outcome[T]:
    """Run a coroutine in a process; what it returns, or one of our own errors, is the outcome."""
    outcome: Outcome[T] = Outcome()

    async def run() -> None:
        try:
            outcome.set(await work())
        except (Stale, TransportError) as error:
            outcome.fail(error)

    process.start(run())
    return outcome
