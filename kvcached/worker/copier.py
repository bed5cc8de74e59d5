"""Copies inside a pool: from ranges of slots to the fewest contiguous byte runs.

What a copier for any device shares is here and pure; `copier_host` is the one for shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvcached.worker.geometry import PoolGeometry


class SlotRun(NamedTuple):
    """Consecutive slots that go to as many consecutive slots."""

    source: int
    target: int
    slots: int


class ByteRun(NamedTuple):
    """One contiguous copy inside a pool; offsets from its start."""

    source_bytes: int
    target_bytes: int
    size_bytes: int


class Copier(Protocol):
    """Moves bytes of one pool. Called from one thread; every call returns when the bytes are where they belong.

    Every call raises ValueError on slots that the pool does not have, before it touches anything.
    """

    def copy(self, runs: Sequence[SlotRun]) -> None:
        """Copy blocks. Raises ValueError where a target is also a source, or named twice."""

    def fill(self, slot: int, data: bytes) -> None:
        """Overwrite one block with `data`, `slot_bytes` long, strip after strip. Raises ValueError on another size."""

    def zero(self, slot: int) -> None:
        """Overwrite one block with zeros."""

    def checksum(self, slot: int) -> bytes:
        """BLAKE2b-128 of one block's bytes, strip after strip: equal for equal blocks, whatever holds them."""


def merge_runs(sources: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]) -> list[SlotRun]:
    """Pair two lists of (first, count) slot by slot, in as few runs as possible.

    Raises:
        ValueError: a count is not positive, or the totals differ.
    """
    for first, count in [*sources, *targets]:
        if count <= 0:
            raise ValueError(f"slot range ({first}, {count}) is empty")
    if (total := sum(count for _, count in sources)) != (wanted := sum(count for _, count in targets)):
        raise ValueError(f"{total} source slots cannot fill {wanted} target slots")
    runs: list[SlotRun] = []
    remaining = iter(targets)
    target, room = 0, 0
    for first, count in sources:
        done = 0
        while done < count:
            if not room:
                target, room = next(remaining)
            piece = min(count - done, room)
            _append(runs, SlotRun(first + done, target, piece))
            done, target, room = done + piece, target + piece, room - piece
    return runs


def _append(runs: list[SlotRun], run: SlotRun) -> None:
    if runs:
        last = runs[-1]
        if (last.source + last.slots, last.target + last.slots) == (run.source, run.target):
            runs[-1] = SlotRun(last.source, last.target, last.slots + run.slots)
            return
    runs.append(run)


def check_runs(runs: Sequence[SlotRun], slots: int) -> None:
    """Refuse runs whose result would depend on their order, or that leave the pool.

    Raises:
        ValueError: a slot is outside [0, slots), or a target is also a source or named twice.
    """
    spans = sorted(
        [(run.source, run.source + run.slots, False) for run in runs]
        + [(run.target, run.target + run.slots, True) for run in runs]
    )
    any_end, target_end = 0, 0
    for start, end, is_target in spans:
        if start < 0 or end > slots:
            raise ValueError(f"slots [{start}, {end}) are not in a pool of {slots}")
        if start < (any_end if is_target else target_end):
            raise ValueError(f"slot {start} is a target and named twice")
        any_end = max(any_end, end)
        target_end = max(target_end, end) if is_target else target_end


def byte_runs(geometry: PoolGeometry, runs: Sequence[SlotRun]) -> Iterator[ByteRun]:
    """The copies that `runs` take: one per strip and run."""
    for strip in geometry.strips:
        offset, page = strip.offset_bytes, strip.page_bytes
        for source, target, count in runs:
            yield ByteRun(offset + source * page, offset + target * page, count * page)
