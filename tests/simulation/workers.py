"""The workers of a replica: copies take time, and workers may be slow, hang, fail, or die in the middle of a block."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached.core.messages import AbandonLoad, HurryTransfer, PoolRestored, StartTransfer, TransferKind, WorkerDied
from kvcached.core.slots.states import SlotState
from kvcached.service.replica import Settled
from kvcached_client.types import ShardIndex, TransferId
from tests.core.tier_world import slots_of
from tests.simulation.copying import HostBlock, HostCopier, host_blocks
from tests.simulation.memory import DeviceMemory, Holder, Shape
from tests.simulation.process import Mailbox, Process
from tests.simulation.scheduler import MS, Broken, Event

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World

#: A shard that gets on with nothing for so long is killed.
DEADLINE_US = 900 * MS
_COPY_US = (200, 3 * MS)
_PAUSE_US = (200 * MS, 900 * MS)


@dataclass(eq=False)
class _Command:
    """A copy as all shards were told of it."""

    order: StartTransfer
    settled: Settled
    generation: int
    blocks: list[tuple[HostBlock, int]]  #: with their device slots
    waiting: set[int]
    urgent: bool


@dataclass(eq=False)
class WorkerShard:
    """One worker.

    Attributes:
        heard_us: when it last acknowledged something.
        told_us: when its last acknowledgement arrives.
        slowness: how many times longer than usual a copy takes.
        exit_seen: the daemon knows that it is dead.
        lanes: commands that wait, stores and loads apart. One of each is carried out at a time.
    """

    index: int
    process: Process
    memory: DeviceMemory
    lanes: dict[TransferKind, Mailbox[_Command]] = field(
        default_factory=lambda: {kind: Mailbox() for kind in TransferKind}
    )
    heard_us: int = 0
    told_us: int = 0
    slowness: int = 1
    fails_next: bool = False
    exit_seen: bool = False

    @property
    def waiting(self) -> list[_Command]:
        """Commands that it has not begun."""
        return [command for lane in self.lanes.values() for command in lane.items]


class SimulatedWorkers:
    """`kvcached.service.replica.Workers` without processes: one replica's workers as one daemon has them.

    Args:
        memories: of each shard, which an earlier daemon has left; None = new ones; empty = it sleeps.
    """

    def __init__(
        self,
        world: World,
        daemon: Daemon,
        replica: str,
        shape: Shape,
        slots: int,
        memories: list[DeviceMemory] | None,
        generation: int,
    ) -> None:
        self._world = world
        self._daemon = daemon
        self._replica = replica
        self._shape = shape
        self._slots = slots
        self._shard_count = shape.geometry.shards
        self._commands: dict[TransferId, _Command] = {}
        self._ordered: set[TransferId] = set()
        self._lost = False
        self._retired: Callable[[], None] | None = None
        self.generation = generation
        self.is_degraded = False
        self.last_loss = ""
        self.restarts = 0
        self.registered = ()
        self.is_kept = bool(memories)
        self.memories = (
            memories
            if memories is not None
            else [
                world.new_device_memory(f"{replica}/{index}", slots, shape.geometry.block_bytes)
                for index in range(self._shard_count)
            ]
        )
        self.shards = self._new_shards()

    def _begin(self, shard: WorkerShard) -> WorkerShard:
        shard.process.on_death.append(lambda: self._dies(shard))
        for lane in shard.lanes.values():
            shard.process.start(self._work(shard, lane))
        return shard

    def _new_shards(self) -> list[WorkerShard]:
        shards = []
        for index in range(len(self.memories)):
            process = self._world.new_process(f"worker {self._replica}/{index}")
            shards.append(self._begin(WorkerShard(index, process, self.memories[index])))
        return shards

    # --- what the service asks for ----------------------------------------------------------------------------------

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        return (self.memories[shard].handle,)

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        if transfer.transfer in self._ordered:
            raise Broken(f"transfer {transfer.transfer} was ordered twice")
        self._ordered.add(transfer.transfer)
        if transfer.kind is TransferKind.STORE:
            self._daemon.policies.look_at_store(self._replica)
        if self._lost:
            for index in range(self._shard_count):
                self._refuse(transfer, settled, ShardIndex(index))
            return
        blocks = [
            (block, device)
            for span in transfer.spans
            for block, device in zip(
                host_blocks(span.keys, slots_of(span.host), depth=span.depth, parent=span.parent),
                slots_of(span.device),
                strict=True,
            )
        ]
        command = _Command(transfer, settled, self.generation, blocks, set(range(self._shard_count)), transfer.urgent)
        self._commands[transfer.transfer] = command
        for shard in self.shards:
            self._claim(shard, command)
            shard.lanes[transfer.kind].put(command)
            self._watch(shard, command, DEADLINE_US)

    def hurry(self, transfer: HurryTransfer) -> None:
        command = self._commands.get(transfer.transfer)
        if command is not None:
            command.urgent = True

    def abandon(self, load: AbandonLoad) -> None:
        if load.transfer in self._ordered:
            raise Broken(f"load {load.transfer} was ordered and is abandoned")

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        raise Broken("nobody asks for a health check here")

    def unprobed(self) -> str:
        return ""

    def retire(self, ended: Callable[[], None]) -> None:
        """End all of them, and start none again.

        Raises:
            Broken: a copy is under way.
        """
        if busy := [number for number, command in self._commands.items() if command.waiting]:
            raise Broken(f"workers of {self._replica} are ended with transfers {busy} under way")
        self._retired = ended
        if all(shard.exit_seen for shard in self.shards):
            self._daemon.process.after(0, f"workers of {self._replica} have ended", ended)
        for shard in self.shards:
            delay_us = self._world.chance.spread(50, 5 * MS)
            self._world.scheduler.after(delay_us, f"{shard.process.name} ends as asked", shard.process.kill)

    def orphan(self) -> None:
        """The daemon is dead: what waits is not begun any more."""
        for shard in self.shards:
            for command in shard.waiting:
                self._give_up(shard, command)
            for lane in shard.lanes.values():
                lane.items.clear()

    # --- copies -----------------------------------------------------------------------------------------------------

    def _holder(self, shard: WorkerShard, command: _Command) -> Holder:
        return "transfer", self._daemon.cache.epoch, command.order.transfer, shard.index

    def _claim(self, shard: WorkerShard, command: _Command) -> None:
        holder, writers = self._holder(shard, command), [shard.process]
        if command.order.kind is TransferKind.STORE:
            spans = self._shape.spans((block.slot for block, _ in command.blocks), shard.index)
            self._world.host.claim(holder, spans, writers)
        else:
            shard.memory.claim(holder, [shard.memory.block(device) for _, device in command.blocks], writers)

    async def _work(self, shard: WorkerShard, lane: Mailbox[_Command]) -> None:
        while True:
            command = await lane.get(_most_urgent)
            copier = HostCopier(
                shard.process,
                self._world.host,
                self._shape,
                shard.index,
                command.generation,
                lambda: self._copy_us(shard),
            )
            fails, shard.fails_next = shard.fails_next, False
            if fails:
                await shard.process.sleep(self._copy_us(shard), f"fails transfer {command.order.transfer}")
                self._acknowledge(shard, command, "copy failed", ())
            elif command.order.kind is TransferKind.STORE:
                await self._store(shard, command, copier)
                self._acknowledge(shard, command, "", ())
            else:
                self._acknowledge(shard, command, "", await self._load(shard, command, copier))

    def _copy_us(self, shard: WorkerShard) -> int:
        return self._world.chance.spread(*_COPY_US) * shard.slowness

    async def _store(self, shard: WorkerShard, command: _Command, copier: HostCopier) -> None:
        def read(index: int) -> bytes:
            block, device = command.blocks[index]
            data = shard.memory.read(shard.memory.block(device))
            expected = self._shape.expected(command.generation, block.name.key, shard.index)
            if device in shard.memory.unwritten or data != expected:
                raise Broken(f"store {command.order.transfer} reads other bytes than its block's, device slot {device}")
            return data

        await copier.store(
            self._holder(shard, command),
            [block for block, _ in command.blocks],
            read,
            epoch=self._daemon.cache.epoch,
            transfer=command.order.transfer,
        )
        self._world.seen["worker stored blocks"] += len(command.blocks)

    async def _load(self, shard: WorkerShard, command: _Command, copier: HostCopier) -> tuple[int, ...]:
        """Compare everything, then copy up to the first block that is bad."""
        bad = tuple(index for index, (block, _) in enumerate(command.blocks) if not copier.is_there(block))
        holder, memory = self._holder(shard, command), shard.memory
        for index, (block, device) in enumerate(command.blocks[: bad[0] if bad else None]):
            start, end = memory.block(device)
            what = f"load {command.order.transfer}: half of block {index} in device slot {device}"
            await copier.load(block, lambda offset, data, at=start: memory.write(holder, at + offset, data), what)  # type: ignore[misc]
            memory.unwritten.discard(device)
            if memory.read((start, end)) != self._shape.expected(command.generation, block.name.key, shard.index):
                raise Broken(f"load {command.order.transfer} copied other bytes than its block's, host {block.slot}")
        self._world.seen["worker loaded blocks"] += len(command.blocks) if not bad else bad[0]
        self._world.seen["worker found corrupt blocks"] += len(bad)
        return bad

    def _acknowledge(self, shard: WorkerShard, command: _Command, error: str, corrupt: tuple[int, ...]) -> None:
        """Its slots are touched no more, and the daemon hears of it. Acknowledgements do not overtake each other."""
        self._give_up(shard, command)
        now_us = self._world.scheduler.now_us
        shard.told_us = max(shard.told_us + 1, now_us + self._world.chance.spread(20, 2 * MS))

        def arrive() -> None:
            shard.heard_us = self._world.scheduler.now_us
            if shard.exit_seen:
                return  # it has been counted as failed
            self._settle(shard, command, error, corrupt)

        what = f"shard {shard.index} of {self._replica} acknowledges transfer {command.order.transfer} {error}"
        self._daemon.process.after(shard.told_us - now_us, what, self._daemon.checked(arrive))

    def _give_up(self, shard: WorkerShard, command: _Command) -> None:
        self._world.host.give_up(self._holder(shard, command))
        shard.memory.give_up(self._holder(shard, command))

    def _settle(self, shard: WorkerShard, command: _Command, error: str, corrupt: tuple[int, ...]) -> None:
        if shard.index not in command.waiting:
            raise Broken(f"shard {shard.index} settles transfer {command.order.transfer} twice")
        command.waiting.discard(shard.index)
        command.settled(ShardIndex(shard.index), error, corrupt)
        if not command.waiting:
            del self._commands[command.order.transfer]
            if command.order.transfer in self._daemon.cache.transfers:
                raise Broken(f"transfer {command.order.transfer} goes on, though every shard is through with it")

    def _refuse(self, transfer: StartTransfer, settled: Settled, shard: ShardIndex) -> None:
        daemon = self._daemon
        refuse = daemon.checked(lambda: settled(shard, "no workers", ()))
        daemon.process.after(0, f"transfer {transfer.transfer} finds no workers", refuse)

    # --- deaths -----------------------------------------------------------------------------------------------------

    def _watch(self, shard: WorkerShard, command: _Command, delay_us: int) -> Event:
        """Kill a shard that does not get on before the command's time is up."""

        def overdue() -> None:
            due_us = shard.heard_us + DEADLINE_US
            if shard.process.dead or shard.index not in command.waiting:
                return
            if due_us > self._world.scheduler.now_us:
                self._watch(shard, command, due_us - self._world.scheduler.now_us)
                return
            self._world.seen["worker killed by its deadline"] += 1
            shard.process.kill()

        what = f"deadline of transfer {command.order.transfer} on shard {shard.index}"
        return self._daemon.process.after(delay_us, what, overdue)

    def _dies(self, shard: WorkerShard) -> None:
        self._world.seen["worker died"] += 1
        if shard.waiting:
            self._world.seen["worker died with commands waiting"] += 1
        daemon = self._daemon
        seen = daemon.checked(lambda: self._see_exit(shard))
        daemon.process.after(self._world.chance.spread(50, 5 * MS), f"sees that {shard.process.name} is dead", seen)

    def _see_exit(self, shard: WorkerShard) -> None:
        shard.exit_seen = True
        if self._retired is not None:
            if all(other.exit_seen for other in self.shards):
                self._retired()
            return
        if not self._lost:
            self._lost = True
            for other in self.shards:
                self._world.scheduler.after(
                    self._world.chance.spread(10, 3 * MS), f"{other.process.name} is killed", other.process.kill
                )
            self._tell_of_loss()
        for command in list(self._commands.values()):
            if shard.index in command.waiting:
                self._fail(shard, command)
        if all(other.exit_seen for other in self.shards):
            pause_us = self._world.chance.spread(*_PAUSE_US)
            self._daemon.process.after(pause_us, f"starts workers of {self._replica}", self._restore)

    def _tell_of_loss(self) -> None:
        """A worker's death loses no cached block, and ends no session."""
        cache = self._daemon.cache
        pool = cache.pools[self._replica]
        cached, sessions = pool.counts[SlotState.CACHED], set(cache.managed.sessions)
        self._daemon.service.on_event(WorkerDied(self._replica))
        self._world.seen["device block that survived its worker"] += cached
        if pool.counts[SlotState.CACHED] < cached or sessions - set(cache.managed.sessions):
            raise Broken(f"the death of a worker of {self._replica} has lost blocks or sessions")

    def _fail(self, shard: WorkerShard, command: _Command) -> None:
        """A dead shard is through with what it was to do, in an event of its own."""
        daemon = self._daemon
        fail = daemon.checked(lambda: self._settle(shard, command, "the worker is dead", ()))
        daemon.process.after(0, f"counts transfer {command.order.transfer} as failed on {shard.index}", fail)

    def _restore(self) -> None:
        if self._retired is not None:
            return
        self.shards = self._new_shards()
        self._lost = False
        daemon = self._daemon
        restored: Callable[[], None] = lambda: daemon.service.on_event(PoolRestored(self._replica))  # noqa: E731
        self._world.seen["workers restored"] += 1
        daemon.checked(restored)()

    @property
    def busy(self) -> bool:
        """Whether some copy is under way, or workers are being replaced."""
        return (self._lost and self._retired is None) or bool(self._commands)


def _most_urgent(commands: list[_Command]) -> int:
    """Stores that somebody waits for come before others; loads are in order."""
    return next((index for index, command in enumerate(commands) if command.urgent), 0)
