"""Prefixes that people keep cached for a time: a system prompt that must not leave however long nobody uses it.

A pin holds what is cached of its prefix when it is set, in the device pool of one replica and in the host pool, and
holds more when it is set again. Where memory is lost, or blocks prove bad, it is shorter, and nobody is kept waiting.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.refusals import Refusal, Why
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import PoolState

#: Of one daemon. Each tick looks at all of them.
PINS_MAX = 4096


@dataclass(slots=True, eq=False)
class Held:
    """The part of a pin in one pool: the path ``[0, depth)`` to `run` is pinned there."""

    run: Run
    depth: int


@dataclass(slots=True, eq=False)
class Pin:
    """One of them.

    Attributes:
        tree: where.
        pool: the device pool; None where it is of the host pool only.
        until_ms: when it ends unless it is set again.
        device, host: what it holds.
    """

    tree: PrefixTree
    pool: DevicePool | None
    until_ms: int
    device: Held
    host: Held


class Pins:
    """All pins of a daemon.

    Args:
        quota_percent: of each pool's slots that may be pinned.
    """

    def __init__(self, counters: Counter[str], quota_percent: int) -> None:
        self._counters = counters
        self._quota_percent = quota_percent
        self._pins: dict[tuple[PrefixTree, DevicePool | None, bytes], Pin] = {}

    def held(self, tree: PrefixTree, pool: DevicePool | None) -> list[Held]:
        """What is pinned in a device pool of a tree, or for None in its host pool."""
        if pool is None:
            return [pin.host for pin in self._pins.values() if pin.tree is tree]
        return [pin.device for pin in self._pins.values() if pin.pool is pool]

    def blocks(self, tree: PrefixTree, pool: DevicePool | None) -> int:
        """How many blocks count against the quota: those that two pins share count twice."""
        return sum(held.depth for held in self.held(tree, pool))

    def quota(self, pool: SlotPool) -> int:
        """How many blocks of a pool may be pinned."""
        return pool.slots * self._quota_percent // 100

    def pin(self, tree: PrefixTree, pool: DevicePool | None, keys: bytes, until_ms: int) -> Pin:
        """Keep what is cached of a prefix until then, instead of what an earlier call with the same keys kept.

        Raises:
            Refusal: over the quota, or too many pins. An earlier pin of the prefix is as it was.
        """
        name = tree, pool, keys[-KEY_SIZE:]
        before = self._pins.get(name)
        count, device, host = len(keys) // KEY_SIZE, Held(tree.root, 0), Held(tree.root, 0)
        if pool is not None and pool.state is PoolState.AWAKE:  # one that falls asleep would never be empty
            device = Held(*tree.match(keys, count, pool.index))
            self._check(tree, pool, pool, device.depth - (before.device.depth if before else 0))
        if tree.host is not None:
            host = Held(*tree.match_host(tree.root, 0, keys, count))
            self._check(tree, None, tree.host, host.depth - (before.host.depth if before else 0))
        pin = Pin(tree, pool, until_ms, device, host)
        if before is None and len(self._pins) >= PINS_MAX:
            self._make_room()
        if pool is not None:
            tree.lock(device.run, device.depth, pool.index)
        tree.lock(host.run, host.depth, HOST)
        if before is not None:
            self._let_go(before)
        self._pins[name] = pin
        self._counters["pins_set"] += 1
        return pin

    def unpin(self, tree: PrefixTree, pool: DevicePool | None, keys: bytes) -> bool:
        """Keep a prefix no longer; whether it was kept."""
        pin = self._pins.pop((tree, pool, keys[-KEY_SIZE:]), None)
        if pin is not None:
            self._end(pin)
        return pin is not None

    def tick(self, now_ms: int) -> None:
        """End those whose time has come."""
        for name, pin in list(self._pins.items()):
            if pin.until_ms <= now_ms:
                del self._pins[name]
                self._end(pin)

    def drop(self, tree: PrefixTree) -> None:
        """Nothing of a tree is kept any more: it is cleared, or its memory is needed."""
        for name, pin in list(self._pins.items()):
            if pin.tree is tree:
                del self._pins[name]
                self._end(pin)

    def leave(self, pool: DevicePool) -> None:
        """Nothing is kept in a device pool any more; what pins keep in the host pool they keep."""
        for pin in self._pins.values():
            if pin.pool is pool:
                self._shorten(pin.tree, pool, pin.device, 0)

    def cut_off(self, tree: PrefixTree, pool: DevicePool, run: Run, depth: int) -> None:
        """A pool's part of the path to `run` is about to end at `depth`: nothing behind that is kept there."""
        for held in self.held(tree, pool):
            if tree.passes(held.run, held.depth, run, depth):
                self._shorten(tree, pool, held, depth)

    def _shorten(self, tree: PrefixTree, pool: DevicePool, held: Held, depth: int) -> None:
        tree.unlock(tree.resolve(held.run, held.depth), held.depth, pool.index)
        held.run, held.depth = tree.resolve(held.run, depth), depth
        tree.lock(held.run, depth, pool.index)

    def _check(self, tree: PrefixTree, pool: DevicePool | None, slots: SlotPool, more: int) -> None:
        used, quota = self.blocks(tree, pool), self.quota(slots)
        if more > 0 and used + more > quota:
            raise Refusal(Why.PIN_QUOTA, used=used, pool=slots.name, more=more, quota=quota)

    def _make_room(self) -> None:
        """End a pin of which nothing is cached: anybody can make thousands of these.

        Raises:
            Refusal: there is none.
        """
        name = next((name for name, pin in self._pins.items() if not pin.device.depth and not pin.host.depth), None)
        if name is None:
            raise Refusal(Why.PINS_FULL, pins=len(self._pins))
        self._end(self._pins.pop(name))

    def _end(self, pin: Pin) -> None:
        self._counters["pins_ended"] += 1
        self._let_go(pin)

    def _let_go(self, pin: Pin) -> None:
        tree, device, host = pin.tree, pin.device, pin.host
        if pin.pool is not None:
            tree.unlock(tree.resolve(device.run, device.depth), device.depth, pin.pool.index)
        tree.unlock_host(host.run, host.depth)
        tree.drop_lost(host.run)
