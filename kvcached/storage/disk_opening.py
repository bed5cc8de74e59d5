"""Opening the index of a directory: the one that is there if it can be believed, else one made of the labels."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvcached.storage.disk_index import ROW, DiskIndex, IndexDamaged, create_index, place_of
from kvcached.storage.disk_slots import Labelled, SlotFile
from kvcached.storage.disk_space import DiskSpace

#: Blocks by which labels and index may differ, and a 64th: what was in flight when a process was killed.
_IN_FLIGHT_MAX: Final = 2048

_log: Final = logging.getLogger(__name__)


def open_index(path: Path, space: DiskSpace) -> DiskIndex:
    """The index at a path, made anew where it is missing, damaged, or far from what the labels say."""
    try:
        index = DiskIndex(path)
    except IndexDamaged as damage:
        return new_index(path, space, str(damage))
    labels, entries = space.blocks, index.count()
    if abs(labels - entries) <= _IN_FLIGHT_MAX + labels // 64:
        return index
    index.close()
    return new_index(path, space, f"it has {entries} blocks and the labels {labels}")


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
