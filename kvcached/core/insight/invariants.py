"""What must hold after every step, in words for the reader and in checks for the tests and the `check` verb.

Numbers are those of the design: (1) every slot in exactly one state, (2) a key at most once along a path, (4) residency
in a device pool is a prefix of every path, and no block without a copy has anything below it, (5) a slot in use is
never granted again, (6) locks are the sum over leases, fences, transfers and pins, (7) every transfer is on its way to
an end.
Checks recompute everything from the ground; nothing is taken from a running total.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.tree import PrefixTree
from kvcached.core.insight.evictable import misjudged
from kvcached.core.insight.findable import misinformed
from kvcached.core.lease import FenceHold, Lease
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import TransferKind
from kvcached.core.pins import Held
from kvcached.core.session import OffloadSession
from kvcached.core.slots.ranges import Ranges, has_holes, no_ranges, pairs, slot_count, solid_length, without_holes
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import NO_MEMORY, PrefetchState, SessionState, SlotState, TransferState
from kvcached.core.transfers.prefix_locks import PrefixLock
from kvcached.core.transfers.store_waits import NO_STORE
from kvcached.core.transfers.transfer import EngineTransfer, ShardTransfer, Transfer, WorkerTransfer
from kvcached_client.types import FenceSequence

#: A broken cache breaks everywhere; the first few say where it began.
VIOLATIONS_MAX = 50


def check(cache: Cache) -> list[str]:
    """Every broken invariant in words, at most `VIOLATIONS_MAX`; an empty list is the only good answer."""
    found: list[str] = []
    for violation in _violations(cache):
        found.append(violation)
        if len(found) == VIOLATIONS_MAX:
            break
    return found


def check_counts(cache: Cache) -> list[str]:
    """The part that needs no walk through the index: the states of every pool's slots add up (1)."""
    hosts = [tree.host for tree in cache.trees if tree.host is not None]
    return [
        f"pool {pool.name}: states {counted}, counts say {pool.counts} of {pool.slots}"
        for pool in (*cache.pools.values(), *hosts)
        if (counted := pool.count_states()) != pool.counts or sum(counted) != pool.slots
    ]


def _violations(cache: Cache) -> Iterator[str]:
    yield from check_counts(cache)
    yield from _slabs(cache)
    yield from _namespaces(cache)
    yield from _store_waits(cache)
    for tree in cache.trees:
        runs = list(tree.runs())
        yield from _tree_shape(tree, runs)
        transfers = [each for each in cache.transfers.values() if each.tree is tree]
        yield from _transfers(transfers)
        for pool in tree.pools:
            sessions = [session for session in cache.managed.sessions.values() if session.pool is pool]
            mine = [each for each in transfers if each.pool is pool]
            if pool.clearing and any(session.state is SessionState.ACTIVE for session in sessions):
                yield f"pool {pool.name} is being cleared, and somebody has a session on it"
            if pool.state in NO_MEMORY and (sessions or mine or pool.free < pool.slots):
                yield f"pool {pool.name} is {pool.state}, with {len(sessions)} sessions and counts {pool.counts}"
            yield from _residency(tree, runs, pool, pool.index)
            yield from _slots(pool, _device_claims(runs, pool, sessions, mine))
            leases = [lease for session in sessions for lease in session.leases.values()]
            holds = [hold for session in sessions for hold in session.holds]
            held = [each for each in mine if not each.orphaned]
            yield from _path_locks(
                tree, runs, pool, pool.index, [*leases, *holds, *_ends(held), *cache.pins.held(tree, pool)]
            )
            yield from misjudged(runs, pool, pool.index)
        yield from misinformed(cache, tree, runs)
        if tree.host is not None:
            copies = [each for each in cache.offload.transfers if each.tree is tree]
            yield from _engine_transfers(copies)
            offload = list(cache.offload.sessions.values())
            counting = [lease for each in offload for lease in each.leases.values() if lease.tree is tree]
            yield from _residency(tree, runs, tree.host, HOST)
            stored = _storage_claims(cache, tree)
            yield from _slots(tree.host, [*_host_claims(tree, runs, [*transfers, *copies], offload), *stored])
            backups = cache.storage.backups_under_way
            backed = _ends([each for each in backups if each.tree is tree and not each.is_cleared])
            copying = [*_ends(transfers), *_ends(copies), *backed]
            yield from _prefix_locks(cache, tree)
            locked: list[_Holder] = [*cache.pins.held(tree, None), *cache.storage.locks.held(tree)]
            yield from _path_locks(tree, runs, tree.host, HOST, [*copying, *counting, *locked])
            yield from misjudged(runs, tree.host, HOST)
            yield from _copies(runs)
            yield from _tenants(tree, runs)


