"""Copies from the host pool to storage: which blocks, in which order, and what follows when one could not be written.

Every block is handed over once: the host segment of a run knows how many of its blocks have been. A block that storage
holds already costs a question there, not a write.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from enum import StrEnum
from typing import NamedTuple

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.pieces import Piece
from kvcached.core.index.run import KEY_SIZE, Run, Segment
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import Effect, ForgetStored, StartBackup, TransferKind, span_of
from kvcached.core.slots.ranges import append, no_ranges, one_range, pairs
from kvcached.core.slots.states import SlotState, TransferState
from kvcached.core.transfers.table import TransferTable
from kvcached.core.transfers.transfer import StorageTransfer
from kvcached_client.types import MissReason

#: Copies under way: enough to keep a device busy, few enough that little is locked.
BACKUPS_MAX = 8
BACKUP_BLOCKS_MAX = 64
#: A block that could not be written is tried again, later and later, and then given up.
BACKUP_TRIES = 3
RETRY_MS = 1000
#: Paths that wait to be backed up. Storage that lags behind this far is skipped, and what it misses is counted.
PATHS_WAITING_MAX = 1024
#: Tails without a copy in storage that one look at the eviction order passes.
TAILS_PASSED_MAX = 16


class BackupPolicy(StrEnum):
    """Which host copies storage gets a copy of."""

    EVERY = "every"  #: all, as soon as the host copy is complete
    SECOND_SIGHTING = "second_sighting"  #: those that a later request has hit
    ON_EVICTION = "on_eviction"  #: those that are about to leave the host pool
    NEVER = "never"


_BY_SIGHTING = frozenset({BackupPolicy.EVERY, BackupPolicy.SECOND_SIGHTING})


class Candidate(NamedTuple):
    """A path whose host copies are to be backed up as far as they have not been."""

    tree: PrefixTree
    run: Run
    depth: int
    attempts: int = 0


class Candidates:
    """Paths that wait to be backed up.

    Attributes:
        policy: which paths come here at all.
        waiting: the oldest first.
    """

    def __init__(self, effects: list[Effect], counters: Counter[str]) -> None:
        self.policy = BackupPolicy.NEVER
        self.waiting: deque[Candidate] = deque()
        self._effects = effects
        self._counters = counters

    def stored(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """The host copies of a path are complete up to a depth."""
        if self.policy is BackupPolicy.EVERY:
            self.add(Candidate(tree, run, depth))

    def sighted(self, tree: PrefixTree, run: Run, depth: int) -> None:
        """A request has hit a path. What of it storage was not given, or has lost, it is given now."""
        if not depth or self.policy not in _BY_SIGHTING:
            return
        segment = tree.resolve(run, depth).segments[HOST]
        if self.policy is BackupPolicy.SECOND_SIGHTING or (segment is not None and segment.backed < segment.length):
            self.add(Candidate(tree, run, depth))

    def cleared(self, namespace: bytes, generation: int) -> None:
        """Nothing of this generation of a namespace will be asked for again."""
        self._effects.append(ForgetStored(namespace, generation))

    def skip_all(self) -> None:
        """Storage cannot be used: nothing of what waits will be written."""
        self._counters["backup_skipped_paths"] += len(self.waiting)
        self.waiting.clear()

    def admit(self, policy: BackupPolicy) -> None:
        """Paths come here by this policy from now on."""
        self.policy = policy

    def add(self, candidate: Candidate) -> None:
        """Let it wait, unless too many do."""
        if len(self.waiting) < PATHS_WAITING_MAX:
            self.waiting.append(candidate)
        else:
            self._counters["backup_skipped_paths"] += 1


class Backups:
    """Starts and ends them.

    Args:
        table: of all transfers.
        candidates: what waits, and who is told of more.
        generation: of a tree's namespace; None for a tree that no request reaches any more.

    Attributes:
        candidates: what waits.
    """

    def __init__(
        self, table: TransferTable, generation: Callable[[PrefixTree], int | None], candidates: Candidates
    ) -> None:
        self.candidates = candidates
        self._table = table
        self._generation = generation
        self._effects = table.effects
        self._counters = table.counters
        self._again: list[tuple[int, Candidate]] = []  #: what is tried again, and when

    def start(self, trees: Callable[[], Iterable[PrefixTree]], watermark_percent: int) -> None:
        """Start as many copies as may be under way.

        Args:
            trees: the index.
            watermark_percent: part of the host pool below which, where no more of it is free, tails are looked for that
                will have to go soon.
        """
        if self.candidates.policy is BackupPolicy.ON_EVICTION:
            for tree in trees():
                self._note_next_victims(tree, watermark_percent)
        waiting = self.candidates.waiting
        while waiting and len(self._table.backups) < BACKUPS_MAX:
            candidate = waiting.popleft()
            if self._start(candidate):  # there may be more of it
                waiting.appendleft(candidate)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        due = [candidate for at_ms, candidate in self._again if at_ms <= now_ms]
        self._again = [entry for entry in self._again if entry[0] > now_ms]
        for candidate in due:
            self.candidates.add(candidate)

    def end(self, copy: StorageTransfer, written: int, now_ms: int) -> None:
        """Storage reads the slots of a copy no more, and has its first `written` blocks."""
        copy.enter(TransferState.DONE if written == copy.blocks else TransferState.FAILED)
        del self._table.backups[copy.id]
        run = copy.run
        self._counters["backed_up_blocks"] += written
        if written < copy.blocks:
            self._fail(copy, run, written, now_ms)
        if not copy.is_cleared:
            copy.tree.unlock_host(run, copy.end)
            copy.tree.drop_lost(run)
        self._table.free_unread(copy.tree, copy.set_aside, SlotState.QUARANTINED, f"end of backup {copy.id}")

    def let_go(self, tree: PrefixTree, namespace: bytes, cause: str) -> None:
        """A tree is cleared: storage may read slots of its blocks for long, which are in no index from now on.

        Args:
            tree: which has another namespace already.
            namespace: that it had; copies of an earlier one were let go before.
            cause: for the journal.
        """
        backups = self._table.backups.values()
        mine = [copy for copy in backups if copy.tree is tree and copy.namespace == namespace]
        for copy in mine:
            slots = [slot for first, count in pairs(copy.host) for slot in range(first, first + count)]
            for index in reversed(range(len(slots))):  # a copy whose slot was set aside has lost its block already
                depth, slot = copy.depth_of(index), one_range(slots[index], 1)
                run = tree.resolve(copy.run, depth + 1)
                if tree.path_slots(run, depth, depth + 1, HOST) == slot:
                    tree.punch_host(run, [Piece(depth, depth + 1)])
                    self._table.free_unread(tree, slot, SlotState.CACHED, cause)
        for copy in mine:
            tree.unlock_host(copy.run, copy.end, MissReason.CLEARED)

    def _fail(self, copy: StorageTransfer, run: Run, written: int, now_ms: int) -> None:
        tries = copy.attempts + 1
        if tries >= BACKUP_TRIES or copy.is_cleared:
            self._counters["backup_failed_blocks"] += copy.blocks - written
            return
        _unmark(run, copy.depth_of(written))
        self._again.append((now_ms + RETRY_MS * 2**copy.attempts, Candidate(copy.tree, run, copy.end, tries)))

    def _start(self, candidate: Candidate) -> bool:
        tree = candidate.tree
        generation = self._generation(tree)
        if generation is None:
            return False
        run, depth = _still_there(tree, candidate.run, candidate.depth)
        pieces = _unwritten(tree, run, depth, BACKUP_BLOCKS_MAX)
        if not pieces:
            return False
        run, end = tree.resolve(run, pieces[-1].end), pieces[-1].end
        slots = no_ranges()
        spans = []
        for begin, stop in pieces:
            mine = tree.path_slots(run, begin, stop, HOST)
            append(slots, mine)
            spans.append(span_of(begin, tree.path_keys(run, max(begin - 1, 0), stop), mine, no_ranges()))
        copy = StorageTransfer(
            self._table.next_id(), TransferKind.STORE, tree, run, pieces, slots, tree.namespace, candidate.attempts
        )
        _mark(tree, run, pieces)
        tree.lock(run, end, HOST)
        copy.enter(TransferState.RUNNING)
        self._table.backups[copy.id] = copy
        self._effects.append(StartBackup(copy.id, tree.namespace, generation, tuple(spans)))
        return True

    def _note_next_victims(self, tree: PrefixTree, watermark_percent: int) -> None:
        host = tree.host
        if (
            host is None
            or host.room * 100 >= host.slots * watermark_percent
            or len(self.candidates.waiting) >= BACKUPS_MAX
        ):
            return
        policy = tree.policies[HOST]
        passed: list[Segment] = []
        while len(passed) < TAILS_PASSED_MAX and (segment := policy.pop()) is not None:
            passed.append(segment)
        for segment in reversed(passed):
            policy.add(segment)
        for segment in passed:
            if segment.backed < segment.length:
                self.candidates.add(Candidate(tree, segment.run, segment.run.start + segment.length))


def _still_there(tree: PrefixTree, run: Run, depth: int) -> tuple[Run, int]:
    """As much of the path ``[0, depth)`` to a run as is in the index, for nothing has kept it there."""
    run = tree.resolve(run, depth)
    while run.parent is not None and not any(run.segments):
        depth = min(depth, run.start)
        run = tree.resolve(run.parent, depth)  # which has become longer since, or a part of what it was
    return run, depth


def _unwritten(tree: PrefixTree, run: Run, depth: int, most: int) -> list[Piece]:
    """The first blocks of the path ``[0, depth)`` that have complete host copies and were not handed over yet."""
    found: list[Piece] = []
    while run.parent is not None:
        segment = run.segments[HOST]
        reach = 0 if segment is None else min(segment.length, depth - run.start)
        if segment is not None and segment.backed < reach:
            whole = _complete(tree, segment, segment.backed, reach)
            if whole > segment.backed:
                found.append(Piece(run.start + segment.backed, run.start + whole))
        run, depth = run.parent, run.start
    pieces: list[Piece] = []
    for start, end in reversed(found):
        size = min(end - start, most)
        if size:
            pieces.append(Piece(start, start + size))
            most -= size
    return pieces


def _complete(tree: PrefixTree, segment: Segment, offset: int, reach: int) -> int:
    """How far the copies of a segment are complete from an offset on."""
    host = tree.members[HOST]
    for first, count in pairs(segment.slots(offset, reach)):
        if first < 0 or not host.holds(first, count, SlotState.CACHED):
            break
        offset += count
    return offset


def _mark(tree: PrefixTree, run: Run, pieces: list[Piece]) -> None:
    for piece in pieces:
        at = tree.resolve(run, piece.end)
        segment = at.segments[HOST]
        if segment is not None:
            segment.back(piece.end - at.start)


def mark_backed(tree: PrefixTree, run: Run, start: int, end: int) -> None:
    """Blocks ``[start, end)`` of the path to `run` come from storage, where they need not be written again."""
    at = tree.resolve(run, end)
    while at.parent is not None and at.end > start:
        segment = at.segments[HOST]
        if segment is not None and segment.backed >= start - at.start:
            segment.back(max(segment.backed, min(end - at.start, segment.length)))
        at = at.parent


def unmark_all(tree: PrefixTree) -> None:
    """Every block of a tree has to be handed over again, once it is a candidate."""
    for run in tree.runs():
        segment = run.segments[HOST]
        if segment is not None:
            segment.back(0)


def unmark_deleted(tree: PrefixTree, keys: bytes, depth: int, deleted: Container[bytes]) -> None:
    """Storage has none of these blocks: of those that are behind the block of a chain at `depth`, the same holds."""
    for run, offset in tree.behind(keys, depth):
        segment = run.segments[HOST]
        if segment is not None:
            places = range(offset, segment.backed)
            gone = (at for at in places if bytes(run.keys[at * KEY_SIZE : (at + 1) * KEY_SIZE]) in deleted)
            segment.back(next(gone, segment.backed))


def _unmark(run: Run, depth: int) -> None:
    """Blocks from `depth` on of the path to `run` have to be handed over again."""
    at: Run | None = run
    while at is not None and at.parent is not None and at.end > depth:
        segment = at.segments[HOST]
        if segment is not None:
            segment.back(min(segment.backed, max(depth - at.start, 0)))
        at = at.parent
