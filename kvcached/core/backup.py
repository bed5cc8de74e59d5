"""Copies from the host pool to storage: which blocks, in which order, and what follows when one could not be written.

Every block is handed over once: the host segment of a run knows how many of its blocks have been. A block that storage
holds already costs a question there, not a write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from kvcached.core.effects import Effect, StartBackup, StorageSpan
from kvcached.core.ranges import append, no_ranges, one_range, pairs, place_of, section
from kvcached.core.run import KEY_SIZE, Run, Segment
from kvcached.core.states import SlotState
from kvcached.core.storage_state import BackupPolicy, Candidate, Candidates, StorageCopy
from kvcached.core.tree import HOST, Piece, PrefixTree
from kvcached_client.types import TransferId

#: Copies under way: enough to keep a device busy, few enough that little is pinned.
BACKUPS_MAX = 8
BACKUP_BLOCKS_MAX = 64
#: A block that could not be written is tried again, later and later, and then given up.
BACKUP_TRIES = 3
RETRY_MS = 1000
#: Tails without a copy in storage that one look at the eviction order passes.
TAILS_PASSED_MAX = 16


class Backups:
    """Starts and ends them.

    Args:
        next_id: gives transfer ids.
        generation: of a tree's namespace; None for a tree that no request reaches any more.

    Attributes:
        candidates: what waits.
        copies: under way.
    """

    def __init__(
        self,
        next_id: Callable[[], TransferId],
        generation: Callable[[PrefixTree], int | None],
        effects: list[Effect],
        counters: Counter[str],
    ) -> None:
        self.candidates = Candidates(effects, counters)
        self.copies: dict[TransferId, StorageCopy] = {}
        self._next_id = next_id
        self._generation = generation
        self._effects = effects
        self._counters = counters
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
        while waiting and len(self.copies) < BACKUPS_MAX:
            candidate = waiting.popleft()
            if self._start(candidate):  # there may be more of it
                waiting.appendleft(candidate)

    def tick(self, now_ms: int) -> None:
        """Time has passed."""
        due = [candidate for at_ms, candidate in self._again if at_ms <= now_ms]
        self._again = [entry for entry in self._again if entry[0] > now_ms]
        for candidate in due:
            self.candidates.add(candidate)

    def end(self, copy: StorageCopy, written: int, now_ms: int) -> None:
        """Storage reads the slots of a copy no more, and has its first `written` blocks."""
        del self.copies[copy.id]
        run = copy.run
        if run is None:
            raise RuntimeError(f"backup {copy.id} has no path")
        self._counters["backed_up_blocks"] += written
        if written < copy.blocks:
            self._fail(copy, run, written, now_ms)
        copy.tree.unpin_host(run, copy.end)
        copy.tree.drop_lost(run)
        for first, count in pairs(copy.set_aside):
            for slot in range(first, first + count):
                self._free(copy.tree, slot, SlotState.QUARANTINED, f"end of backup {copy.id}")

    def let_go(self, tree: PrefixTree, slot: int, cause: str) -> None:
        """The CACHED block in a host slot has left the index: it is free, or will be when storage reads it no more."""
        self._free(tree, slot, SlotState.CACHED, cause)

    def _free(self, tree: PrefixTree, slot: int, state: SlotState, cause: str) -> None:
        ranges = one_range(slot, 1)
        reads = (each for each in self.copies.values() if each.tree is tree)
        copy = next((each for each in reads if place_of(each.slots, slot) is not None), None)
        if copy is None:
            tree.members[HOST].move(ranges, state, SlotState.FREE, cause)
            return
        if state is SlotState.CACHED:
            tree.members[HOST].move(ranges, state, SlotState.QUARANTINED, cause)
        append(copy.set_aside, ranges)

    def _fail(self, copy: StorageCopy, run: Run, written: int, now_ms: int) -> None:
        tries = copy.attempts + 1
        if tries >= BACKUP_TRIES or copy.tree.namespace != copy.namespace:
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
            keys = tree.path_keys(run, max(begin - 1, 0), stop)
            parent = keys[:KEY_SIZE] if begin else b""
            spans.append(StorageSpan(begin, parent, keys[KEY_SIZE:] if begin else keys, mine))
        copy = StorageCopy(self._next_id(), tree, tree.namespace, pieces, slots, run, candidate.attempts)
        _mark(tree, run, pieces)
        tree.pin(run, end, HOST)
        self.copies[copy.id] = copy
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
    for first, count in pairs(section(segment.ranges, offset, reach)):
        if first < 0 or not host.holds(first, count, SlotState.CACHED):
            break
        offset += count
    return offset


def _mark(tree: PrefixTree, run: Run, pieces: list[Piece]) -> None:
    for piece in pieces:
        at = tree.resolve(run, piece.end)
        segment = at.segments[HOST]
        if segment is not None:
            segment.backed = piece.end - at.start


def mark_backed(tree: PrefixTree, run: Run, start: int, end: int) -> None:
    """Blocks ``[start, end)`` of the path to `run` come from storage, where they need not be written again."""
    at = tree.resolve(run, end)
    while at.parent is not None and at.end > start:
        segment = at.segments[HOST]
        if segment is not None and segment.backed >= start - at.start:
            segment.backed = max(segment.backed, min(end - at.start, segment.length))
        at = at.parent


def _unmark(run: Run, depth: int) -> None:
    """Blocks from `depth` on of the path to `run` have to be handed over again."""
    at: Run | None = run
    while at is not None and at.parent is not None and at.end > depth:
        segment = at.segments[HOST]
        if segment is not None:
            segment.backed = min(segment.backed, max(depth - at.start, 0))
        at = at.parent
