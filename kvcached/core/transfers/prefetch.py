"""Blocks of a chain into the host pool: first those that others are storing, then those that storage has.

A prefetch waits for stores of other sessions under way, as long as one of them writes its next block. Then it asks
storage which of the next blocks it has, reserves slots for those and no others, and fetches them in
batches, several at a time. What has come enters the index in the order of the chain. What the index has of the chain is
locked meanwhile, and until whoever asked has acquired it. Whoever waits may stop waiting at any time: copies that were
begun end by themselves, and what they bring is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import PrefetchOver, QueryStorage, StartFetch, TransferKind, span_of
from kvcached.core.slots.ranges import Ranges, append, cut, no_ranges, section, slot_count
from kvcached.core.slots.states import PrefetchState, SlotState, TransferState
from kvcached.core.transfers.fetch_budget import FetchBudget
from kvcached.core.transfers.fetch_estimate import FetchEstimate
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage_copies import mark_backed
from kvcached.core.transfers.storage_state import Chain, Prefetch, PrefetchEnd
from kvcached.core.transfers.store_waits import NO_STORE, longest_hit, store_behind
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import StorageTransfer
from kvcached_client.types import TransferId

#: Chains under way, of all engines; and as many that wait for stores, lest an engine that hangs keeps storage from all.
PREFETCHES_MAX = 256
#: A store takes milliseconds: one that takes longer than this is of an engine that hangs.
WAIT_MS_MAX = 60_000
#: One question names at most so many blocks; a longer chain takes several.
QUERY_BLOCKS_MAX = 1024
#: One copy, and how many of one chain are under way.
FETCH_BLOCKS_MAX = 32
FETCHES_PER_CHAIN = 4


@dataclass(frozen=True, slots=True)
class PrefetchLimits:
    """How much prefetching there may be.

    Attributes:
        threshold_blocks: fewer hits than this are not fetched.
        bytes_per_s: of all prefetches together; 0 = no limit.
        slab_bytes: of the host pool, to know what a block takes.
    """

    threshold_blocks: int = 1
    bytes_per_s: int = 0
    slab_bytes: int = 0


class Prefetches:
    """Those under way.

    Args:
        limits: see there.
        table: of all transfers.
        generation: of a tree's namespace; None for a tree that no request reaches any more.
        locks: where what a prefetch continues, and what it brings, is locked.

    Attributes:
        under_way: by id.
        waiting: those of them that wait for a store.
        copies: prefetches by the copies of them that are under way.
        estimate: how long fetches take.
    """

    def __init__(
        self,
        limits: PrefetchLimits,
        table: TransferTable,
        generation: Callable[[PrefixTree], int | None],
        locks: PrefixLocks,
    ) -> None:
        self.under_way: dict[int, Prefetch] = {}
        self.waiting: dict[int, Prefetch] = {}
        self.copies: dict[TransferId, Prefetch] = {}
        self.estimate = FetchEstimate()
        self._limits = limits
        self._table = table
        self._generation = generation
        self._effects = table.effects
        self._counters = table.counters
        self._locks = locks
        self._budget = FetchBudget(limits.bytes_per_s)
        self._ticked_ms = 0

    # --- requests ---------------------------------------------------------------------------------------------------

    def find(self, chain: Chain, own: Container[TransferId]) -> Prefetch | None:
        """One that brings the same blocks already, and does not wait for one of the stores `own`."""
        for each in self.under_way.values():
            is_same = each.chain.tree is chain.tree and each.chain.keys == chain.keys
            is_own = each.id in self.waiting and each.store in own
            if is_same and not each.stopping and not is_own and self._is_current(each):
                return each
        return None

    def begin(self, prefetch: Prefetch, *, may_ask: bool) -> None:
        """Wait for a store, or ask storage if that may be asked; or say at once why neither."""
        is_stored = self._look(prefetch)
        if not is_stored and not may_ask:
            prefetch.over(PrefetchEnd.UNAVAILABLE)
        elif not is_stored and self._is_too_little(prefetch):
            self._refuse(prefetch, PrefetchEnd.NOTHING)
        elif len(self.waiting if is_stored else self._asking()) >= PREFETCHES_MAX:
            self._refuse(prefetch, PrefetchEnd.TOO_MANY)
        else:
            self.under_way[prefetch.id] = prefetch
            chain = prefetch.chain
            self._locks.begin(prefetch.id, chain.tree, chain.keys, chain.known(chain.limit))
            if is_stored:
                self.waiting[prefetch.id] = prefetch
                self._counters["store_waits"] += 1
            else:
                self._ask(prefetch)

    def stop(self, prefetch: Prefetch) -> None:
        """Begin no more copies for it, and wait for no store."""
        prefetch.stop()
        if prefetch.id in self.waiting:
            self._over(prefetch, PrefetchEnd.STOPPED)
        else:
            self._go_on(prefetch, PrefetchEnd.STOPPED)

    def halt(self) -> None:
        """Storage cannot be used: begin no more copies. Those that wait for stores go on."""
        for prefetch in self._asking():
            self.stop(prefetch)

    def look_again(self, *, may_ask: bool) -> None:
        """Go on with those whose store has ended; end those whose namespace was cleared, or that wait in vain.

        Call it after whatever may have ended a store or a session, or cleared a namespace, and when time has passed.
        """
        for prefetch in list(self.waiting.values()):
            if not self._is_current(prefetch):
                self._over(prefetch, PrefetchEnd.CLEARED)
            elif prefetch.store not in self._table.engine:
                self._go_behind_store(prefetch, may_ask=may_ask)
            elif not self._locks.is_wanted(prefetch.id):
                self._over(prefetch, PrefetchEnd.STOPPED)
            elif self._ticked_ms >= prefetch.wait_until_ms:
                self._over(prefetch, PrefetchEnd.FAILED)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        self._budget.grow(max(now_ms - self._ticked_ms, 0))
        self._ticked_ms = now_ms

    # --- what arrives -----------------------------------------------------------------------------------------------

    def answered(self, query: int, found: int, now_us: int) -> None:
        """Storage has the first `found` of the blocks that it was asked about; below 0: it could not say."""
        prefetch = self.under_way.get(query)
        if prefetch is None or prefetch.state is not PrefetchState.ASKING:
            return
        found = min(found, prefetch.asked)
        prefetch.answered(found, now_us)
        verdict = self._verdict(prefetch, found)
        if verdict is None:
            prefetch.enter(PrefetchState.FETCHING)
            self._go_on(prefetch, PrefetchEnd.FETCHED)
        else:
            self._over(prefetch, verdict)

    def settled(self, transfer: TransferId, good: int, now_us: int) -> None:
        """Storage writes the slots of a copy no more; its first `good` blocks are what had been stored."""
        prefetch = self.copies.pop(transfer, None)
        if prefetch is None:
            return
        copy = self._close(prefetch, transfer, good)
        good = max(min(good, copy.blocks), 0)
        if not self._is_current(prefetch):
            _free(copy.tree, copy.host, "namespace cleared")
            prefetch.void()
        else:
            prefetch.arrive(copy, good)
            if good < copy.blocks:
                self._counters["prefetch_failed_blocks"] += copy.blocks - good
            self._take_in(prefetch)
        if not prefetch.copies and prefetch.inserted == prefetch.next:
            self.estimate.observe(prefetch.next - prefetch.began_at, now_us - prefetch.began_us)
        self._go_on(prefetch, PrefetchEnd.FETCHED)

    def lost(self) -> None:
        """Storage is gone, and certainly touches no slot any more."""
        for transfer in list(self.copies):
            prefetch = self.copies.pop(transfer)
            copy = self._close(prefetch, transfer, 0)
            _free(copy.tree, copy.host, "storage was lost")
        for prefetch in self._asking():
            self._over(prefetch, PrefetchEnd.UNAVAILABLE)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _asking(self) -> list[Prefetch]:
        """Those that wait for no store."""
        return [prefetch for number, prefetch in self.under_way.items() if number not in self.waiting]

    def _is_too_little(self, prefetch: Prefetch) -> bool:
        return prefetch.chain.stored_limit - prefetch.next < max(self._limits.threshold_blocks, 1)

    def _look(self, prefetch: Prefetch) -> bool:
        """How much of the chain of an engine in offload mode is there; whether a store of another brings what follows.

        A hit in a device pool needs no wait: loads begin behind the stores that they need.
        """
        chain = prefetch.chain
        if chain.tree.pools:
            return False
        hit = longest_hit(chain.tree, chain.keys, chain.limit)
        store = store_behind(hit, chain.tree, chain.keys, self._table.engine_stores, prefetch.own)
        prefetch.reach(hit.depth)
        prefetch.wait_for(store, hit.filling, self._ticked_ms + WAIT_MS_MAX)
        return store is not NO_STORE

    def _go_behind_store(self, prefetch: Prefetch, *, may_ask: bool) -> None:
        """The store that a prefetch waited for is over, well or not."""
        before, chain = prefetch.next, prefetch.chain
        is_stored = self._look(prefetch)
        self._locks.extend(prefetch.id, chain.known(chain.limit))
        if is_stored:
            return
        del self.waiting[prefetch.id]
        if may_ask and not self._table.paused and not self._is_too_little(prefetch):
            self._ask(prefetch)
        else:
            self._over(prefetch, PrefetchEnd.STORED if prefetch.next > before else PrefetchEnd.FAILED)

    def _ask(self, prefetch: Prefetch) -> None:
        prefetch.enter(PrefetchState.ASKING)
        keys = prefetch.ask(QUERY_BLOCKS_MAX)
        self._effects.append(QueryStorage(prefetch.id, prefetch.namespace, prefetch.generation, keys))

    def _verdict(self, prefetch: Prefetch, found: int) -> PrefetchEnd | None:
        """Why hits are not fetched; None if they are."""
        is_first, blocks = not prefetch.fetched, prefetch.found - prefetch.next
        reasons = (
            (found < 0, PrefetchEnd.UNAVAILABLE),
            (not self._is_current(prefetch), PrefetchEnd.CLEARED),
            (self._table.paused, PrefetchEnd.UNAVAILABLE),
            (prefetch.stopping, PrefetchEnd.STOPPED),
            (not blocks, PrefetchEnd.NOTHING if is_first else PrefetchEnd.FETCHED),
            (is_first and blocks < self._limits.threshold_blocks, PrefetchEnd.BELOW_THRESHOLD),
        )
        for holds, end in reasons:
            if holds:
                return end
        tokens, rate = blocks * prefetch.chain.block_tokens, prefetch.chain.prefill_tokens_per_s
        if not self.estimate.is_worth_it(blocks, tokens, rate):
            return PrefetchEnd.RECOMPUTE
        if self._budget.is_spent:
            return PrefetchEnd.RATE_LIMITED
        prefetch.admit()
        self._budget.spend(blocks * self._block_bytes(prefetch.chain.tree))
        return None

    def _is_current(self, prefetch: Prefetch) -> bool:
        """Whether its namespace has not been cleared since it began."""
        tree = prefetch.chain.tree
        return tree.namespace == prefetch.namespace and self._generation(tree) == prefetch.generation

    def _block_bytes(self, tree: PrefixTree) -> int:
        return self._limits.slab_bytes // tree.host.slots_per_slab if tree.host and tree.host.slots_per_slab else 0

    def _go_on(self, prefetch: Prefetch, end: PrefetchEnd) -> None:
        """Begin what may be begun; where nothing is under way any more, ask on or end."""
        if prefetch.state is not PrefetchState.FETCHING:
            return  # the answer to its question is still to come
        if self._table.paused or not self._is_current(prefetch):
            prefetch.stop()
        while (
            not prefetch.stopping
            and prefetch.next < prefetch.found
            and len(prefetch.copies) < FETCHES_PER_CHAIN
            and self._fetch(prefetch)
        ):
            pass
        if prefetch.copies:
            return
        if prefetch.stopping:
            self._over(prefetch, PrefetchEnd.STOPPED if prefetch.next < prefetch.chain.stored_limit else end)
        elif prefetch.next < prefetch.found:
            self._over(prefetch, PrefetchEnd.NO_ROOM)
        elif prefetch.inserted < prefetch.next:
            self._over(prefetch, PrefetchEnd.FAILED)
        elif prefetch.asked == QUERY_BLOCKS_MAX and prefetch.next < prefetch.chain.stored_limit:
            self._ask(prefetch)
        else:
            self._over(prefetch, end)

    def _fetch(self, prefetch: Prefetch) -> bool:
        """Begin the next copy; False where the host pool has no slot for it."""
        tree, start = prefetch.chain.tree, prefetch.next
        wanted = min(prefetch.found - start, FETCH_BLOCKS_MAX)
        known = prefetch.chain.known(start)  # it may be longer than what could be locked of it
        prefetch.continue_for(known[0].tenant)
        owned = [each for each in self.under_way.values() if each.chain.tree is tree and each.tenant == prefetch.tenant]
        coming = sum(each.next - each.inserted for each in owned)
        slots = tree.reserve_host(wanted, f"prefetch {prefetch.id}", tenant=prefetch.tenant, keep=known, coming=coming)
        blocks = slot_count(slots)
        if not blocks:
            return False
        copy = StorageTransfer(
            self._table.next_id(), TransferKind.LOAD, tree, tree.root, [Piece(start, start + blocks)], slots,
            prefetch.namespace,
        )  # fmt: skip
        copy.enter(TransferState.RUNNING)
        prefetch.fetch(copy)
        self._table.fetches[copy.id] = copy
        self.copies[copy.id] = prefetch
        keys = prefetch.chain.keys[max(start - 1, 0) * KEY_SIZE : (start + blocks) * KEY_SIZE]
        span = span_of(start, keys, slots, no_ranges())
        self._effects.append(StartFetch(copy.id, prefetch.namespace, prefetch.generation, span))
        return True

    def _close(self, prefetch: Prefetch, transfer: TransferId, good: int) -> StorageTransfer:
        copy = prefetch.copies.pop(transfer)
        del self._table.fetches[transfer]
        copy.enter(TransferState.DONE if good >= copy.blocks else TransferState.FAILED)
        return copy

    def _take_in(self, prefetch: Prefetch) -> None:
        """Put into the index what has come in order."""
        while (arrival := prefetch.arrived.pop(prefetch.inserted, None)) is not None:
            good, rest = cut(arrival.slots, arrival.good)
            _free(prefetch.chain.tree, rest, f"end of prefetch {prefetch.id}")
            taken = _insert(prefetch.chain, prefetch.inserted, good)
            prefetch.insert(arrival.good, taken)
            self._counters["prefetched_blocks"] += taken
            self._locks.extend(prefetch.id, prefetch.chain.known(prefetch.inserted))
            if slot_count(rest):
                break

    def _over(self, prefetch: Prefetch, end: PrefetchEnd) -> None:
        self._budget.give_back(prefetch.not_begun * self._block_bytes(prefetch.chain.tree))
        for arrival in prefetch.arrived.values():  # behind a block that did not come
            _free(prefetch.chain.tree, arrival.slots, f"end of prefetch {prefetch.id}")
        prefetch.arrived.clear()
        del self.under_way[prefetch.id]
        self.waiting.pop(prefetch.id, None)
        self._locks.hand_over(prefetch.id)
        self._refuse(prefetch, end)

    def _refuse(self, prefetch: Prefetch, end: PrefetchEnd) -> None:
        prefetch.over(end if self._is_current(prefetch) else PrefetchEnd.CLEARED)
        self._counters[f"prefetches_{prefetch.end}"] += 1
        self._effects.append(PrefetchOver(prefetch.id))


def _free(tree: PrefixTree, slots: Ranges[int], cause: str) -> None:
    tree.members[HOST].move(slots, SlotState.FILLING, SlotState.FREE, cause)


def _insert(chain: Chain, start: int, ranges: Ranges[int]) -> int:
    """Blocks from `start` on of a chain lie in these slots, FILLING until now: into the index with those it lacks.

    Returns how many that are. The others' slots are free again: somebody has stored the same blocks meanwhile, or a
    block before them has left the index.
    """
    count = slot_count(ranges)
    if not count:
        return 0
    tree, end = chain.tree, start + count
    host = tree.members[HOST]
    run, depth = chain.known(end)
    if depth < start:
        host.move(ranges, SlotState.FILLING, SlotState.FREE, "the prefix has gone")
        return 0
    tree.cover_host(run, depth)
    if depth < end:
        run = tree.extend_host(run, depth, chain.keys[depth * KEY_SIZE : end * KEY_SIZE])
    tree.lock(run, end, HOST)
    tree.belong(run, chain.tenant)
    taken, at, left = 0, start, no_ranges()
    for piece in tree.missing_in_host(run, end):
        first = max(piece.start, start)
        if first < piece.end:
            append(left, section(ranges, at - start, first - start))
            mine = section(ranges, first - start, piece.end - start)
            host.move(mine, SlotState.FILLING, SlotState.CACHED, "fetched")
            tree.put_host(run, [Piece(first, piece.end)], mine)
            tree.announce_host(run, [Piece(first, piece.end)])
            taken, at = taken + piece.end - first, piece.end
    append(left, section(ranges, at - start, count))
    host.move(left, SlotState.FILLING, SlotState.FREE, "stored meanwhile")
    mark_backed(tree, run, start, end)
    tree.touch(tree.resolve(run, end), end, HOST)
    tree.unlock_host(run, end)
    tree.drop_lost(run)
    return taken