def _slabs(cache: Cache) -> Iterator[str]:
    """(1) Every slab is one namespace's or nobody's, and nobody has more than its cap."""
    hosts = [tree.host for tree in cache.trees if tree.host is not None]
    owners = Counter(slab for host in hosts for slab in host.slabs)
    yield from (f"slab {slab} has {count} owners" for slab, count in owners.items() if count > 1)
    slabs = cache.slab_allocator
    if hosts and len(owners) + slabs.unallocated != slabs.count:
        yield f"{len(owners)} slabs have owners and {slabs.unallocated} have none, of {slabs.count}"
    for host in hosts:
        if len(host.slabs) > host.cap:
            yield f"namespace {host.namespace[:4].hex()} has {len(host.slabs)} slabs, its cap is {host.cap}"


def _namespaces(cache: Cache) -> Iterator[str]:
    """A namespace knows how many sessions are in it: one without any may be forgotten."""
    actual = Counter(session.namespace.spec.root for session in cache.offload.sessions.values())
    for root, namespace in cache.offload.namespaces.by_root.items():
        if namespace.sessions != actual[root]:
            yield f"namespace {root[:4].hex()} counts {namespace.sessions} sessions, there are {actual[root]}"


def _store_waits(cache: Cache) -> Iterator[str]:
    """(7) A prefetch waits for a store before it asks storage, holds nothing, and is not forgotten."""
    prefetches = cache.storage.prefetches
    for number, prefetch in prefetches.under_way.items():
        is_waiting = prefetch.state is PrefetchState.WAITING
        if is_waiting != (number in prefetches.waiting) or is_waiting != (prefetch.store is not NO_STORE):
            yield f"prefetch {number} is {prefetch.state}, and waits for store {prefetch.store}"
        if is_waiting and (prefetch.copies or prefetch.arrived):
            yield f"prefetch {number} waits for a store, and has slots"
    for number in prefetches.waiting.keys() - prefetches.under_way.keys():
        yield f"prefetch {number} waits for a store, and is over"


def _tree_shape(tree: PrefixTree, runs: list[Run]) -> Iterator[str]:
    """(2) Runs hang together: starts, first keys and parents agree, and no run is held by nobody."""
    if tree.root.parent is not None or tree.root.keys or tree.root.start:
        yield "the root is not the empty run at depth 0"
    for run in runs:
        parent = run.parent
        if parent is None or parent.children is None or parent.children.get(run.first_key) is not run:
            yield f"{_name(run)} is not filed under its first key"
        elif run.start != parent.end:
            yield f"{_name(run)} starts elsewhere than its parent {_name(parent)} ends"
        if not run.keys or len(run.keys) % KEY_SIZE:
            yield f"{_name(run)} has {len(run.keys)} bytes of keys"
        if run.children == {}:
            yield f"{_name(run)} keeps an empty dict of children"
        longest = max((segment.length for segment in run.segments if segment is not None), default=0)
        if longest != run.length:
            yield f"{_name(run)} has {run.length} keys, but nobody holds more than {longest} of them"
    if len(runs) != tree.run_count:
        yield f"{len(runs)} runs are in the tree, the count says {tree.run_count}"


