"""On which processors of a machine with several memory nodes a worker runs: on those beside its CUDA device.

Linux gives a page of the node whose processor touches it first. A worker is the first to touch what it stores, and
pins all of its part of the host pool, so that the pages of its part lie beside its device. A copy to another node's
memory takes the link between the processors, which is slower than the device's own.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Final

NODES: Final = Path("/sys/devices/system/node")

_log: Final = logging.getLogger(__name__)


def stay_on_node(node: int, nodes: Path = NODES) -> bool:
    """Let this thread, and those that it starts, run on a node's processors only; returns whether it does.

    It does nothing on a machine with one node, and where this process may run on none of the node's processors.

    Args:
        node: number of the node; negative = unknown.
        nodes: where the kernel tells of the nodes.
    """
    try:
        online = _numbers((nodes / "online").read_text())
        if node not in online or online == {node}:
            return False
        wanted = _numbers((nodes / f"node{node}" / "cpulist").read_text())
        if not (allowed := wanted & os.sched_getaffinity(0)):
            _log.warning("none of node %d's processors is allowed here: memory may lie far from the device", node)
            return False
        os.sched_setaffinity(0, allowed)
    except (OSError, ValueError) as error:
        _log.warning("the worker cannot stay on memory node %d: %s; memory may lie far from the device", node, error)
        return False
    return True


def _numbers(text: str) -> set[int]:
    """The numbers in a list such as ``0-3,8``."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):  # a node of memory alone lists no processor
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
