"""The storage process: the real `HostCopies`, but its reads and writes of the host pool take time.

An order is carried out at one moment on a copy of the host pool. What that has read was read before, piece by piece;
what it has written is written afterwards, piece by piece: at any moment between these the daemon may die, the process
may be killed, and a slot that it touches must be nobody else's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import pairs
from kvcached.recovery.generations import first_of
from kvcached.storage.executor import HostCopies
from kvcached.storage.messages import Backup, BlockFormat, Done, Fetch, NotOpened, Opened, Report, Request
from kvcached_client.blocks.host_layout import HEADER_BYTES
from tests.simulation.memory import Holder, Shape
from tests.simulation.process import Outcome, Process
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World

#: How long a call of the backend may take.
TIMEOUT_S = 0.5
_OPENS_US = (1 * MS, 300 * MS)
_ON_ITS_WAY_US = (20, 2 * MS)
_STEP_US = (50, 3 * MS)
#: Of an order that hangs.
_HANGS_US = (400 * MS, 5000 * MS)
#: From SIGKILL to death: what its threads have given to the device is written meanwhile.
_DIES_US = (20, 300 * MS)
#: From its daemon's death to its own, if nobody kills it.
_ORPHANED_US = (1 * MS, 3000 * MS)
_DEATH_SEEN_US = (50, 20 * MS)
#: Of a header, what comes last and in one write.
_FIRST_WRITE_BYTES = 8
#: Starts that fail.
_NOT_OPENED = 0.05


class SimulatedStorage:
    """`kvcached.storage.process.StorageProcess` without a process: what the link of one daemon has started."""

    def __init__(
        self,
        world: World,
        daemon: Daemon,
        on_opened: Callable[[Opened | NotOpened], None],
        on_reply: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._world = world
        self._daemon = daemon
        self._on_opened = on_opened
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._exited: Outcome[None] = Outcome()
        self._is_closed = False
        self._reason = ""
        self._heard_us = 0  #: when the last order arrives
        self._told_us = 0  #: when its last reply does
        self.process: Process = world.new_process("storage")
        self.process.on_death.append(self._dies)
        self.process.after(world.chance.spread(*_OPENS_US), "opens its backend", self._open)

    # --- what the link asks for -------------------------------------------------------------------------------------

    def send(self, order: Request) -> None:
        """Send an order: from now on it may touch what the order names."""
        if self._is_closed:
            return
        if isinstance(order, Fetch):
            self._claim(order.sequence, order.format, (order.span,), reads=False)
        elif isinstance(order, Backup):
            self._claim(order.sequence, order.format, order.spans, reads=True)
        self._heard_us = max(self._heard_us + 1, self._now_us + self._world.chance.spread(*_ON_ITS_WAY_US))
        what = f"takes order {order.sequence}, {type(order).__name__}"
        self.process.after(self._heard_us - self._now_us, what, lambda: self.process.start(self._carry_out(order)))

    def kill(self, reason: str) -> None:
        """SIGKILL, which is not death yet."""
        self._reason = self._reason or reason
        self._end_soon(self._world.chance.spread(*_DIES_US))

    async def stop(self, deadline_s: float, _: float | None) -> None:
        """Close the connection, at which it ends; by SIGKILL at the deadline. Returns when it is dead."""
        self._reason, self._is_closed = self._reason or "it was stopped", True
        grace_us = int(deadline_s * 1e6) if self.process.stopped else 0
        self._end_soon(grace_us + self._world.chance.spread(*_DIES_US))
        await self._exited

    def orphan(self) -> None:
        """The daemon is dead: its connection closes. What its threads wait for in the kernel may take long."""
        self._end_soon(self._world.chance.spread(*_ORPHANED_US))

    # --- its life ---------------------------------------------------------------------------------------------------

    @property
    def _now_us(self) -> int:
        return self._world.scheduler.now_us

    def _end_soon(self, delay_us: int) -> None:
        self._world.scheduler.after(delay_us, f"{self.process.name} ends", self.process.kill)

    def _open(self) -> None:
        if self._world.chance.happens(_NOT_OPENED * (not self._world.faults.ceased)):
            self._refuse()
            self.process.kill()
        else:
            self._tell(lambda: self._on_opened(Opened(persistent=True, threads=4)), "storage is open")

    def _refuse(self) -> None:
        refusal = NotOpened(reason="no such device", is_misconfigured=False)
        self._told_us = max(self._told_us + 1, self._now_us + _ON_ITS_WAY_US[0])
        tell = self._daemon.checked(lambda: self._on_opened(refusal))
        self._daemon.process.after(self._told_us - self._now_us, "storage cannot be opened", tell)
        self._world.seen["storage that cannot be opened"] += 1

    def _tell(self, tell: Callable[[], None], what: str) -> None:
        """The daemon hears of something, in the order in which it was said, and not after it has hung up."""
        self._told_us = max(self._told_us + 1, self._now_us + self._world.chance.spread(*_ON_ITS_WAY_US))

        def hear() -> None:
            if not self._is_closed:
                tell()

        self._daemon.process.after(self._told_us - self._now_us, what, self._daemon.checked(hear))

    def _dies(self) -> None:
        """What it said last is read before its death is taken note of."""
        seen_us = max(self._told_us + 1, self._now_us + self._world.chance.spread(*_DEATH_SEEN_US))

        def see() -> None:
            self._world.seen["storage process died"] += 1
            self._on_exit(f"was ended ({self._reason})")
            self._exited.set(None)

        self._daemon.process.after(seen_us - self._now_us, "sees that storage is dead", self._daemon.checked(see))

    # --- orders -----------------------------------------------------------------------------------------------------

    def _holder(self, sequence: int) -> Holder:
        return "storage", self.process.pid, sequence

    def _claim(self, sequence: int, kind: BlockFormat, spans: tuple[Span, ...], *, reads: bool) -> None:
        shape = self._shape(kind)
        slots, shards = _slots(spans), range(shape.geometry.shards)
        wanted = [place for shard in shards for place in shape.spans(slots, shard)]
        self._world.host.claim(self._holder(sequence), wanted, [self.process], reads=reads)

    def _shape(self, kind: BlockFormat) -> Shape:
        shapes = self._world.shapes.values()
        return next(shape for shape in shapes if shape.root[: len(kind.header_namespace)] == kind.header_namespace)

    async def _carry_out(self, order: Request) -> None:
        weather, chance = self._world.stored.weather, self._world.chance
        if weather.hangs and chance.happens(weather.hangs):
            self._world.seen["storage order that hangs"] += 1
            await self.process.sleep(chance.spread(*_HANGS_US), f"hangs in order {order.sequence}")
        await self._pass_time(f"begins order {order.sequence}")
        if isinstance(order, Fetch):
            over = await self._fetch(order)
        elif isinstance(order, Backup):
            over = await self._back_up(order)
        else:
            over = self._at_once(order, bytearray(self._world.host.bytes))
        self._world.host.give_up(self._holder(order.sequence))
        self._world.seen[f"storage order: {type(order).__name__}"] += 1
        self._world.seen["storage found wrong bytes"] += over.wrong
        what = f"storage is through with order {order.sequence}: {over.count} {over.error}"
        self._tell(lambda: self._on_reply(over), what)

    def _at_once(self, order: Request, memory: bytearray) -> Done:
        return HostCopies(memoryview(memory), self._world.stored, TIMEOUT_S).carry_out(order)

    async def _pass_time(self, what: str) -> None:
        if self._world.daemon is not self._daemon:
            raise Broken(f"{self.process.name} {self.process.pid} works on, though the next daemon has begun: {what}")
        slowness = self._world.stored.weather.slowness
        await self.process.sleep(self._world.chance.spread(*_STEP_US) * slowness, what)

    async def _fetch(self, order: Fetch) -> Done:
        """Headers vanish, values come in halves, headers come back last: those of blocks that were proven."""
        host, shape, holder = self._world.host, self._shape(order.format), self._holder(order.sequence)
        places = [(slot, shard) for slot in _slots((order.span,)) for shard in range(shape.geometry.shards)]
        result = bytearray(host.bytes)
        over = self._at_once(order, result)
        for place in places:
            host.write(holder, shape.header(*place)[0], bytes(HEADER_BYTES))
        for slot, shard in places:
            start, end = shape.block(slot, shard)
            middle = (start + end) // 2
            host.write(holder, start, bytes(result[start:middle]))
            await self._pass_time(f"order {order.sequence}: half of slot {slot}")
            host.write(holder, middle, bytes(result[middle:end]))
        for slot, shard in places:
            start, end = shape.header(slot, shard)
            header = bytes(result[start:end])
            if not any(header):
                continue
            host.write(holder, start + _FIRST_WRITE_BYTES, header[_FIRST_WRITE_BYTES:])
            await self._pass_time(f"order {order.sequence}: header {slot} but for its beginning")
            host.write(holder, start, header[:_FIRST_WRITE_BYTES])
        self._look_at(order, over, shape)
        return over

    def _look_at(self, order: Fetch, over: Done, shape: Shape) -> None:
        """What is said to be good has the bytes that its key has to have."""
        keys, generation = order.span.keys, order.format.header_generation
        for index, slot in enumerate(_slots((order.span,))[: over.count]):
            key = keys[index * 16 : index * 16 + 16]
            for shard in range(shape.geometry.shards):
                if self._world.host.read(shape.block(slot, shard)) != shape.expected(generation, key, shard):
                    raise Broken(f"order {order.sequence} of storage brings other bytes than its block's, slot {slot}")
        self._world.seen["blocks fetched from storage"] += over.count
        is_older = generation < first_of(self._daemon.cache.epoch, 0)
        self._world.seen["blocks fetched that an earlier life of the daemon had stored"] += over.count * is_older

    async def _back_up(self, order: Backup) -> Done:
        """Headers are read first, then blocks in halves."""
        host, shape = self._world.host, self._shape(order.format)
        places = [(slot, shard) for slot in _slots(order.spans) for shard in range(shape.geometry.shards)]
        found = bytearray(len(host.bytes))
        for place in places:
            start, end = shape.header(*place)
            found[start:end] = host.read((start, end))
        for slot, shard in places:
            start, end = shape.block(slot, shard)
            middle = (start + end) // 2
            found[start:middle] = host.read((start, middle))
            await self._pass_time(f"order {order.sequence}: half of slot {slot}")
            found[middle:end] = host.read((middle, end))
        over = self._at_once(order, found)
        self._world.seen["blocks written to storage"] += over.written
        return over


def _slots(spans: tuple[Span, ...]) -> list[int]:
    return list(_each(spans))


def _each(spans: tuple[Span, ...]) -> Iterator[int]:
    for span in spans:
        for first, count in pairs(span.host):
            yield from range(first, first + count)