def _transfers(transfers: list[WorkerTransfer]) -> Iterator[str]:
    """(7) Every transfer waits for shards or for other transfers, and is of the size it says."""
    for transfer in transfers:
        waits = transfer.waiting if transfer.state is TransferState.RUNNING else transfer.after
        if transfer.state not in {TransferState.QUEUED, TransferState.RUNNING} or not waits:
            yield f"transfer {transfer.id} is {transfer.state} and waits for nothing"
        if not transfer.blocks == slot_count(transfer.device) == slot_count(transfer.host):
            yield f"transfer {transfer.id} of {transfer.blocks} blocks has other numbers of slots"


def _engine_transfers(copies: list[EngineTransfer]) -> Iterator[str]:
    """(7) Every copy by an engine's processes waits for some of them."""
    for copy in copies:
        if copy.state is not TransferState.RUNNING or not copy.waiting:
            yield f"copy {copy.id} is {copy.state} and waits for nothing"
        if copy.blocks != slot_count(copy.host):
            yield f"copy {copy.id} of {copy.blocks} blocks has {slot_count(copy.host)} slots"


def _ends(transfers: Sequence[Transfer]) -> list[FenceHold]:
    """What transfers lock, in the form in which fences do."""
    ends = [(each.run, each.end) for each in transfers]
    return [FenceHold(FenceSequence(0), run, end, end, no_ranges()) for run, end in ends]


def _storage_claims(cache: Cache, tree: PrefixTree) -> Iterator[_Claim]:
    """Host slots that storage writes, or has written, and no index knows yet; or reads, and no index knows any more."""
    for prefetch in cache.storage.prefetches.under_way.values():
        if prefetch.chain.tree is tree:
            for copy in prefetch.copies.values():
                yield SlotState.FILLING, f"fetch {copy.id}", pairs(copy.host)
            for arrival in prefetch.arrived.values():
                yield SlotState.FILLING, f"prefetch {prefetch.id}", pairs(arrival.slots)
    for backup in cache.storage.backups_under_way:
        if backup.tree is tree:
            slots = backup.host if backup.is_cleared else backup.set_aside
            yield SlotState.QUARANTINED, f"backup {backup.id}", pairs(slots)


def _copies(runs: list[Run]) -> Iterator[str]:
    """(4) A block has a copy in some pool, or a transfer below it is about to settle that it has gone."""
    for run in runs:
        host = run.segments[HOST]
        held = max((each.length for each in run.segments[:HOST] if each is not None), default=0)
        if host is None:
            continue
        if not host.resident_children and host.ranges and host.ranges[-2] < 0 and host.protected < host.length:
            yield f"{_name(run)}: what the host pool holds ends with a hole"
        position = 0
        for first, count in pairs(host.ranges):
            position += count
            if first < 0 and position > held and not host.protected:
                yield f"{_name(run)}: block {run.start + position - 1} has no copy, and something below it has"


def _residency(tree: PrefixTree, runs: list[Run], pool: SlotPool, index: int) -> Iterator[str]:
    """(4) A pool's segments form a prefix of every path; their lengths, children and slots agree."""
    for run in (tree.root, *runs):
        segment = run.segments[index]
        if segment is None:
            continue
        if segment.run is not run:
            yield f"{_name(run)} in pool {pool.name}: the segment points at {_name(segment.run)}"
        resident = len(_child_segments(run, index))
        if segment.resident_children != resident:
            yield f"{_name(run)}: {resident} resident children, the count says {segment.resident_children}"
        if run is tree.root:
            continue
        slots = slot_count(segment.ranges)
        if not 0 < segment.length <= run.length or slots != segment.length:
            yield f"{_name(run)} in pool {pool.name}: length {segment.length}, {slots} slots, {run.length} keys"
        above = run.parent.segments[index] if run.parent else None
        solid = solid_length(segment.ranges, 0)
        if segment.solid != solid or (pool is not tree.host and has_holes(segment.ranges)):
            yield f"{_name(run)} in pool {pool.name}: {solid} blocks before a hole, not {segment.solid}"
        if above is None or run.parent is None or above.length != run.parent.length:
            yield f"{_name(run)} in pool {pool.name}: its parent is not wholly resident"


