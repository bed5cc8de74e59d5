"""Copies that an engine's own processes make: what is reserved and locked for them, and what follows from their end."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece, first_blocks
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import SlotsHandedOut, TransferKind
from kvcached.core.session import OffloadSession
from kvcached.core.slots.ranges import Ranges, no_ranges, slot_count
from kvcached.core.slots.slots import SlotPool
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.store_waits import NO_STORE, Hit, store_behind
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import EngineTransfer
from kvcached_client.types import MissReason, ShardIndex, TransferId, WritePolicy

_Words: TypeAlias = npt.NDArray[np.uint64]

#: Every shard at once: the scheduler says that a copy will not be made.
EVERY_SHARD = -1
#: The failure of a copy that nobody needs any more.
_CALLED_OFF = "called off"
#: Blocks that are remembered at most, of all namespaces together: 8 MiB. A power of two.
FILTER_BLOCKS_MAX = 1 << 20
_WORD_BYTES = KEY_SIZE // 2


class StorePlan(NamedTuple):
    """Answer to `prepare_store`.

    Attributes:
        transfer: 0 where there is nothing to copy.
        depth: of the lease now: where its next store starts.
        generation: of the namespace, for the blocks' headers.
        pieces: which blocks to copy.
        slots: where to, one slot for each block.
    """

    transfer: TransferId
    depth: int
    generation: int
    pieces: list[Piece]
    slots: Ranges[int]


class AdmissionFilter:
    """Which blocks engines have offered lately, so that a second offer of one can be told from a first.

    Keys are chained: whoever offers a block has all before it. So what is asked is how deep a chain is known, and a
    block that was forgotten meanwhile changes nothing as long as one behind it is remembered.

    A table has one place for each first half of a key, where the second half of the last such key stands: a newer block
    may so take the place of an older one. Memory is taken with the first block that is noted.
    """

    def __init__(self, places: int = FILTER_BLOCKS_MAX) -> None:
        self._places = places
        self._marks: _Words | None = None

    def depth(self, namespace: bytes, generation: int, keys: bytes) -> int:
        """How many leading blocks have been noted, as the deepest one that is known says."""
        if self._marks is None:
            return 0
        places, marks = self._split(namespace, generation, keys)
        known = np.flatnonzero(self._marks[places] == marks)
        return int(known[-1]) + 1 if len(known) else 0

    def note(self, namespace: bytes, generation: int, keys: bytes) -> None:
        """Blocks of a namespace have been offered."""
        if self._marks is None:
            self._marks = np.zeros(self._places, np.uint64)
        places, marks = self._split(namespace, generation, keys)
        self._marks[places] = marks

    def _split(self, namespace: bytes, generation: int, keys: bytes) -> tuple[_Words, _Words]:
        """Where each block stands, and what stands there; 0 is nothing."""
        words = np.frombuffer(keys, np.uint64).reshape(-1, KEY_SIZE // _WORD_BYTES)
        first = int.from_bytes(namespace[:_WORD_BYTES], "little") ^ generation
        second = int.from_bytes(namespace[_WORD_BYTES:KEY_SIZE], "little")
        places = (words[:, 0] ^ np.uint64(first)) & np.uint64(self._places - 1)
        return places, (words[:, 1] ^ np.uint64(second)) | np.uint64(1)


class EngineCopies:
    """Starts and ends copies.

    Args:
        table: of all transfers.
    """

    def __init__(self, table: TransferTable) -> None:
        self._table = table
        self._effects = table.effects
        self._counters = table.counters
        self._admission_filter = AdmissionFilter()

    def all(self) -> list[EngineTransfer]:
        """Those of all sessions."""
        return list(self._table.engine.values())

    def is_stored_by_another(self, session: OffloadSession, hit: Hit, tree: PrefixTree, keys: bytes) -> bool:
        """Whether a store of another session writes the first block behind a hit."""
        return store_behind(hit, tree, keys, self._table.engine_stores, session.transfers) is not NO_STORE

    def may_store(self, session: OffloadSession, lease: OffloadLease) -> bool:
        """Whether blocks of a lease may be copied, also lost ones. None is, behind one that was passed over."""
        return not (session.read_only or lease.passed or lease.tree.write_policy is WritePolicy.NEVER)

    def wanted(self, lease: OffloadLease, keys: bytes) -> int:
        """How many leading blocks of an offer the write policy has copied, if any may be.

        The daemon does not see such an engine's device memory, so that write-back is write-through here.
        """
        policy = lease.tree.write_policy
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return self._admission_filter.depth(lease.tree.namespace, lease.generation, keys)
        return len(keys) // KEY_SIZE

    def pass_over(self, lease: OffloadLease, keys: bytes) -> StorePlan:
        """The policy does not have the next blocks copied: there is nothing to do for the engine."""
        if lease.tree.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            self._admission_filter.note(lease.tree.namespace, lease.generation, keys)
        lease.pass_over(len(keys) // KEY_SIZE)
        self._counters["store_declined_blocks"] += len(keys) // KEY_SIZE
        return StorePlan(TransferId(0), lease.reached, lease.generation, [], no_ranges())

    def plan_store(self, session: OffloadSession, lease: OffloadLease, keys: bytes) -> StorePlan:
        """A lease goes on with blocks of these keys: reserve slots for what its path lacks, as far as there is room."""
        tree, start, end = lease.tree, lease.depth, lease.depth + len(keys) // KEY_SIZE
        run = tree.extend_host(tree.resolve(lease.run, start), start, keys)
        tree.belong(run, lease.tenant)
        tree.lock(run, end, HOST)  # or the room would be made by evicting what this continues
        try:
            return self._plan(session, lease, run, end)
        finally:
            tree.unlock_host(run, end, MissReason.NO_ROOM)
            tree.drop_lost(run, MissReason.NO_ROOM)

    def _plan(self, session: OffloadSession, lease: OffloadLease, run: Run, end: int) -> StorePlan:
        """Reserve slots for what the path ``[0, end)`` lacks, as far as there is room; the lease reaches as far."""
        tree = lease.tree
        missing = tree.missing_in_host(run, end)
        wanted = sum(piece.end - piece.start for piece in missing)
        cause = f"store of session {session.id}"
        slots = tree.reserve_host(wanted, cause, tenant=run.tenant) if wanted else no_ranges()
        got = slot_count(slots)
        pieces = first_blocks(missing, got)
        self._counters["store_refused_blocks"] += wanted - got
        transfer = TransferId(0)
        if pieces:
            tree.put_host(run, pieces, slots)
            transfer = self.start(session, TransferKind.STORE, tree, run, pieces, slots).id
            self._hand_out(session, tree.namespace, slots)
        reached = end if got == wanted else max(tree.missing_in_host(run, end)[0].start, lease.depth)
        tree.lock(tree.resolve(run, reached), reached, HOST)
        tree.unlock(tree.resolve(lease.run, lease.depth), lease.depth, HOST)
        lease.reach(tree.resolve(run, reached), reached)
        return StorePlan(transfer, reached, lease.generation, pieces, slots)

    def _hand_out(self, session: OffloadSession, namespace: bytes, slots: Ranges[int]) -> None:
        """Say whose the slots are; once for all offers of one message."""
        last = self._effects[-1] if self._effects else None
        if isinstance(last, SlotsHandedOut) and (last.session, last.namespace) == (session.id, namespace):
            self._effects[-1] = SlotsHandedOut(session.id, namespace, last.slots + slots)
        else:
            self._effects.append(SlotsHandedOut(session.id, namespace, slots))

    def start(
        self,
        session: OffloadSession,
        kind: TransferKind,
        tree: PrefixTree,
        run: Run,
        pieces: list[Piece],
        slots: Ranges[int],
    ) -> EngineTransfer:
        """Lock the path of blocks and count on every shard for them."""
        shards = {ShardIndex(shard) for shard in range(session.namespace.spec.shards)}
        copy = EngineTransfer(self._table.next_id(), kind, tree, run, pieces, slots, waiting=shards)
        tree.lock(tree.resolve(run, copy.end), copy.end, HOST)
        copy.enter(TransferState.RUNNING)
        self._table.engine[copy.id] = session.transfers[copy.id] = copy
        if kind is TransferKind.STORE:
            self._table.engine_stores[tree, slots[0]] = copy
        return copy

    def settled(self, copy: EngineTransfer, shard: int, error: str) -> bool:
        """Note that a shard is through, or that none will copy: a failure, said or not. Whether every shard is."""
        if shard == EVERY_SHARD:
            error = error or _CALLED_OFF
            copy.waiting.clear()
        copy.fail(error)
        copy.waiting.discard(ShardIndex(shard))
        return not copy.waiting

    def end(self, session: OffloadSession, copy: EngineTransfer, unwritten: SlotState = SlotState.FREE) -> None:
        """Every shard is through with a copy, or its session is over. What a store has not written goes to that state.

        Blocks that proved bad, or were not written, leave the index.
        """
        good = not copy.failure and not copy.corrupt
        copy.enter(TransferState.DONE if good else TransferState.FAILED)
        del self._table.engine[copy.id], session.transfers[copy.id]
        copy.tree.unlock_host(copy.run, copy.end)
        if copy.kind is TransferKind.LOAD:
            self._count(copy)
            self._table.drop_corrupt(copy)
        else:
            del self._table.engine_stores[copy.tree, copy.host[0]]
            self._table.end_store(copy, SlotState.CACHED if good else unwritten)
            if not good and unwritten is SlotState.QUARANTINED:
                session.quarantined.append((host_of(copy.tree), copy.host))
        copy.tree.drop_lost(copy.run)  # a store of what it continues may have failed

    def _count(self, load: EngineTransfer) -> None:
        arrived = 0 if load.failure else min(load.corrupt, default=load.blocks)
        self._counters["loaded_blocks"] += arrived
        ending = "load_called_off_blocks" if load.failure == _CALLED_OFF else "load_failed_blocks"
        self._counters[ending] += load.blocks - arrived


def host_of(tree: PrefixTree) -> SlotPool:
    """The host slots of a tree."""
    return tree.members[HOST]
