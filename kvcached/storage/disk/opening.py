"""Opening the index of a directory: the one that is there if it can be believed, else one made of the labels."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcached.storage.disk.index import ROW, DiskIndex, IndexDamaged, create_index, place_of, split_places
from kvcached.storage.disk.slots import Labelled, SlotFile
from kvcached.storage.disk.space import DiskSpace

#: Blocks in which labels and index may differ, and a 64th: what was in flight when a process was killed. Where there
#: are more, a new index is worth its time: it finds what has a label again.
_IN_FLIGHT_MAX: Final = 128

_log: Final = logging.getLogger(__name__)


def open_index(path: Path, space: DiskSpace) -> DiskIndex:
    """The index at a path, made anew where it is missing, damaged, or far from what the labels say."""
    try:
        index = DiskIndex(path)
    except IndexDamaged as damage:
        return new_index(path, space, str(damage))
    try:
        unknown, unlabelled = _compare(index, space)
    except IndexDamaged as damage:
        index.close()
        return new_index(path, space, str(damage))
    count = sum(map(len, unknown.values()))
    if count + unlabelled > _IN_FLIGHT_MAX + space.blocks // 64:
        index.close()
        return new_index(path, space, f"{unlabelled} of its blocks have no label, and it lacks {count} that have one")
    for number, slots in unknown.items():
        _free(space.files[number], slots)
    return index


def _compare(index: DiskIndex, space: DiskSpace) -> tuple[dict[int, list[int]], int]:
    """Labels and entries one by one, by place and time; files learn when they were used last.

    Returns:
        By file number the slots with a label that no entry knows, which nothing would ever free; and how many entries
        have no label, which do no harm.
    """
    stamps = {number: file.stamps() for number, file in space.files.items()}
    unlabelled = 0
    for rows in index.stamps():
        numbers, slots = split_places(rows["place"])
        for number in np.unique(numbers).tolist():
            is_mine = numbers == number
            mine, at, file = rows[is_mine], slots[is_mine], space.files.get(number)
            known = 0
            if file is not None:
                is_known = at < file.slots
                is_known[is_known] = stamps[number][at[is_known]] == mine["stored"][is_known]
                stamps[number][at[is_known]] = 0
                file.used_ns = max(file.used_ns, int(mine["used"].max()))
                known = int(is_known.sum())
            unlabelled += len(mine) - known
    return {number: np.flatnonzero(left).tolist() for number, left in stamps.items()}, unlabelled


def _free(file: SlotFile, slots: list[int]) -> None:
    try:
        for slot in slots:
            file.release(slot)
    except OSError as error:
        _log.warning("slots of file %d stay unused: %s", file.number, error)


def new_index(path: Path, space: DiskSpace, reason: str) -> DiskIndex:
    """An index of all labels. Damaged ones are erased."""
    started, damaged = time.monotonic(), 0

    def rows() -> Iterator[NDArray[np.void]]:
        nonlocal damaged
        for file in space.files.values():
            for found in file.labelled():
                for slot in found.damaged:
                    file.release(slot)
                damaged += len(found.damaged)
                yield _rows(file, found)

    index = create_index(path, rows())
    _log.log(
        logging.WARNING if space.files else logging.INFO,
        "made a new index %s in %.1f s (the old one: %s); blocks: %d, damaged labels: %d",
        path,
        time.monotonic() - started,
        reason,
        index.count(),
        damaged,
    )
    return index


def _rows(file: SlotFile, found: Labelled) -> NDArray[np.void]:
    rows = np.empty(len(found.slots), ROW)
    rows["place"] = found.slots + place_of(file.number, 0)
    rows["slot_bytes"] = file.slot_bytes
    for name in ("key", "size", "stored"):
        rows[name] = found.labels[name]
    rows["used"] = rows["stored"]
    return rows