_Claim = tuple[SlotState, Run | str, Iterable[tuple[int, int]]]


def _slots(pool: SlotPool, claims: Iterable[_Claim]) -> Iterator[str]:
    """(1, 5) Whoever claims a slot, its state says the same, and nobody else claims it."""
    claimed = bytearray(pool.slots)
    for state, owner, ranges in claims:
        for first, count in ranges:
            if count <= 0 or not pool.holds(first, count, state):
                yield f"{_slots_name(pool, first, count, owner)} are not all {state.name}"
            elif any(claimed[first : first + count]):
                yield f"{_slots_name(pool, first, count, owner)} are claimed by somebody else too"
            claimed[first : first + count] = b"\1" * count
    if sum(claimed) != pool.slots:
        yield f"pool {pool.name}: {pool.slots - sum(claimed)} slots belong to nobody"


def _device_claims(
    runs: list[Run], pool: DevicePool, sessions: list[ManagedSession], transfers: list[WorkerTransfer]
) -> Iterator[_Claim]:
    yield SlotState.FREE, "the free list", pool.free_ranges()
    loads = [each for each in transfers if each.kind is TransferKind.LOAD]
    filling = {slot for load in loads for slot in _expand(load.device)}
    for run in runs:
        segment = run.segments[pool.index]
        if segment is not None:
            yield from _index_claims(run, segment.ranges, filling)
    orphaned = [load for load in loads if load.orphaned]
    for load in orphaned:
        yield SlotState.FILLING, f"load {load.id}, orphaned", pairs(load.device)
    if sum(load.blocks for load in orphaned) != pool.orphaned:
        yield SlotState.FILLING, f"a count of {pool.orphaned} orphaned slots", [(0, 0)]
    for session in sessions:
        for lease in session.leases.values():
            yield SlotState.LEASED, f"lease {lease.id}", pairs(lease.open)
            yield SlotState.LEASED, f"scratch of lease {lease.id}", pairs(lease.scratch)
        yield SlotState.LEASED, f"copies shared in session {session.id}", [(slot, 1) for slot in session.shared_copies]
        for hold in session.holds:
            yield SlotState.FENCED, f"fence {hold.fence} of session {session.id}", pairs(hold.slots)
        yield SlotState.QUARANTINED, f"quarantine of session {session.id}", pairs(session.quarantined)


