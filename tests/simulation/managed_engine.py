"""Engines in managed mode: their shards write straight into the device pool that the daemon holds."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

import numpy as np

from kvcached_client.blocks.block_table import compress_slots
from kvcached_client.errors import (
    DaemonFailure,
    DeadlineExceeded,
    ErrorCode,
    NoCapacity,
    Refused,
    RequestError,
    Stale,
    TransportError,
)
from kvcached_client.keys import KeyChain
from kvcached_client.protocol import engine as wire
from kvcached_client.transport.prompts import keys_behind
from kvcached_client.types import KEY_SIZE_BYTES, SessionId
from tests.core.model import expand
from tests.simulation.attachment import Attachment
from tests.simulation.engine import Engine, run_on
from tests.simulation.line import Line
from tests.simulation.managed_device import Device, DeviceShard, HeldLease, ManagedSession
from tests.simulation.managed_return import Return
from tests.simulation.memory import Shape
from tests.simulation.prefetching import prefetch
from tests.simulation.process import Outcome, Process, every
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

_LOAD_PATIENCE_US = 400 * MS
#: So often a request waits for room, then it goes without.
_REFUSALS_MAX = 4
#: The last but one: a hello that was repeated after the session that it opened was over again.
_TRY_LATER = (
    ErrorCode.POOL_BUSY,
    ErrorCode.CLEARING,
    ErrorCode.DRAINING,
    ErrorCode.UNAUTHENTICATED,
    ErrorCode.ASLEEP,
)


class ManagedEngine(Engine):
    """An engine on a replica's pool, in one process or with a process for each shard."""

    def __init__(self, world: World, name: str, replica: str) -> None:
        super().__init__(world, name)
        self.replica = replica
        self._shape: Shape = world.shapes[world.plan.replicas[replica]]
        self._device = Device(world, self._shape, name)
        self._alone = world.chance.happens(0.5)

    def process_count(self) -> int:
        return 1 if self._alone else 1 + self._shape.geometry.shards

    def prepare(self) -> None:
        self._shards: list[DeviceShard] = []

    def is_copying(self) -> bool:
        return any(shard.queue.items for shard in self._shards)

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def open_session(self) -> ManagedSession | None:
        attachment, line = Attachment(self.world, self.scheduler), Line(self.world, self.scheduler)
        try:
            identified = await attachment.identify()
            hello = wire.Hello(
                id=line.next_id(), version_min=1, version_max=1, member=identified.member, replica=self.replica
            )
            renewed = self.world.renewed.get(self.replica)
            welcome, _ = await line.ask(hello, wire.Welcome)
        except (Refused, DaemonFailure) as error:
            if error.code not in _TRY_LATER:
                raise
            attachment.hang_up()
            line.close()
            return None
        except TransportError:
            line.tell_goodbye()
            attachment.hang_up()
            return None
        if renewed is not None and welcome.generation < renewed.generation:
            raise Broken(f"a session of generation {welcome.generation}, though it was told that {renewed} had begun")
        session = ManagedSession(welcome, line)
        line.epoch = welcome.epoch
        line.on_give_back = lambda lease: self._device.end_lease(session, self.world.first_name(session, lease), 0)
        session.attachments.append(attachment)
        attachment.on_closed = session.lost
        joins = [run_on(self._process_of(shard), lambda shard=shard: self._join(session, shard))  # type: ignore[misc]
                 for shard in range(self._shape.geometry.shards)]  # fmt: skip
        joined = await every(joins)
        if not all(joined):
            self.part(session)
            line.tell_goodbye()
            if not self._alone:
                session.over = True  # and its other processes are members yet
                self._exit()
                await Outcome[None]()
            return None
        session.shards.sort(key=lambda shard: shard.index)
        self.world.seen["managed session"] += 1
        return session

    def _process_of(self, shard: int) -> Process:
        return self.scheduler if self._alone else self.processes[1 + shard]

    async def _join(self, session: ManagedSession, index: int) -> bool:
        process = self._process_of(index)
        attachment = Attachment(self.world, process)
        session.attachments.append(attachment)
        try:
            joined, (handle,) = await attachment.join(SessionId(session.number), session.token, index)
        except (Stale, DaemonFailure, TransportError):
            return False
        if joined.epoch != session.epoch:
            raise Broken(f"session of epoch {session.epoch} was given memory of epoch {joined.epoch}")
        shard = DeviceShard(index, process, self.world.device_memories[handle])
        session.shards.append(shard)
        self._shards.append(shard)
        process.start(self._device.work(shard))
        return True

    def part(self, session: ManagedSession) -> bool:
        """The only process writes no more: its word. Where there are others, they write until they are dead."""
        if session.over:
            session.line.close()
        if self._alone:
            session.works.cancelled = True
            for shard in session.shards:
                shard.memory.give_up(session.works.holder)
        for attachment in session.attachments:
            attachment.hang_up()
        return self._alone

    async def come_back(self, session: ManagedSession) -> ManagedSession | None:
        """Where the daemon was killed, mostly."""
        if not session.is_lost or self.world.chance.happens(0.3):
            return None
        return await Return(self.world, session, self._device, self.processes).come_back()

    def works_to_go_on_with(self, session: ManagedSession) -> list[Coroutine[Any, Any, None]]:
        return [self.served_one(session, self._go_on(session, lease)) for lease in list(session.held.values())]

    # --- a request --------------------------------------------------------------------------------------------------

    async def serve(self, session: ManagedSession) -> None:
        chance, welcome = self.world.chance, session.welcome
        chain = KeyChain(welcome.namespace, self._block_size, self._tokens(self.world.some_symbols()))
        chain.extend(list(range(chance.number(0, self._block_size - 1))))
        if chance.happens(0.05):
            match = wire.Match(id=session.line.next_id(), epoch=session.epoch, tokens=chain.token_count, full=True)
            await session.line.ask(match, wire.Matched, (chain.keys,))
        lease = await self._acquire(session, chain)
        if lease is None:
            self.world.seen["request without a lease"] += 1
            return
        session.held[lease.id] = lease
        await self._go_on(session, lease)

    async def _go_on(self, session: ManagedSession, lease: HeldLease) -> None:
        """From a lease to its end."""
        try:
            is_loaded = await self._take_hit(session, lease)
            if is_loaded:
                await self._use(session, lease)
            del session.held[lease.id]
            await self._release(session, lease, commits=is_loaded)
        except TransportError:
            if not session.over:  # what it sent last may have had its effect
                session.held.pop(lease.id, None)
                self.scheduler.start(self._drop(session, lease))
            raise

    @property
    def _block_size(self) -> int:
        return self.world.plan.layout.block_size

    def _tokens(self, symbols: list[int]) -> list[int]:
        return [symbol for symbol in symbols for _ in range(self._block_size)]

    async def _acquire(self, session: ManagedSession, chain: KeyChain) -> HeldLease | None:
        """A lease; None where there is no room in time."""
        chance, line, name = self.world.chance, session.line, self.next_name()
        reserve, full, priority = chance.number(0, 2), chance.happens(0.5), chance.among([0, 0, 0, -1, 2])
        await prefetch(self.world, self.scheduler, session, chain.keys, chain.token_count, full=full)
        unanswered, known = 0, session.known_blocks(chain.keys)
        for _ in range(6):
            asked = wire.Acquire(
                id=line.next_id(),
                epoch=session.epoch,
                request=name,
                tokens=chain.token_count,
                reserve=reserve,
                full=full,
                priority=priority,
                known=known,
            )
            keys = keys_behind(chain.keys, known)
            try:
                reply, frames = await line.ask(asked, wire.Acquired, (keys,), tries=chance.number(1, 2))
            except Refused as error:
                if error.code != ErrorCode.UNKNOWN_PREFIX or not known:
                    raise
                known = 0
            except TransportError:
                unanswered += 1
                if unanswered == 3:
                    raise
            except NoCapacity as error:
                await self._wait_for_room(session, error)
            else:
                table = expand(frames[0]) + expand(frames[1])
                hit, is_loading = reply.hit, bool(reply.loads)
                session.prompts.add(chain.keys[-KEY_SIZE_BYTES:])
                self.world.seen["prompt acquired behind a known one"] += known > 0
                first_name = self.world.first_name(session, reply.lease)
                return HeldLease(reply.lease, name, first_name, chain, table, hit, reply.ready, is_loading, hit, hit)
        return None

    async def _wait_for_room(self, session: ManagedSession, error: RequestError) -> None:
        if error.code == ErrorCode.CAPACITY_PENDING:
            request = wire.WaitForSlots(id=session.line.next_id(), epoch=session.epoch, blocks=1)
            await session.line.ask(request, wire.SlotsAvailable, patience_us=_LOAD_PATIENCE_US)
        await self.think()

    async def _take_hit(self, session: ManagedSession, lease: HeldLease) -> bool:
        """Read what is there, and wait for the rest of the hit; False where there are no slots for what is missing."""
        await self._device.read(session, lease, lease.ready if lease.is_loading else lease.depth)
        refusals = 0
        while lease.is_loading:
            request = wire.Load(id=session.line.next_id(), epoch=session.epoch, lease=lease.id)
            try:
                loaded, frames = await session.line.ask(request, wire.Loaded, patience_us=_LOAD_PATIENCE_US)
            except NoCapacity as error:
                refusals += 1
                if refusals == _REFUSALS_MAX:
                    return False
                await self._wait_for_room(session, error)
            except DeadlineExceeded:
                self.world.seen["load waited for again"] += 1
            else:
                self.world.seen["hit cut short"] += loaded.hit < lease.hit
                slots = expand(frames[0])
                if len(slots) != lease.hit - loaded.hit:
                    raise Broken(f"lease {lease.id}: {len(slots)} slots for {lease.hit - loaded.hit} blocks of its hit")
                lease.table[loaded.hit : lease.hit] = slots
                lease.hit = lease.depth = lease.written = loaded.hit
                lease.is_loading = False
                await self._device.read(session, lease, lease.hit)
        return True

    async def _use(self, session: ManagedSession, lease: HeldLease) -> None:
        """Compute and commit block after block, read again, and perhaps go on with generated tokens."""
        chance = self.world.chance
        if lease.table[lease.chain.block_count :]:
            await self._device.write(session, lease, len(lease.table), wait=False)
        await self._commit_up_to(session, lease, lease.chain.block_count)
        if chance.happens(0.4) and lease.depth == lease.chain.block_count:
            await self._generate(session, lease)
        if chance.happens(0.5):
            await self._device.read(session, lease, lease.depth)

    async def _generate(self, session: ManagedSession, lease: HeldLease) -> None:
        blocks = self.world.chance.number(1, 2)
        request = wire.Allocate(id=session.line.next_id(), epoch=session.epoch, lease=lease.id, blocks=blocks)
        try:
            _, frames = await session.line.ask(request, wire.Allocated)
        except NoCapacity:
            return
        lease.table += expand(frames[0])
        room = len(lease.table) * self._block_size - lease.chain.token_count
        lease.chain.extend([self.world.chance.number(0, 2)] * min(room, blocks * self._block_size))
        await self._commit_up_to(session, lease, lease.chain.block_count)

    async def _commit_up_to(self, session: ManagedSession, lease: HeldLease, end: int) -> None:
        chance, tries = self.world.chance, 4
        while lease.depth < end and tries:
            stop = min(lease.depth + chance.number(1, 3), end)
            fenced = chance.happens(0.4)
            await self._device.write(session, lease, stop, wait=not fenced)
            fence = session.works.last_fence if fenced else 0
            if lease.fence > session.signalled:
                fence = session.works.last_fence
            keys, slots = lease.chain.key_range(lease.depth, stop), lease.table[lease.depth : stop]
            self._device.stop_writing(session, slots, fence)
            request = wire.Commit(
                id=session.line.next_id(), epoch=session.epoch, lease=lease.id, start=lease.depth, fence=fence
            )
            lease.is_committing = True
            reply, _ = await session.line.ask(request, wire.Committed, (keys, _packed(slots)))
            lease.is_committing = False
            tries -= reply.depth < stop
            lease.depth = reply.depth
            await self.think()

    async def _release(self, session: ManagedSession, lease: HeldLease, *, commits: bool) -> None:
        """Give it back, at times with a last commit in the same message."""
        chance, line = self.world.chance, session.line
        frames: tuple[bytes, ...] = ()
        if commits and lease.depth < lease.chain.block_count and chance.happens(0.7):
            await self._device.write(session, lease, lease.chain.block_count, wait=False)
            slots = lease.table[lease.depth : lease.chain.block_count]
            frames = lease.chain.key_range(lease.depth, lease.chain.block_count), _packed(slots)
        if chance.happens(0.5):
            await self._device.written(session)
        fence = session.works.last_fence if lease.fence > session.signalled else 0
        if frames:
            self._device.stop_writing(session, slots, fence)
        self._device.end_lease(session, lease.first_name, fence)
        request = wire.Release(
            id=line.next_id(), epoch=session.epoch, lease=lease.id, start=lease.depth, fence=fence,
            reply=not (frames == () and chance.happens(0.1)),
        )  # fmt: skip
        if request.reply:
            await line.ask(request, wire.Released, frames)
        else:
            line.tell(request)

    async def _drop(self, session: ManagedSession, lease: HeldLease) -> None:
        """Give a lease back of which nobody knows what became."""
        last = session.works.last_fence
        self._device.end_lease(session, lease.first_name, last)
        for _ in range(20):
            request = wire.Release(id=session.line.next_id(), epoch=session.epoch, lease=lease.id, fence=last)
            try:
                await session.line.ask(request, wire.Released)
            except TransportError:
                if session.over:
                    return
            except Stale:
                session.over = True
                return
            except Refused as error:
                if error.code != ErrorCode.ALREADY_RELEASED:
                    raise
                return
            else:
                return


def _packed(slots: list[int]) -> bytes:
    return compress_slots(np.array(slots, np.int32))
