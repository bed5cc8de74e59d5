"""Copies between a device pool and the host pool: from ranges of slots to the fewest contiguous pieces.

What a copier for any device shares is here and pure; `copier_host` is the one for device pools in shared memory.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from kvcached.worker.geometry import PoolGeometry
from kvcached_client.host_geometry import HostGeometry


class SlotRun(NamedTuple):
    """As many consecutive slots of the device pool as of the host pool."""

    device: int
    host: int
    slots: int


class StripCopies(NamedTuple):
    """The copies between one strip of a device pool and the host pool."""

    device_bytes: int  #: where slot 0's page is, from the start of the device pool
    host_bytes: int  #: where that page is inside a block in the host pool
    pieces: array[int]  #: int64 triples: offset at the destination, offset at the source, size; from those two places


class Copier(Protocol):
    """Moves bytes of one device pool. Called from one thread; every call returns when the bytes are where they belong.

    Those that name slots raise ValueError on slots that the pool does not have, before they touch anything.
    """

    def to_host(self, strip: StripCopies) -> None:
        """Carry out the copies of one strip, made by `plan_copies` with ``to_host``."""

    def to_device(self, strip: StripCopies) -> None:
        """Carry out the copies of one strip, made by `plan_copies` without ``to_host``."""

    def duplicate(self, source: int, target: int) -> None:
        """Copy a block to another slot of the device pool. Raises ValueError where the slots are one."""

    def fill(self, slot: int, data: bytes) -> None:
        """Overwrite one block with `data`, `slot_bytes` long, strip after strip. Raises ValueError on another size."""

    def zero(self, slot: int) -> None:
        """Overwrite one block with zeros."""

    def checksum(self, slot: int) -> bytes:
        """xxh3_128 of one block's bytes, strip after strip: equal for equal blocks, whatever holds them."""


def merge_runs(device: Sequence[tuple[int, int]], host: Sequence[tuple[int, int]]) -> list[SlotRun]:
    """Pair two lists of (first, count) slot by slot, in as few runs as possible.

    Raises:
        ValueError: a count is not positive, or the totals differ.
    """
    for first, count in [*device, *host]:
        if count <= 0:
            raise ValueError(f"slot range ({first}, {count}) is empty")
    if (total := sum(count for _, count in device)) != (wanted := sum(count for _, count in host)):
        raise ValueError(f"{total} device slots do not pair with {wanted} host slots")
    runs: list[SlotRun] = []
    remaining = iter(host)
    target, room = 0, 0
    for first, count in device:
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
        if (last.device + last.slots, last.host + last.slots) == (run.device, run.host):
            runs[-1] = SlotRun(last.device, last.host, last.slots + run.slots)
            return
    runs.append(run)


def cut_runs(runs: Sequence[SlotRun], blocks: slice) -> list[SlotRun]:
    """The runs of some of their blocks, which are counted through them from 0: those from `start` to `stop`."""
    kept, first = [], 0
    for run in runs:
        start, stop, _ = slice(blocks.start, blocks.stop).indices(first + run.slots)
        skipped = max(0, start - first)
        if first + skipped < stop:
            kept.append(SlotRun(run.device + skipped, run.host + skipped, stop - first - skipped))
        first += run.slots
    return kept


def check_runs(runs: Sequence[SlotRun], device_slots: int, host_slots: int) -> None:
    """Refuse slots that do not exist, and slots named twice, whose content would depend on the order of copies.

    Raises:
        ValueError: one of these.
    """
    _check_slots("device", [(run.device, run.device + run.slots) for run in runs], device_slots)
    _check_slots("host", [(run.host, run.host + run.slots) for run in runs], host_slots)


def _check_slots(kind: str, spans: list[tuple[int, int]], slots: int) -> None:
    last_end = 0
    for start, end in sorted(spans):
        if start < 0 or end > slots:
            raise ValueError(f"{kind} slots [{start}, {end}) are not in a pool of {slots}")
        if start < last_end:
            raise ValueError(f"{kind} slot {start} is named twice")
        last_end = end


def plan_copies(
    pool: PoolGeometry, host: HostGeometry, shard: int, runs: Sequence[SlotRun], *, to_host: bool
) -> Iterator[StripCopies]:
    """The copies that `runs` take, strip after strip.

    A pool of one strip holds its blocks as the host pool does: a run is one piece per slab that it touches. Otherwise
    there is a piece per block and strip, and strips with pages of one size share their array of pieces.

    The runs must have passed `check_runs`.
    """
    by_page: dict[int, array[int]] = {}
    inside_block = 0
    for strip in pool.strips:
        page = strip.page_bytes
        if page not in by_page:
            by_page[page] = _pieces(page, host, shard, runs, to_host=to_host)
        yield StripCopies(strip.offset_bytes, inside_block, by_page[page])
        inside_block += page


def _pieces(page: int, host: HostGeometry, shard: int, runs: Sequence[SlotRun], *, to_host: bool) -> array[int]:
    numbers: list[int] = []
    if page == host.block_bytes:
        for device, first, count in runs:
            for slot, slots, offset in host.contiguous(first, count, shard):
                numbers += (offset, (device + slot - first) * page, slots * page)
    else:
        # Written out, because blocks may be many and scattered: this takes a quarter of the time of a call for each.
        start, step = host.block_offset(0, shard), host.block_bytes
        per_slab, gap = host.slots_per_slab, host.gap_bytes
        for device, first, count in runs:
            for slot in range(first, first + count):
                numbers += (start + slot * step + slot // per_slab * gap, (device + slot - first) * page, page)
    pieces = array("q", numbers)
    if not to_host:
        pieces[0::3], pieces[1::3] = pieces[1::3], pieces[0::3]
    return pieces
