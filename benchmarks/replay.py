"""Passes of a shape over a full cache, with some of the work timed, in the core and in bare trees."""

from __future__ import annotations

import gc
from collections import deque
from itertools import chain, count, islice
from statistics import fmean
from typing import Final

from benchmarks.bare_tree import BareTree
from benchmarks.one_engine import OneEngine
from benchmarks.shapes import PiecePath, Shape
from kvcached.core.index.run import KEY_SIZE

REQUEST_BLOCKS: Final = 512
#: Passes with lower numbers are for building.
_REPLAY_FIRST_PASS: Final = 1_000
_EVICTIONS_PER_PASS: Final = 4
#: In a pass of a shape whose prompts are all shorter than a timed one.
_LONE_PROMPTS_PER_PASS: Final = 40
#: Of such a shape, whose passes would take a minute.
_PROMPTS_PER_PASS_MAX: Final = 20_800
#: Prompts between two looks for a prompt that has left the device pool.
_LOOK_EVERY: Final = 16
#: What loaded prompts may share with newer ones, and so find on the device: a piece of the trace.
_DEVICE_HIT_MAX: Final = 32
#: Timed prompts that wait until they can be loaded.
_WAITING_MAX: Final = 1_000


class Times:
    """Nanoseconds of the same work in every pass, in the core and in the bare trees."""

    def __init__(self) -> None:
        self._core: list[list[int]] = []
        self._bare: list[list[int]] = []

    def next_pass(self) -> None:
        """What is added from here on is of another pass."""
        self._core.append([])
        self._bare.append([])

    def add(self, core: int, bare: int) -> None:
        """One operation of the current pass."""
        self._core[-1].append(core)
        self._bare[-1].append(bare)

    def best_us(self) -> tuple[float, float]:
        """An operation in its best pass, all operations of a pass alike: core and bare.

        Means within a pass, not medians, so that what only some of its operations pay (an eviction) is in the figure.
        """
        core, bare = (min(map(fmean, filter(None, passes))) / 1e3 for passes in (self._core, self._bare))
        return core, bare


class Replay:
    """Passes of a shape over a full cache, on new keys each.

    What a pass does is the same every time, evictions included, for least recently used is what an older pass left.
    Only free slots may grow more scattered; `grant_ranges` of the last pass tells.

    Args:
        shape: what is played.
        engine: its cache, filled by the same shape.
        host_slots: of its host pool. The floor of a request then is a bare tree for each tier.
        evicted_blocks: what is evicted at once, some times a pass; 0 for no such evictions.

    Attributes:
        requests: prompts of 512 blocks whose beginning some conversations had before. Shapes without prompts as long
            get some that share nothing.
        loads: the same prompts again, once they have left the device and are in the host pool only.
        evictions: of `evicted_blocks` each.
        grant_ranges: ranges that the new slots of `requests` came in; last pass.
        loaded_blocks: what `loads` found in the host pool; last pass.
        runs_evicted: runs that `evictions` were; last pass.
    """

    def __init__(self, shape: Shape, engine: OneEngine, *, host_slots: int = 0, evicted_blocks: int = 0) -> None:
        self.requests, self.loads, self.evictions = Times(), Times(), Times()
        self.grant_ranges: list[int] = []
        self.loaded_blocks: list[int] = []
        self.runs_evicted: list[int] = []
        self._shape = shape
        self._engine = engine
        self._bare = [BareTree(slots) for slots in (engine.pool.slots, host_slots) if slots]
        self._cuts = {place for place, path in enumerate(shape.paths()) if _crosses(path)}
        length = len(shape.paths()) if self._cuts else min(len(shape.paths()), _PROMPTS_PER_PASS_MAX)
        self._length = length
        lone = 0 if self._cuts else _LONE_PROMPTS_PER_PASS
        self._lone = {index * length // lone for index in range(lone)}
        self._evicted_blocks = evicted_blocks
        evictions = _EVICTIONS_PER_PASS if evicted_blocks else 0
        self._marks = {index * length // evictions for index in range(evictions)}
        self._next_pass = _REPLAY_FIRST_PASS
        self._freed_before = 0
        self._waiting: deque[bytes] = deque(maxlen=_WAITING_MAX if host_slots else 0)

    def run(self, passes: int) -> None:
        """Time so many passes, after one that does not count."""
        self._fill_bare()
        self._play()
        self.requests, self.loads, self.evictions = Times(), Times(), Times()
        for _ in range(passes):
            self._play()

    def _fill_bare(self) -> None:
        for keys in chain.from_iterable(map(self._shape.prompts, count())):
            self._request_bare(keys)
            if not any(tree.free for tree in self._bare):
                break

    def _play(self) -> None:
        for times in (self.requests, self.loads, self.evictions):
            times.next_pass()
        for latest in (self.grant_ranges, self.loaded_blocks, self.runs_evicted):
            latest.clear()
        for place, keys in enumerate(islice(self._shape.prompts(self._next_pass), self._length)):
            if place in self._marks:
                self._evict()
            if place in self._cuts:
                self._request(keys[: REQUEST_BLOCKS * KEY_SIZE])
            elif place in self._lone:
                self._request(self._shape.lone_prompt(self._next_pass, place, REQUEST_BLOCKS))
            if place % _LOOK_EVERY == 0:
                self._load()
            self._engine.request(keys)
            self._request_bare(keys)
        self._next_pass += 1
        gc.collect()

    def _request(self, keys: bytes) -> None:
        core, bare = self._engine.request(keys), self._request_bare(keys)
        if self._engine.freed_blocks > self._freed_before:
            self.requests.add(core, bare)
            self.grant_ranges.append(self._engine.granted_ranges)
        self._waiting.append(keys)

    def _load(self) -> None:
        """Ask again for the oldest timed prompt that can be loaded wholly, if it has left the device already."""
        while self._waiting:
            keys = self._waiting[0]
            device, host = self._engine.hit(keys)
            if device > _DEVICE_HIT_MAX and device + host == REQUEST_BLOCKS:
                return
            self._waiting.popleft()
            if device + host == REQUEST_BLOCKS:
                self.loads.add(self._engine.request(keys), self._request_bare(keys))
                self.loaded_blocks.append(host)
                return

    def _request_bare(self, keys: bytes) -> int:
        return sum(tree.request(keys) for tree in self._bare)

    def _evict(self) -> None:
        """Time an eviction. Until what it freed is used again, requests are not in steady eviction."""
        before, blocks = self._engine.tree.run_count, self._evicted_blocks
        self.evictions.add(self._engine.evict(blocks), sum(tree.evict(blocks) for tree in self._bare))
        self.runs_evicted.append(before - self._engine.tree.run_count + 1)  # the last one is trimmed
        self._freed_before = self._engine.freed_blocks


def _crosses(path: PiecePath) -> bool:
    """Whether a prompt is the first of its conversation to reach 8k tokens."""
    blocks = sum(piece.blocks for piece in path)
    return blocks - path[-1].blocks < REQUEST_BLOCKS <= blocks
