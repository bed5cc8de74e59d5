"""A second opinion on offload mode: random engines, whose shards copy when they like, and what must be true.

The model does not decide what is evicted. What it knows is in `offload_world.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import MemberLost, MembersDied, Ticked, TransferKind
from kvcached.core.refusals import Refusal
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.engine_copies import EVERY_SHARD, StorePlan
from kvcached_client.errors import ErrorCode
from kvcached_client.types import LeaseId, SessionId
from tests.core.history import Choose, Operation
from tests.core.model import BLOCK_SIZE, TTL_MS, chain_keys, tenant_of
from tests.core.offload_books import HeldLease, Job, Player
from tests.core.offload_world import SPECS, OffloadWorld
from tests.core.slab_memory import SlabMemory
from tests.core.tier_world import slots_of

T = TypeVar("T")
PLAYERS_MAX = 4
SPACES_MAX = 3


class OffloadPlayers(OffloadWorld):
    """Engines in offload mode on a cache, which others may use too.

    Attributes:
        weighted: what may happen, with how often it does.
    """

    def __init__(self, choose: Choose, cache: Cache, memory: SlabMemory) -> None:
        super().__init__(cache, memory)
        self.choose = choose
        self.now_ms = 0
        self.requests = 0
        self.weighted: list[tuple[Operation, int]] = [
            (self.open, 12),
            (self.acquire, 40),
            (self.acquire_again, 6),
            (self.store, 60),
            (self.load, 30),
            (self.settle_shard, 120),
            (self.say_again, 10),
            (self.call_off, 4),
            (self.release, 24),
            (self.clear, 2),
            (self.rot, 6),
            (self.late_word, 10),
            (self.late_report, 10),
            (self.scribble, 6),
            (self.lose_member, 2),
            (self.die, 2),
            (self.leave, 1),
        ]

    def end(self, do: Callable[[Operation], None]) -> None:
        """Everybody dies, one after the other. Nothing is held then."""
        while self.players:
            do(self.die)
        assert self.core.sessions == {}
        assert self.core.transfers == []
        assert self.core.namespaces.retired == []
        for tree in self.core.namespaces.trees:
            host = tree.members[HOST]
            assert (host.protected, host.counts[SlotState.FILLING], host.counts[SlotState.QUARANTINED]) == (0, 0, 0)

    # --- engines ----------------------------------------------------------------------------------------------------

    def open(self) -> None:
        if len(self.players) == PLAYERS_MAX:
            return
        spec = SPECS[self.choose(len(SPECS))]
        spaces = self.core.namespaces.by_root
        used = {player.spec.root for player in self.players.values()}
        full = spec.root not in spaces and len(spaces) == SPACES_MAX
        try:
            session = self.cache.open_offload(spec, self.now_ms)
        except Refusal as error:
            assert (error.code, full, used) == (ErrorCode.LIMIT, True, set(spaces))
            self.done["too many namespaces"] += 1
            return
        assert not full or used != set(spaces)
        self.done["namespace forgotten"] += full
        self.accounts.due["sessions_opened"] += 1
        self.players[session.id] = Player(session.id, spec, self.now_ms)

    def lose_member(self) -> None:
        """A process of a session is gone, or its scheduler said goodbye: the others may still copy."""
        if (player := self._active()) is not None:
            self._expires(player)
            self.cache.handle(MemberLost(player.id))

    def die(self) -> None:
        if (player := self._pick(list(self.players.values()))) is not None:
            self._gone(player, dead=True)

    def leave(self) -> None:
        if (player := self._pick(list(self.players.values()))) is not None:
            self._gone(player, dead=False)

    def tick(self) -> None:
        """Time passes; sessions that were not heard of for too long expire, unless the daemon itself stood still."""
        step_ms = (100, 300, 500, 500, 900)[self.choose(5)]
        late = self.now_ms > 0 and step_ms > TTL_MS // 2
        self.now_ms += step_ms
        for player in list(self.players.values()):
            if late:
                player.heard_ms = self.now_ms
            elif not player.expired and self.now_ms - player.heard_ms > TTL_MS:
                self._expires(player, silent=True)
        self.cache.handle(Ticked(self.now_ms))

    def heartbeat(self) -> None:
        if (player := self._active()) is not None:
            player.heard_ms = self.now_ms
            assert self.core.heartbeat(player.id, self.now_ms).id == player.id

    def _expires(self, player: Player, *, silent: bool = False) -> None:
        """It is about to: its stores are orphaned, its loads stay, and without either nothing stays."""
        player.leases.clear()
        self.accounts.due["sessions_expired"] += silent or bool(player.jobs)
        player.expired = True
        for job in player.jobs.values():
            if job.is_store:
                job.orphaned = True
                self.accounts.due["store_failed_blocks"] += len(job.blocks)
        if not player.jobs:
            self.accounts.due["sessions_ended"] += 1
            del self.players[player.id]

    def _gone(self, player: Player, *, dead: bool) -> None:
        """None of its processes copies any more."""
        self.accounts.due["sessions_ended"] += 1
        del self.players[player.id]
        for job in player.jobs.values():
            job.failed = True
            self._ends(player, job)
        if dead:
            self.cache.handle(MembersDied(player.id))
        else:
            self.cache.close_session(player.id)

    # --- leases -----------------------------------------------------------------------------------------------------

    def acquire(self) -> None:
        if (player := self._active()) is None:
            return
        chain, full = self._some_chain(), bool(self.choose(2))
        tokens = len(chain) * BLOCK_SIZE + self.choose(BLOCK_SIZE)
        limit = len(chain) if full else max(tokens - 1, 0) // BLOCK_SIZE
        edition = self._edition(player)
        slots = self._index().expect_hit(edition, chain[:limit])
        assert self.core.match(player.id, b"".join(chain), tokens, full=full) == len(slots)
        self.requests += 1
        load_from = (None, 0, 1)[self.choose(3)]
        asked = (tokens, len(chain), full, load_from)
        held = HeldLease(LeaseId(0), f"r{self.requests}", chain, asked, edition, slots, len(slots))
        lease = self._ask(player, held)
        assert (lease.hit, lease.depth, lease.generation) == (len(slots), len(slots), edition[1])
        held.id = lease.id
        assert not any(lease.id in other.leases for other in self.players.values())
        player.leases[lease.id] = held
        self.accounts.due.update(acquires=1, host_hit_blocks=lease.hit, missed_blocks=len(chain) - lease.hit)
        self._expect_load(player, held, lease, load_from)

    def _expect_load(self, player: Player, held: HeldLease, lease: OffloadLease, load_from: int | None) -> None:
        """An acquire announces the load that it was asked for, unless its engine may rather wait for stores."""
        plan = self.core.announced_load(player.id, lease)
        if load_from is None or load_from >= held.hit or lease.filling or self.core.paused:
            assert plan is None
            return
        assert plan is not None
        assert (slots_of(plan.slots), plan.generation) == (held.slots[load_from:], held.edition[1])
        blocks = list(zip(held.chain, held.slots, strict=False))[load_from:]
        self._starts(player, Job(plan.transfer, False, held.edition, player.spec, blocks, self._shards(player)))
        self.done["load announced by an acquire"] += 1

    def acquire_again(self) -> None:
        """A retry gets the same lease; a request that goes on storing already is no retry."""
        if (picked := self._lease()) is None:
            return
        player, held = picked
        if held.depth > held.hit:
            with self._refused(ErrorCode.REQUEST_CONFLICT):
                self._ask(player, held)
        else:
            assert self._ask(player, held).id == held.id

    def _ask(self, player: Player, held: HeldLease) -> OffloadLease:
        tokens, blocks, full, load_from = held.asked
        keys = b"".join(held.chain[:blocks])
        tenant = tenant_of(held.chain, int(held.request[1:]))
        return self.core.acquire(player.id, held.request, keys, tokens, full=full, load_from=load_from, tenant=tenant)

    def release(self) -> None:
        if (picked := self._lease()) is not None:
            player, held = picked
            self.core.release(player.id, held.id)
            del player.leases[held.id]
            self.accounts.due["releases"] += 1
            with self._refused(ErrorCode.ALREADY_RELEASED):
                self.core.release(player.id, held.id)

    def clear(self) -> None:
        if (player := self._active()) is not None:
            edition = self._edition(player)
            blocks = sum(edition == each for each, _ in self._index().cached)
            generation, cleared = self.core.clear(player.id)
            assert (generation > edition[1], cleared) == (True, blocks)
            self.cleared.add(edition)
            self.accounts.due["cleared_blocks"] += blocks

    # --- stores and loads -------------------------------------------------------------------------------------------

    def store(self) -> None:
        """The engine has computed some more blocks."""
        if (picked := self._lease()) is None:
            return
        player, held = picked
        while len(held.chain) < 12 and self.choose(2):
            held.chain = self._longer(held.chain)
        start, end = held.depth, held.depth + self.choose(len(held.chain) - held.depth + 1)
        keys = b"".join(held.chain[start:end])
        if start:
            with self._refused(ErrorCode.OUT_OF_ORDER, unless=held.edition != self._edition(player)):
                self.core.prepare_store(player.id, held.id, start - 1, keys)
        plan = self.core.prepare_store(player.id, held.id, start, keys)
        assert plan.generation == held.edition[1]
        if held.edition != self._edition(player):
            assert (plan.transfer, plan.depth, plan.pieces) == (0, end, [])
            self.done["store for a cleared namespace"] += 1
            return
        if self.core.paused:
            assert (plan.transfer, plan.depth, plan.pieces) == (0, start, [])
            self.done["store while paused"] += 1
            return
        self._check_plan(held, plan, start, end)
        held.depth = plan.depth
        if plan.transfer:
            depths = [depth for piece in plan.pieces for depth in range(*piece)]
            self.done["healed holes"] += sum(depth < start for depth in depths)
            blocks = list(zip((held.chain[depth] for depth in depths), slots_of(plan.slots), strict=True))
            self._starts(player, Job(plan.transfer, True, held.edition, player.spec, blocks, self._shards(player)))

    def _check_plan(self, held: HeldLease, plan: StorePlan, start: int, end: int) -> None:
        """It asks for blocks that have no copy, the first ones first, and the lease reaches to the first without."""
        depths = [depth for piece in plan.pieces for depth in range(*piece)]
        after = self._index()
        assert bool(plan.transfer) == bool(depths)
        assert depths == sorted(set(depths))
        places = [after.places.get((held.edition, key)) for key in held.chain[:end]]
        assert slots_of(plan.slots) == [place[0] for depth in depths if (place := places[depth]) is not None]
        missing = [depth for depth in range(end) if places[depth] is None]
        before = [self.accounts.index.places.get((held.edition, key)) for key in held.chain[:end]]
        assert depths == [depth for depth, place in enumerate(before) if place is None][: len(depths)]
        self.accounts.due["store_refused_blocks"] += before.count(None) - len(depths)
        assert plan.depth == max(min(missing, default=end), start)

    def load(self) -> None:
        """Its shards are to read some blocks of a hit."""
        leases = [
            (player, held)
            for player in self.players.values()
            for held in player.leases.values()
            if held.hit and not player.expired
        ]
        if (picked := self._pick(leases)) is None:
            return
        player, held = picked
        start = self.choose(held.hit)
        count = 1 + self.choose(held.hit - start)
        index = self._index()
        wanted = [(held.edition, key) for key in held.chain[start : start + count]]
        there = [index.places.get(block, (0, SlotState.FREE)) for block in wanted]
        is_cleared = held.edition != self._edition(player)
        is_lost = is_cleared or any(state is not SlotState.CACHED for _, state in there)
        is_paused = self.core.paused and not is_cleared
        with self._refused(ErrorCode.BAD_VALUE):
            self.core.prepare_load(player.id, held.id, start, held.hit - start + 1)
        code = ErrorCode.PAUSED if is_paused else ErrorCode.HIT_GONE
        with self._refused(code, unless=not (is_lost or is_paused)):
            plan = self.core.prepare_load(player.id, held.id, start, count)
            assert slots_of(plan.slots) == [slot for slot, _ in there]
            assert plan.generation == held.edition[1]
            blocks = list(zip((key for _, key in wanted), slots_of(plan.slots), strict=True))
            self._starts(player, Job(plan.transfer, False, held.edition, player.spec, blocks, self._shards(player)))

    def settle_shard(self) -> None:
        """A shard has copied, or failed to, and says so."""
        jobs = [(player, job) for player in self._actives() for job in player.jobs.values()]
        if (picked := self._pick(jobs)) is None:
            return
        player, job = picked
        shard = sorted(job.waiting)[self.choose(len(job.waiting))]
        error = "" if self.choose(12) else "copy failed"
        job.waiting.discard(shard)
        job.failed = job.failed or bool(error)
        told = self._copy(job, shard, error)
        if not job.waiting:
            del player.jobs[job.transfer]
            self._ends(player, job)
        self._tell(player.id, job, shard, error, told)

    def _copy(self, job: Job, shard: int, error: str) -> tuple[int, ...]:
        """Move a shard's bytes; which of them are not what was stored, as it will tell."""
        per_slab, bad = job.spec.host_slots_per_slab, []
        for number, (key, slot) in enumerate(job.blocks):
            if job.is_store:
                written = not (error and number % 2)  # a failed copy may have got anywhere
                self.memory.write(shard, per_slab, slot, (job.edition, key) if written else ("torn", slot))
            elif self.memory.read(shard, per_slab, slot) != (job.edition, key):
                bad.append(number)
        if not job.is_store and not self.choose(20):  # or so it thinks
            bad.append(self.choose(len(job.blocks)))
        job.corrupt.update(bad)
        return (*bad, len(job.blocks), -1)  # what is not in the load is not listened to

    def _tell(self, session: SessionId, job: Job, shard: int, error: str, corrupt: tuple[int, ...]) -> None:
        if job.is_store:
            self.core.transfer_done(session, TransferKind.STORE, job.transfer, shard, error)
        else:
            self.core.transfer_done(session, TransferKind.LOAD, job.transfer, shard, error, corrupt)

    def call_off(self) -> None:
        """The scheduler says that no shard will copy, before any does."""
        jobs = [
            (player, job)
            for player in self._actives()
            for job in player.jobs.values()
            if len(job.waiting) == job.spec.shards
        ]
        if (picked := self._pick(jobs)) is not None:
            player, job = picked
            job.failed = job.is_called_off = True
            del player.jobs[job.transfer]
            self._ends(player, job)
            self._tell(player.id, job, EVERY_SHARD, "", ())

    def say_again(self) -> None:
        """A word that was heard already, or comes late, changes nothing."""
        counters = Counter(self.cache.counters)
        for player in self._actives():
            for job in player.jobs.values():
                for shard in self._shards(player) - job.waiting:
                    self._tell(player.id, job, shard, "", ())
        for session, job in self.over[-5:]:
            if session in self.players and not self.players[session].expired:
                self._tell(session, job, EVERY_SHARD, "late", (0,))
        assert counters == self.cache.counters

    def late_word(self) -> None:
        """A session that has expired is told so, and nothing that it says is done."""
        expired = [player for player in self.players.values() if player.expired]
        if (player := self._pick(expired)) is not None:
            counters = Counter(self.cache.counters)
            calls: list[Callable[[], object]] = [
                lambda: self.core.acquire(player.id, "late", b"", 0, full=True),
                lambda: self.core.heartbeat(player.id, self.now_ms),
                lambda: self.core.clear(player.id),
                lambda: self.core.prepare_store(player.id, LeaseId(1), 0, b""),
                lambda: self.core.prepare_load(player.id, LeaseId(1), 0, 1),
                *(
                    lambda job=job: self._tell(player.id, job, 0, "", ())
                    for job in player.jobs.values()
                    if job.is_store
                ),
            ]
            for call in calls:
                with self._refused(ErrorCode.SESSION_EXPIRED):
                    call()
            assert counters == self.cache.counters

    def late_report(self) -> None:
        """A load of a session that has expired ends with its last report, which is refused all the same."""
        expired = [player for player in self.players.values() if player.expired]
        jobs = [(player, job) for player in expired for job in player.jobs.values() if not job.is_store]
        if (picked := self._pick(jobs)) is None:
            return
        player, job = picked
        shard = sorted(job.waiting)[self.choose(len(job.waiting))]
        job.waiting.discard(shard)
        told = self._copy(job, shard, "")
        if not job.waiting:
            del player.jobs[job.transfer]
            self._ends(player, job)
            if not player.jobs:
                self.accounts.due["sessions_ended"] += 1
                del self.players[player.id]
        with self._refused(ErrorCode.SESSION_EXPIRED):
            self._tell(player.id, job, shard, "", told)

    # --- bytes ------------------------------------------------------------------------------------------------------

    def scribble(self) -> None:
        """Shards of an expired session go on writing where they were told to."""
        for player in self.players.values():
            for job in player.jobs.values():
                if job.orphaned:
                    self.done["scribbled"] += 1
                    for _, slot in job.blocks:
                        for shard in job.waiting:
                            self.memory.write(shard, job.spec.host_slots_per_slab, slot, ("job", job.transfer))

    def rot(self) -> None:
        """The bytes of a stored block change by themselves, on one shard."""
        if (block := self._pick(sorted(self._index().cached))) is not None:
            slot, spec = self._index().places[block][0], self._spec(block[0])
            self.memory.write(self.choose(spec.shards), spec.host_slots_per_slab, slot, ("rotten", slot))

    def _starts(self, player: Player, job: Job) -> None:
        per_slab = job.spec.host_slots_per_slab
        self.memory.hold(job.transfer, per_slab, (slot for _, slot in job.blocks), writes=job.is_store)
        if job.is_store:
            for _, slot in job.blocks:
                self.corrupt.discard((job.edition, slot))
                for shard in range(job.spec.shards):
                    self.memory.write(shard, per_slab, slot, ("job", job.transfer))
        assert job.transfer not in {known.transfer for _, known in self.over}
        player.jobs[job.transfer] = job

    def _ends(self, player: Player, job: Job) -> None:
        """Every shard is through with a copy, or dead; the cache is about to be told."""
        self.memory.give_back(job.transfer)
        self.over.append((player.id, job))
        due = self.accounts.due
        if job.is_store:
            if not job.failed:
                self.accounts.ended.update((job.edition, key) for key, _ in job.blocks)
            elif not job.orphaned:
                due["store_failed_blocks"] += len(job.blocks)
            return
        arrived = 0 if job.failed else min(job.corrupt, default=len(job.blocks))
        due["loaded_blocks"] += arrived
        due["load_called_off_blocks" if job.is_called_off else "load_failed_blocks"] += len(job.blocks) - arrived
        for number in job.corrupt:
            key, slot = job.blocks[number]
            self.corrupt.add((job.edition, slot))
            for held in (held for each in self.players.values() for held in each.leases.values()):
                if held.edition == job.edition and (key, slot) in zip(held.chain, held.slots, strict=False):
                    held.lost.add(key)
            readers = self._readers(job.edition, slot)
            for reader, at in readers:
                reader.corrupt.add(at)
                self.done["corrupt while another reads"] += 1
            if not readers and self.accounts.index.places.get((job.edition, key), (None,))[0] == slot:
                self.accounts.punched.add((job.edition, key))

    # --- choices ----------------------------------------------------------------------------------------------------

    @contextmanager
    def _refused(self, code: ErrorCode, *, unless: bool = False) -> Iterator[None]:
        """What is inside is refused with a code, unless it is not."""
        try:
            yield
        except Refusal as error:
            assert (error.code, unless) == (code, False)
            self.done[f"refused: {code}"] += 1
        else:
            assert unless, f"not refused: {code}"

    def _pick(self, things: list[T]) -> T | None:
        return things[self.choose(len(things))] if things else None

    def _actives(self) -> list[Player]:
        return [player for player in self.players.values() if not player.expired]

    def _active(self) -> Player | None:
        return self._pick(self._actives())

    def _lease(self) -> tuple[Player, HeldLease] | None:
        return self._pick([(player, held) for player in self._actives() for held in player.leases.values()])

    def _shards(self, player: Player) -> set[int]:
        return set(range(player.spec.shards))

    def _some_chain(self) -> list[bytes]:
        """Long enough to need room, alike enough to be shared. The same keys mean other bytes in each namespace."""
        symbols = [int(not self.choose(6)) for _ in range(self.choose(9))]
        return self._named((*symbols, self.choose(3)))

    def _longer(self, chain: list[bytes]) -> list[bytes]:
        return self._named((*self.symbols[chain[-1]], self.choose(2)) if chain else (self.choose(2),))

    def _named(self, symbols: tuple[int, ...]) -> list[bytes]:
        keys = chain_keys(symbols)
        self.symbols.update({key: symbols[: at + 1] for at, key in enumerate(keys)})
        return keys
