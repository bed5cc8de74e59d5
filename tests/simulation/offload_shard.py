"""A shard process of an engine in offload mode: it copies between its own memory and the host pool."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvcached_client.errors import Stale, TransportError
from kvcached_client.protocol import engine as wire
from tests.simulation.attachment import Attachment
from tests.simulation.copying import Cancelled, HostBlock, HostCopier
from tests.simulation.line import Line
from tests.simulation.memory import Holder, Shape
from tests.simulation.process import Mailbox, Outcome, Process
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.engine import EngineSession
    from tests.simulation.world import World

_COPY_US = (200, 3 * MS)
#: Of one copy in three: its process has to share its core.
_SLOWNESS = (1, 1, 40)


@dataclass(eq=False)
class Copy:
    """A load or store as the scheduler hands it out; `done` when every shard is through, or has heard nothing."""

    transfer: int
    generation: int
    blocks: list[HostBlock]
    holder: Holder
    is_store: bool
    waiting: int = 0
    done: Outcome[None] = field(default_factory=Outcome)

    def shard_is_through(self) -> None:
        self.waiting -= 1
        if not self.waiting:
            self.done.set(None)


class Shard:
    """Carries out copies of one session, one after the other.

    Attributes:
        is_storing: it is in the middle of a store.
    """

    def __init__(self, world: World, shape: Shape, index: int, process: Process) -> None:
        self.index = index
        self.process = process
        self.is_storing = False
        self._world = world
        self._shape = shape
        self._joined = 0  #: grows with each session that it joins or leaves
        self._session = 0
        self._token = b""
        self._epoch = 0
        self._line: Line | None = None
        self._attachment: Attachment | None = None
        self._queue: Mailbox[Copy] = Mailbox()

    def leave(self) -> None:
        """Drop everything: no copy of an earlier session is gone on with."""
        self._joined += 1
        self._world.host.give_up(("session", self._epoch, self._session, self.index))
        if self._line is not None and self._attachment is not None:
            self._line.close()
            self._attachment.hang_up()
        dropped, self._queue = self._queue.items[:], Mailbox()
        for copy in dropped:
            copy.shard_is_through()
        self._session = 0

    def enter(self, session: int, token: bytes, epoch: int, attachment: Attachment) -> None:
        """It has joined a session."""
        self._joined += 1
        self._attachment = attachment
        self._session, self._token, self._epoch = session, token, epoch
        self._line = Line(self._world, self.process)
        attachment.on_closed = self._line.close
        self.process.start(self._work(self._joined, self._queue, self._line))

    def take(self, session: EngineSession, copy: Copy) -> None:
        """A copy to make; not where it is of another session."""
        if session.number == self._session:
            self._queue.put(copy)
        else:
            copy.shard_is_through()

    async def _work(self, joined: int, queue: Mailbox[Copy], line: Line) -> None:
        while joined == self._joined:
            copy = await queue.get()
            slowness = self._world.chance.among(_SLOWNESS)
            copier = HostCopier(
                self.process,
                self._world.host,
                self._shape,
                self.index,
                copy.generation,
                lambda slowness=slowness: slowness * self._world.chance.spread(*_COPY_US),  # type: ignore[misc]
                lambda: joined == self._joined,
            )
            self.is_storing = copy.is_store
            try:
                if copy.is_store:
                    await self._store(line, copy, copier)
                else:
                    await self._load(line, copy, copier)
            except Cancelled:
                self._world.seen["copy cancelled by its shard"] += 1
            self.is_storing = False
            copy.shard_is_through()

    async def _store(self, line: Line, copy: Copy, copier: HostCopier) -> None:
        holder = (*copy.holder, self.index, copy.transfer)

        def read(index: int) -> bytes:
            return self._shape.expected(copy.generation, copy.blocks[index].name.key, self.index)

        error = "copy failed" if self._world.chance.happens(self._world.plan.copy_failures) else ""
        blocks = copy.blocks[: self._world.chance.number(0, len(copy.blocks))] if error else copy.blocks
        await copier.store(holder, blocks, read, epoch=self._epoch, transfer=copy.transfer)
        if not self._world.daemon.is_active(self._session, self._epoch):
            self._world.seen["zombie stored in the host pool"] += 1
        self._world.host.give_up(holder)
        self._world.seen["offload stored blocks"] += 0 if error else len(blocks)
        await self._say(
            line,
            wire.TransferDone(
                id=line.next_id(),
                session=self._session,
                token=self._token,
                kind="store",
                transfer=copy.transfer,
                shard=self.index,
                error=error,
            ),
            (),
        )

    async def _load(self, line: Line, copy: Copy, copier: HostCopier) -> None:
        """Headers are looked at first, checksums at what was copied."""
        bad: list[int] = []
        for index, block in enumerate(copy.blocks):
            there, found = copier.is_there(block), bytearray(self._shape.geometry.block_bytes)

            def write(offset: int, data: bytes, found: bytearray = found) -> None:
                found[offset : offset + len(data)] = data

            await copier.load(block, write, f"load {copy.transfer}: half of block {index} in slot {block.slot}")
            self._judge(copy, block, found, there=there and copier.is_there(block), bad=bad, index=index)
        await self._say(
            line,
            wire.TransferDone(
                id=line.next_id(),
                session=self._session,
                token=self._token,
                kind="load",
                transfer=copy.transfer,
                shard=self.index,
            ),
            (array("i", bad).tobytes(),) if bad else (),
        )

    def _judge(
        self, copy: Copy, block: HostBlock, found: bytearray, *, there: bool, bad: list[int], index: int
    ) -> None:
        """A block that was read is what it has to be, or known to be bad because bits have changed."""
        spans = self._shape.header(block.slot, self.index), self._shape.block(block.slot, self.index)
        if not there and self._epoch != self._world.daemon.cache.epoch:
            # Nothing is pinned any more for who began before a restart. Nobody will hear that it is through, so that
            # none of the blocks counts as loaded.
            bad.append(index)
            self._world.seen["block lost to a load of before a restart"] += 1
        elif not there:
            if not any(self._world.host.is_rotten(span) for span in spans):
                raise Broken(f"load {copy.transfer}: slot {block.slot} does not hold the block that it was given for")
            bad.append(index)
            self._world.seen["engine found corrupt blocks"] += 1
        elif bytes(found) != self._shape.expected(copy.generation, block.name.key, self.index):
            raise Broken(f"load {copy.transfer} reads other bytes than its block's, slot {block.slot}")
        else:
            self._world.seen["offload loaded blocks"] += 1

    async def _say(self, line: Line, request: wire.TransferDone, frames: tuple[bytes, ...]) -> None:
        """Say it until it is heard, or the session is over."""
        try:
            await line.ask(request, wire.Settled, frames, tries=50)
        except (Stale, TransportError):
            self._world.seen["word of a shard that nobody hears"] += 1
