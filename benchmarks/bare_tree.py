"""Floors of the index: the smallest loops over runs of keys that could do the job, with nothing around them.

No slots, pins, leases, states or checks; one owner, one pool.
"""

from __future__ import annotations

from collections import OrderedDict
from time import perf_counter_ns

from kvcached.core.index.run import KEY_SIZE, Run


def walk(root: Run, keys: bytes) -> int:
    """Blocks of a cached prompt that ends with a run: a look-up, a slice and the comparison of a key per run."""
    children, position, end = root.children, 0, len(keys)
    while position < end and children:
        run = children.get(keys[position : position + KEY_SIZE])
        if run is None:
            break
        after = position + len(run.keys)
        if keys[after - KEY_SIZE : after] != run.keys[-KEY_SIZE:]:
            break
        children, position = run.children, after
    return position // KEY_SIZE


class BareRun:
    """Keys, and the runs that continue them by their first key."""

    __slots__ = ("children", "keys", "parent")

    def __init__(self, keys: bytearray, parent: BareRun | None) -> None:
        self.keys = keys
        self.parent = parent
        self.children: dict[bytes, BareRun] = {}


class BareTree:
    """Runs in a tree, the least recently used tails first out.

    Attributes:
        free: blocks that are not in use.
        hit_blocks: blocks that requests found, all together.
    """

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.hit_blocks = 0
        self._root = BareRun(bytearray(), None)
        self._tails: OrderedDict[BareRun, None] = OrderedDict()

    def request(self, keys: bytes) -> int:
        """Find a prompt's blocks, make room for the rest, add it; nanoseconds."""
        start = perf_counter_ns()
        run, position, end = self._root, 0, len(keys)
        while position < end:
            child = run.children.get(keys[position : position + KEY_SIZE])
            if child is None:
                break
            own = child.keys
            after = position + len(own)
            if keys[after - KEY_SIZE : after] == own[-KEY_SIZE:]:
                run, position = child, after
                continue
            after = position + _common(own, keys[position:])
            run = child if after == end else _split(child, after - position)
            position = after
            break
        self.hit_blocks += position // KEY_SIZE
        tails = self._tails
        is_tail = run in tails
        if position < end:
            missing = (end - position) // KEY_SIZE
            if is_tail:
                del tails[run]
            if missing > self.free:
                self._evict(missing - self.free, run)
            self.free -= missing
            if is_tail:
                run.keys += keys[position:]
            else:
                child = BareRun(bytearray(keys[position:]), run)
                run.children[keys[position : position + KEY_SIZE]] = child
                run = child
            tails[run] = None
        elif is_tail:
            tails.move_to_end(run)
        return perf_counter_ns() - start

    def evict(self, blocks: int) -> int:
        """Free so many blocks; nanoseconds."""
        start = perf_counter_ns()
        self._evict(blocks, self._root)
        return perf_counter_ns() - start

    def _evict(self, blocks: int, keep: BareRun) -> None:
        tails = self._tails
        self.free += blocks
        size = blocks * KEY_SIZE
        while size:
            run, _ = tails.popitem(last=False)
            if len(run.keys) > size:
                del run.keys[-size:]
                tails[run] = None
                tails.move_to_end(run, last=False)
                return
            size -= len(run.keys)
            parent = run.parent
            if parent is None:
                raise RuntimeError("the root is no tail")
            del parent.children[bytes(run.keys[:KEY_SIZE])]
            if not parent.children and parent is not keep and parent is not self._root:
                tails[parent] = None
                tails.move_to_end(parent, last=False)


def _common(own: bytearray, keys: bytes) -> int:
    """Bytes of keys that are equal, by bisection."""
    low, high = 1, min(len(own), len(keys)) // KEY_SIZE
    while low < high:
        middle = (low + high + 1) // 2
        stop = middle * KEY_SIZE
        if own[stop - KEY_SIZE : stop] == keys[stop - KEY_SIZE : stop]:
            low = middle
        else:
            high = middle - 1
    return low * KEY_SIZE


def _split(run: BareRun, size: int) -> BareRun:
    """Cut a run after `size` bytes of keys; the new run of those."""
    parent = run.parent
    if parent is None:
        raise RuntimeError("the root has no blocks to split")
    head = BareRun(run.keys[:size], parent)
    parent.children[bytes(head.keys[:KEY_SIZE])] = head
    del run.keys[:size]
    run.parent = head
    head.children[bytes(run.keys[:KEY_SIZE])] = run
    return head
