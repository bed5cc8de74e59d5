"""What the shards of an engine in managed mode do to the device pool, in the order in which it was queued."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_client.keys import KeyChain
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES
from tests.simulation.engine import EngineSession
from tests.simulation.line import Line
from tests.simulation.memory import DeviceMemory, Holder, Shape, Span
from tests.simulation.process import Mailbox, Outcome, Process, every
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

_WRITE_US = (100, 3 * MS)
#: What a device has to do before it comes to a write that nobody waits for.
_COMPUTE_US = (1 * MS, 60 * MS)
#: Of one write in six: a device does other things, too.
_SLOWNESS = (1, 1, 1, 1, 1, 30)
#: Of one step in three: long enough for a daemon to die and another one to start meanwhile.
_COMPUTE_SLOWNESS = (1, 1, 20)


@dataclass(eq=False)
class DeviceShard:
    """A shard process, or a thread of the only process: it does what is queued, in order, as a device does."""

    index: int
    process: Process
    memory: DeviceMemory
    queue: Mailbox[Callable[[], Awaitable[None]]] = field(default_factory=Mailbox)
    pending: Counter[int] = field(default_factory=Counter)  #: how often slots are queued to be written
    fence: int = 0


@dataclass(eq=False)
class Works:
    """What an engine has queued in a session, and in those that go on with it under later daemons.

    Attributes:
        holder: who has the right to write, with the first name of a lease behind it.
        last_fence: that was queued.
        cancelled: what is queued will not be done.
        ending: first names of leases that are over, with work queued in their slots.
    """

    holder: Holder
    last_fence: int = 0
    cancelled: bool = False
    ending: set[str] = field(default_factory=set)


class ManagedSession(EngineSession):
    """A session on a device pool.

    Attributes:
        shards: in their order.
        works: what is queued in it.
        held: leases of requests that are being served, by id.
    """

    def __init__(self, welcome: wire.Welcome, line: Line, works: Works | None = None) -> None:
        super().__init__(welcome.session, welcome.token, welcome.epoch, line)
        self.welcome = welcome
        self.shards: list[DeviceShard] = []
        self.works = works or Works(("session", welcome.daemon_epoch, self.number))
        self.held: dict[int, HeldLease] = {}

    @property
    def signalled(self) -> int:
        return min((shard.fence for shard in self.shards), default=0)

    @property
    def unsignalled(self) -> int:
        """The last fence, where it has not signalled; else 0."""
        return self.works.last_fence if self.works.last_fence > self.signalled else 0


@dataclass
class HeldLease:
    """What a request holds: slots by position in the prompt; `depth` of them are committed or were cached.

    While the hit `is_loading` the first `ready` blocks are there. While it `is_committing`, the daemon may have given
    some of its slots back, for another lease's copies of the same blocks, and the engine has not heard so.
    """

    id: int
    name: str
    first_name: str  #: see `World.first_names`
    chain: KeyChain
    table: list[int]
    hit: int
    ready: int
    is_loading: bool
    depth: int = 0
    written: int = 0
    fence: int = 0
    is_committing: bool = False


class Device:
    """All shards of an engine."""

    def __init__(self, world: World, shape: Shape, name: str) -> None:
        self._world = world
        self._shape = shape
        self._name = name

    async def write(self, session: ManagedSession, lease: HeldLease, stop: int, *, wait: bool) -> None:
        """Queue blocks up to `stop` on every shard; `wait` until they are written."""
        holder: Holder = (*session.works.holder, lease.first_name)
        full = lease.chain.block_count
        start = lease.written if stop <= full else full
        for shard in session.shards:
            if start < stop and not wait:
                shard.queue.put(self._computing(shard))
            for index in range(start, stop):
                key = lease.chain.key_range(index, index + 1) if index < full else bytes(KEY_SIZE_BYTES)
                data = self._shape.expected(session.welcome.generation, key, shard.index)
                shard.pending[lease.table[index]] += 1
                shard.queue.put(self._writing(session, shard, holder, lease.table[index], data))
        if start < stop:
            self._signal(session, lease)
        if stop <= full:
            lease.written = max(lease.written, stop)
        if wait:
            await self.written(session)

    def _writing(
        self, session: ManagedSession, shard: DeviceShard, holder: Holder, slot: int, data: bytes
    ) -> Callable[[], Awaitable[None]]:
        async def write() -> None:
            memory, (start, end) = shard.memory, shard.memory.block(slot)
            middle = (end - start) // 2
            if session.works.cancelled:
                return
            memory.write(holder, start, data[:middle])
            pause_us = self._world.chance.spread(*_WRITE_US) * self._world.chance.among(_SLOWNESS)
            await shard.process.sleep(pause_us, f"has written half of slot {slot}")
            if session.works.cancelled:
                return
            memory.write(holder, start + middle, data[middle:])
            shard.pending[slot] -= 1
            if not shard.pending[slot]:
                memory.unwritten.discard(slot)
            if not self._world.daemon.is_active(session.number, session.welcome.daemon_epoch):
                self._world.seen["zombie wrote to a device slot"] += 1

        return write

    def _computing(self, shard: DeviceShard) -> Callable[[], Awaitable[None]]:
        async def compute() -> None:
            pause_us = self._world.chance.spread(*_COMPUTE_US) * self._world.chance.among(_COMPUTE_SLOWNESS)
            await shard.process.sleep(pause_us, "has computed")

        return compute

    def _signal(self, session: ManagedSession, lease: HeldLease) -> None:
        """A fence behind what is queued."""
        session.works.last_fence += 1
        fence = lease.fence = session.works.last_fence
        for shard in session.shards:

            async def pass_by(shard: DeviceShard = shard) -> None:
                shard.fence = fence

            shard.queue.put(pass_by)

    async def written(self, session: ManagedSession) -> None:
        """Wait until everything that is queued is done."""
        marks: list[Outcome[None]] = []
        for shard in session.shards:
            mark: Outcome[None] = Outcome()
            marks.append(mark)

            async def reach(mark: Outcome[None] = mark) -> None:
                mark.set(None)

            shard.queue.put(reach)
        await every(marks)

    def stop_writing(self, session: ManagedSession, slots: list[int], fence: int) -> None:
        """What is about to be committed is not written again, once the fence has signalled."""
        for shard in session.shards:
            shard.memory.unwritten.update(slot for slot in slots if shard.pending[slot])
            spans = [shard.memory.block(slot) for slot in slots]
            if fence <= shard.fence:  # its process may be stopped, with nothing left to write
                shard.memory.give_up_spans(session.works.holder, spans)
            else:

                async def stop(shard: DeviceShard = shard, spans: list[Span] = spans) -> None:
                    shard.memory.give_up_spans(session.works.holder, spans)

                shard.queue.put(stop)

    def end_lease(self, session: ManagedSession, name: str, fence: int) -> None:
        """Nothing of the lease with that first name is written any more, once the fence has signalled."""
        holder: Holder = (*session.works.holder, name)
        for shard in session.shards:
            if fence <= shard.fence:  # its process may be stopped, with nothing left to write
                shard.memory.give_up(holder)
            else:
                session.works.ending.add(name)

                async def stop(shard: DeviceShard = shard) -> None:
                    shard.memory.give_up(holder)

                shard.queue.put(stop)

    def end_others(self, session: ManagedSession) -> None:
        """Nothing was ever written for leases, or in slots of a lease, that the engine has not heard of.

        Slots of a hit are only read, until the engine has heard that they are its own in place of a load that failed.
        """
        names = session.works.ending.union(lease.first_name for lease in session.held.values())
        for shard in session.shards:
            memory = shard.memory
            memory.give_up_others(session.works.holder, names)
            for lease in session.held.values():
                unheard = set(range(self._world.plan.slots)).difference(lease.table[lease.hit :])
                spans = (memory.block(slot) for slot in unheard)
                memory.give_up_spans((*session.works.holder, lease.first_name), spans)

    async def read(self, session: ManagedSession, lease: HeldLease, blocks: int) -> None:
        """The first blocks of a lease, on every shard."""
        for index in range(blocks):
            key, slot = lease.chain.key_range(index, index + 1), lease.table[index]
            for shard in session.shards:
                shard.queue.put(self._reading(session, shard, lease.id, slot, key))
        await self.written(session)

    def _reading(
        self, session: ManagedSession, shard: DeviceShard, lease: int, slot: int, key: bytes
    ) -> Callable[[], Awaitable[None]]:
        async def read() -> None:
            found = shard.memory.read(shard.memory.block(slot))
            good = found == self._shape.expected(session.welcome.generation, key, shard.index)
            if self._world.daemon.is_active(session.number, session.welcome.daemon_epoch):
                self._world.seen["device blocks read"] += 1
                if not good:
                    raise Broken(f"{self._name} reads other bytes than its block's: slot {slot}, lease {lease}")
            elif not good:
                self._world.seen["other bytes read in a session that was over"] += 1

        return read

    async def work(self, shard: DeviceShard) -> None:
        while True:
            await (await shard.queue.get())()
