"""Engines in offload mode: a scheduler that asks, and shards that copy by themselves and say when they are through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from kvcached_client.errors import (
    DaemonFailure,
    DeadlineExceeded,
    ErrorCode,
    Refused,
    RequestError,
    Stale,
    TransportError,
    request_error,
)
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.transport.prompts import keys_behind
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, SessionId, unpack_ranges
from tests.core.model import chain_keys, expand
from tests.simulation.attachment import Attachment
from tests.simulation.copying import host_blocks
from tests.simulation.engine import Engine, EngineSession, run_on
from tests.simulation.line import Line, attempt, is_not_written_down
from tests.simulation.memory import Holder
from tests.simulation.offload_shard import Copy, Shard
from tests.simulation.prefetching import prefetch, wait_for_stores
from tests.simulation.process import every
from tests.simulation.scheduler import Broken

if TYPE_CHECKING:
    from tests.simulation.plan import OffloadModel
    from tests.simulation.world import World

P = TypeVar("P", wire.LoadPrepared, wire.StorePrepared, wire.StoresPrepared)


#: As many namespaces as there may be; or a hello that was repeated after the session that it opened was over again.
_TRY_LATER = (ErrorCode.LIMIT, ErrorCode.DRAINING, ErrorCode.UNAUTHENTICATED)
#: A load that is not to be had is computed.
_NOT_LOADED = (ErrorCode.HIT_GONE, ErrorCode.PAUSED)


class OffloadSession(EngineSession):
    """A session in a namespace.

    Attributes:
        unsettled: preparations without an answer: there may be a copy to call off.
        floor: the generation that the namespace has reached for sure.
    """

    def __init__(self, welcome: wire.WelcomeOffload, line: Line) -> None:
        super().__init__(welcome.session, welcome.token, welcome.epoch, line)
        self.welcome = welcome
        self.unsettled: list[tuple[wire.PrepareLoad | wire.PrepareStore | wire.PrepareStores, tuple[bytes, ...]]] = []

    @property
    def holder(self) -> Holder:
        return "session", self.welcome.daemon_epoch, self.number


class _Announced(NamedTuple):
    """A load that no shard knows yet: blocks of a hit from a depth on."""

    transfer: int
    generation: int
    start: int
    slots: list[int]


@dataclass
class _Lease:
    """What a request holds; `depth` is where its next store starts."""

    id: LeaseId
    keys: bytes
    hit: int
    depth: int
    floor: int  #: the generation that its hit may not be older than
    filling: int  #: blocks behind the hit that others were storing
    load: _Announced | None  #: what the acquire has announced, until the shards are told


class OffloadEngine(Engine):
    """An engine that keeps its own device memory, in a namespace that others may use, too."""

    def __init__(self, world: World, name: str, model: OffloadModel) -> None:
        super().__init__(world, name)
        self._model = model
        self._alone = model.shape.geometry.shards == 1 and world.chance.happens(0.5)
        self._shards: list[Shard] = []
        self._instance = b""

    def process_count(self) -> int:
        return 1 if self._alone else 1 + self._model.shape.geometry.shards

    def prepare(self) -> None:
        self._instance = self.name.encode().ljust(12, b"-")[:12] + self._lives.to_bytes(4, "big")
        shards = range(self._model.shape.geometry.shards)
        self._shards = [
            Shard(self.world, self._model.shape, index, self.scheduler if self._alone else self.processes[1 + index])
            for index in shards
        ]

    def is_copying(self) -> bool:
        return any(shard.is_storing for shard in self._shards)

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def open_session(self) -> OffloadSession | None:
        attachment, line = Attachment(self.world, self.scheduler), Line(self.world, self.scheduler)
        model, geometry = self._model, self._model.shape.geometry
        try:
            identified = await attachment.identify()
            hello = wire.HelloOffload(
                id=line.next_id(),
                version_min=1,
                version_max=1,
                member=identified.member,
                engine="simulated",
                instance=self._instance,
                label=model.label,
                keyspace=model.keyspace,
                block_size=model.block_size,
                shards=geometry.shards,
                block_bytes=geometry.block_bytes,
                fingerprint=model.shape.fingerprint,
            )
            welcome, _ = await line.ask(hello, wire.WelcomeOffload)
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
        if welcome.namespace != model.shape.root:
            raise Broken(f"namespace {model.label} has another root now")
        session = OffloadSession(welcome, line)
        line.epoch = welcome.epoch
        session.attachments.append(attachment)
        attachment.on_closed = session.lost
        joins = [run_on(shard.process, lambda shard=shard: self._join(session, shard)) for shard in self._shards]  # type: ignore[misc]
        joined = await every(joins)
        if not all(joined):
            session.over = True
            self.part(session)
            return None
        self.world.seen["offload session"] += 1
        return session

    async def _join(self, session: OffloadSession, shard: Shard) -> bool:
        shard.leave()  # what it did before is over: to join says so
        attachment = Attachment(self.world, shard.process)
        try:
            joined, _ = await attachment.join(SessionId(session.number), session.token, shard.index)
        except (Stale, TransportError):
            attachment.hang_up()
            return False
        if not isinstance(joined, JoinedHost):
            raise Broken(f"a shard in offload mode joined: {joined}")
        shard.enter(session.number, session.token, session.welcome.daemon_epoch, attachment)
        return True

    def part(self, session: OffloadSession) -> bool:
        if session.over:
            session.line.close()
        session.attachments[0].hang_up()
        return True

    # --- a request --------------------------------------------------------------------------------------------------

    async def serve(self, session: OffloadSession) -> None:
        chance, line = self.world.chance, session.line
        await self._call_off_late(session)
        keys = b"".join(chain_keys((self._model.number, *self.world.some_symbols())))
        tokens = len(keys) // KEY_SIZE_BYTES * self._model.block_size + chance.number(0, self._model.block_size - 1)
        if chance.happens(0.05):
            match = wire.Match(id=line.next_id(), epoch=session.epoch, tokens=tokens, full=True)
            await line.ask(match, wire.Matched, (keys,))
        if chance.happens(0.06 if self.world.reboots else 0.02):
            await self._clear(session)
        lease = await self._acquire(session, keys, tokens)
        if lease.filling and chance.happens(0.8):
            lease = await self._wait_for_stores(session, lease, tokens)
        try:
            copies = await self._use(session, lease)
            if chance.happens(0.5):
                await every([copy.done for copy in copies])
        except TransportError:
            self.scheduler.start(self._drop(session, lease))
            raise
        self.scheduler.start(self._drop(session, lease))

    async def _acquire(self, session: OffloadSession, keys: bytes, tokens: int) -> _Lease:
        name, full, tries = self.next_name(), self.world.chance.happens(0.5), 3
        load_from = self.world.chance.among((None, 0, 0, 1))
        floor = self.world.generations[self._model.shape.root]
        await prefetch(self.world, self.scheduler, session, keys, tokens, full=full)
        known = session.known_blocks(keys)
        while True:
            asked = wire.Acquire(
                id=session.line.next_id(),
                epoch=session.epoch,
                request=name,
                tokens=tokens,
                full=full,
                known=known,
                load_from=load_from,
            )
            frame, most = keys_behind(keys, known), self.world.chance.number(1, 2)
            try:
                held, frames = await session.line.ask(asked, wire.Held, (frame,), tries=most)
            except Refused as error:
                if error.code != ErrorCode.UNKNOWN_PREFIX or not known:
                    raise
                known = 0
            except DeadlineExceeded:
                tries -= 1
                if not tries:
                    raise
            else:
                session.prompts.add(keys[-KEY_SIZE_BYTES:])
                self.world.seen["prompt acquired behind a known one"] += known > 0
                load = self._announced(held, frames, load_from)
                return _Lease(LeaseId(held.lease), keys, held.hit, held.hit, floor, held.filling, load)

    def _announced(self, held: wire.Held, frames: list[bytes], load_from: int | None) -> _Announced | None:
        if not held.transfer:
            return None
        slots = expand(frames[0])
        if load_from is None or held.filling or len(slots) != held.hit - load_from:
            raise Broken(f"asked to load from {load_from} on, the daemon announces {len(slots)} blocks: {held}")
        self.world.seen["load announced by an acquire"] += 1
        return _Announced(held.transfer, held.generation, load_from, slots)

    async def _wait_for_stores(self, session: OffloadSession, lease: _Lease, tokens: int) -> _Lease:
        """Give the lease back, wait until others have stored what is behind its hit, and acquire again."""
        self.world.seen["store of another engine waited for"] += 1
        await self._drop(session, lease)
        if self.world.chance.happens(0.1):
            self.scheduler.start(attempt(self._clear(session)))
        await wait_for_stores(self.world, session, lease.keys, tokens)
        return await self._acquire(session, lease.keys, tokens)

    async def _use(self, session: OffloadSession, lease: _Lease) -> list[Copy]:
        """Load the hit, compute the rest, and store it in some pieces."""
        chance, blocks = self.world.chance, len(lease.keys) // KEY_SIZE_BYTES
        if lease.hit and chance.happens(0.9):
            await self._load(session, lease)
        copies: list[Copy] = []
        for _ in range(4):
            await self.think()
            if lease.depth >= blocks or session.over:
                break
            copies += await self._store(session, lease, min(lease.depth + chance.number(1, 4), blocks))
        return copies

    async def _load(self, session: OffloadSession, lease: _Lease) -> None:
        load, lease.load = lease.load or await self._prepared(session, lease), None
        if load is None:
            return
        if load.generation < lease.floor:
            raise Broken(f"a load of generation {load.generation}, though {lease.floor} had begun before it was asked")
        keys = lease.keys[load.start * KEY_SIZE_BYTES :]
        parent = lease.keys[(load.start - 1) * KEY_SIZE_BYTES : load.start * KEY_SIZE_BYTES] if load.start else b""
        blocks = host_blocks(keys, load.slots, depth=load.start, parent=parent)
        copy = Copy(load.transfer, load.generation, blocks, (*session.holder,), is_store=False)
        if self.world.chance.happens(0.05):
            await self._call_off(session, copy.transfer, is_store=False)
            return
        self._hand_out(session, copy)
        await copy.done

    async def _prepared(self, session: OffloadSession, lease: _Lease) -> _Announced | None:
        request = wire.PrepareLoad(
            id=session.line.next_id(), epoch=session.epoch, lease=lease.id, start=0, blocks=lease.hit
        )
        try:
            reply, frames = await self._prepare(session, request, wire.LoadPrepared)
        except (Refused, DaemonFailure) as error:
            if error.code not in _NOT_LOADED:
                raise
            return None
        return _Announced(reply.transfer, reply.generation, 0, expand(frames[0]))

    async def _store(self, session: OffloadSession, lease: _Lease, stop: int) -> list[Copy]:
        keys = lease.keys[lease.depth * KEY_SIZE_BYTES : stop * KEY_SIZE_BYTES]
        reply, frames = await self._offer(session, lease, keys)
        lease.depth = reply.depth
        if not reply.transfer:
            return []
        slots, blocks = expand(frames[1]), []
        for start, count in unpack_ranges(frames[0]):
            mine, slots = slots[:count], slots[count:]
            parent = lease.keys[(start - 1) * KEY_SIZE_BYTES : start * KEY_SIZE_BYTES] if start else b""
            named = lease.keys[start * KEY_SIZE_BYTES : (start + count) * KEY_SIZE_BYTES]
            blocks += host_blocks(named, mine, depth=start, parent=parent)
        copy = Copy(reply.transfer, reply.generation, blocks, (*session.holder,), is_store=True)
        if self.world.chance.happens(0.05):
            await self._call_off(session, copy.transfer, is_store=True)
            return []
        self._hand_out(session, copy)
        return [copy]

    async def _offer(
        self, session: OffloadSession, lease: _Lease, keys: bytes
    ) -> tuple[wire.StorePrepared | wire.StoreOutcome, list[bytes]]:
        """An offer by itself or, of every other lease, as the only one of a message for many."""
        request_id = session.line.next_id()
        if lease.id % 2:
            one = wire.PrepareStore(id=request_id, epoch=session.epoch, lease=lease.id, start=lease.depth)
            return await self._prepare(session, one, wire.StorePrepared, (keys,))
        offer = wire.StoreOffer(lease.id, lease.depth, len(keys) // KEY_SIZE_BYTES)
        many = wire.PrepareStores(id=request_id, epoch=session.epoch, offers=(offer,))
        reply, frames = await self._prepare(session, many, wire.StoresPrepared, (keys,))
        (outcome,) = reply.outcomes
        if outcome.refusal is not None:
            raise request_error(outcome.refusal, outcome.why, "")
        return outcome, frames

    def _hand_out(self, session: OffloadSession, copy: Copy) -> None:
        """Every shard is told of a copy, soon."""
        copy.waiting = len(self._shards)
        for shard in self._shards:
            delay_us = self.world.chance.spread(50, 5000)
            shard.process.after(
                delay_us, f"hears of transfer {copy.transfer}", lambda shard=shard: shard.take(session, copy)  # type: ignore[misc]
            )  # fmt: skip

    async def _drop(self, session: OffloadSession, lease: _Lease) -> None:
        """Give a lease back; asked again for as long as nobody answers."""
        load = 0 if lease.load is None else lease.load.transfer
        request = wire.Release(id=session.line.next_id(), epoch=session.epoch, lease=lease.id, call_off=load)
        await attempt(session.line.ask(request, wire.Released, tries=20))

    async def _clear(self, session: OffloadSession) -> None:
        request = wire.Clear(id=session.line.next_id(), epoch=session.epoch)
        try:
            reply, _ = await session.line.ask(request, wire.Cleared, tries=6)
        except DaemonFailure as error:
            if not is_not_written_down(error):
                raise
            self.world.seen["clear that could not be written down"] += 1
            return
        root = self._model.shape.root
        self.world.generations[root] = max(self.world.generations[root], reply.generation)

    # --- copies that are not made -----------------------------------------------------------------------------------

    async def _prepare(
        self,
        session: OffloadSession,
        request: wire.PrepareLoad | wire.PrepareStore | wire.PrepareStores,
        expected: type[P],
        frames: tuple[bytes, ...] = (),
    ) -> tuple[P, list[bytes]]:
        try:
            return await session.line.ask(request, expected, frames, tries=self.world.chance.number(1, 3))
        except DeadlineExceeded:
            session.unsettled.append((request, frames))
            raise

    async def _call_off_late(self, session: OffloadSession) -> None:
        """What was not answered in time is asked once more with the same id, to be called off."""
        while session.unsettled:
            request, frames = session.unsettled.pop(0)
            is_store = not isinstance(request, wire.PrepareLoad)
            try:
                reply, _ = await session.line.ask(request, wire.Header, frames)
            except Stale:
                raise
            except RequestError:
                continue
            except TransportError:
                session.unsettled.append((request, frames))
                raise
            granted = reply.outcomes[0] if isinstance(reply, wire.StoresPrepared) else reply
            if isinstance(granted, wire.LoadPrepared | wire.StorePrepared | wire.StoreOutcome) and granted.transfer:
                self.world.seen["late copy called off"] += 1
                await self._call_off(session, granted.transfer, is_store=is_store)

    async def _call_off(self, session: OffloadSession, transfer: int, *, is_store: bool) -> None:
        """No shard has heard of it, and none will."""
        for shard in range(self._model.shape.geometry.shards):
            self.world.host.give_up((*session.holder, shard, transfer))
        line = session.line
        done = wire.TransferDone(
            id=line.next_id(),
            session=session.number,
            token=session.token,
            kind="store" if is_store else "load",
            transfer=transfer,
            shard=wire.EVERY_SHARD,
            error="not made" if is_store else "",
        )
        await line.ask(done, wire.Settled, tries=20)