def _host_claims(
    tree: PrefixTree, runs: list[Run], transfers: Sequence[ShardTransfer], offload: list[OffloadSession]
) -> Iterator[_Claim]:
    host = tree.host
    if host is None:
        return
    yield SlotState.FREE, "the free list", host.free_ranges()
    size = host.slots_per_slab
    absent = set(range(host.slots // size)) - host.slabs if size else set()
    yield SlotState.ABSENT, "no slab", [(slab * size, size) for slab in absent]
    for session in offload:
        for pool, slots in session.quarantined:
            if pool is host:
                yield SlotState.QUARANTINED, f"quarantine of session {session.id}", pairs(slots)
    filling = {slot for each in transfers if each.kind is TransferKind.STORE for slot in _expand(each.host)}
    for run in runs:
        segment = run.segments[HOST]
        if segment is not None:
            yield from _index_claims(run, without_holes(segment.ranges), filling)


def _index_claims(run: Run, ranges: Ranges[int], filling: set[int]) -> Iterator[_Claim]:
    """Slots of a run are CACHED, but for those that a transfer writes."""
    if not filling:
        yield SlotState.CACHED, run, pairs(ranges)
        return
    slots = _expand(ranges)
    yield SlotState.FILLING, run, [(slot, 1) for slot in slots if slot in filling]
    yield SlotState.CACHED, run, [(slot, 1) for slot in slots if slot not in filling]


def _expand(ranges: Ranges[int]) -> list[int]:
    return [slot for first, count in pairs(ranges) for slot in range(first, first + count)]


def _prefix_locks(cache: Cache, tree: PrefixTree) -> Iterator[str]:
    """(6) A prefix is locked for a prefetch under way, or for a time for a living session that may acquire it."""
    locks, under_way = cache.storage.locks, cache.storage.prefetches.under_way
    sessions = cache.managed.sessions | cache.offload.sessions
    for number, lock in locks.all():
        if lock.tree is not tree:
            continue
        if (lock.until_ms is None) != (number in under_way):
            yield f"the lock for prefetch {number} ends at {lock.until_ms}, which is not what the prefetch says"
        if lock.until_ms is not None and (not lock.sessions or not locks.now_ms < lock.until_ms):
            yield f"nobody waits for the lock of prefetch {number}, or its time is over"
        for session in lock.sessions:
            if session not in sessions or sessions[session].state is not SessionState.ACTIVE:
                yield f"the lock for prefetch {number} waits for session {session}, which is over"


#: Whatever locks a path.
_Holder = Lease | FenceHold | Held | PrefixLock


def _path_locks(
    tree: PrefixTree, runs: list[Run], pool: SlotPool, index: int, holders: Iterable[_Holder]
) -> Iterator[str]:
    """(6) Locks are what leases, fences, transfers and pins hold, and protection is what follows from them."""
    due: dict[int, Counter[int]] = {}  # by identity of the run: how many holders end at which depth
    for holder in holders:
        run = tree.resolve(holder.run, holder.depth)
        segment = run.segments[index]
        if holder.depth and (segment is None or not run.start < holder.depth <= run.start + segment.length):
            yield f"pool {pool.name}: a holder at depth {holder.depth} reaches past {_name(run)}"
        elif holder.depth:
            due.setdefault(id(run), Counter())[holder.depth] += 1
    protected = 0
    for run in runs:
        segment = run.segments[index]
        if segment is None:
            continue
        locks, held = segment.locks or {}, dict(due.get(id(run), {}))
        below = sum(1 for child in _child_segments(run, index) if child.protected)
        expected = segment.length if below else max(segment.locked - run.start, 0)
        protected += expected
        for wrong in (
            locks != held and f"locks {locks}, holders say {held}",
            segment.locked != max(locks, default=0) and f"deepest lock {segment.locked}, locks {locks}",
            segment.locked_children != below and f"{below} locked children, not {segment.locked_children}",
            segment.protected != expected and f"{segment.protected} blocks protected, should be {expected}",
        ):
            if wrong:
                yield f"{_name(run)} in pool {pool.name}: {wrong}"
    if protected != pool.protected:
        yield f"pool {pool.name}: {protected} blocks protected, the count says {pool.protected}"


def _tenants(tree: PrefixTree, runs: list[Run]) -> Iterator[str]:
    """What continues a tenant's blocks is its own, and the count of them is right."""
    actual: Counter[str] = Counter()
    for run in runs:
        if run.parent is not None and run.parent.parent is not None and run.tenant != run.parent.tenant:
            yield f"{_name(run)} is of tenant {run.tenant!r}, and continues one of {run.parent.tenant!r}"
        segment = run.segments[HOST]
        if segment is not None and run.tenant:
            actual[run.tenant] += slot_count(without_holes(segment.ranges))
    counted = Counter() if tree.tenants is None else tree.tenants.blocks
    if +actual != +counted:
        yield f"tenants have {dict(+actual)} blocks, the counts say {dict(+counted)}"


def _child_segments(run: Run, index: int) -> list[Segment]:
    segments = (child.segments[index] for child in (run.children or {}).values())
    return [segment for segment in segments if segment is not None]


def _slots_name(pool: SlotPool, first: int, count: int, owner: Run | str) -> str:
    name = owner if isinstance(owner, str) else _name(owner)
    return f"pool {pool.name}: slots [{first}, {first + count}) of {name}"


def _name(run: Run) -> str:
    return f"run [{run.start}, {run.end}) {run.first_key[:4].hex() or 'root'}"
