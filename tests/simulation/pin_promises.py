"""What people were told of pins, and what has to be cached since."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcached.core.cache import Cache
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.index.tree import PrefixTree
from kvcached.core.pins import Held, Pin
from kvcached.core.slots.slots import DevicePool, SlotPool
from kvcached.core.slots.states import PoolState
from kvcached_client.protocol import engine as wire
from tests.simulation.scheduler import Broken

#: What may cost a pin blocks, by what is counted then.
_COSTS = (
    "workers_lost",
    "sessions_ended",
    "sessions_expired",
    "load_failed_blocks",
    "store_failed_blocks",
    "corrupt_blocks",
)
_Name = tuple[PrefixTree, DevicePool | None, bytes]


@dataclass
class _Promise:
    """A pin as it was answered, and how much of it was there when somebody looked last."""

    keys: bytes
    namespace: bytes
    until_ms: int
    device: int
    host: int


class PinPromises:
    """Of one daemon: pins do not outlive it.

    Args:
        quota_percent: of each pool's slots that may be pinned.
    """

    def __init__(self, cache: Cache, now_ms: Callable[[], int], quota_percent: int) -> None:
        self._cache = cache
        self._quota_percent = quota_percent
        self._now_ms = now_ms
        self._promises: dict[_Name, _Promise] = {}
        self._costs: tuple[int, ...] = ()

    def answered(self, request: wire.Request, frames: list[bytes], header: wire.Header) -> None:
        """An answer goes out.

        Raises:
            Broken: more is pinned than may be.
        """
        if isinstance(request, wire.Pin) and isinstance(header, wire.Pinned):
            name = self._name(request.target, frames[0])
            before = self._promises.get(name)
            until_ms = self._now_ms() + request.ttl_ms
            self._promises[name] = _Promise(frames[0], name[0].namespace, until_ms, header.device, header.host)
            self._look_at_quota(name, before, header)
        elif isinstance(request, wire.Unpin) and isinstance(header, wire.Unpinned):
            name = self._name(request.target, frames[0])
            if header.was_pinned != (self._promises.pop(name, None) is not None):
                raise Broken(f"of {request.target} it was said that it was pinned: {header.was_pinned}")

    def look(self) -> None:
        """What is pinned is cached, and nothing is pinned that nobody asked for.

        Raises:
            Broken: that is not so.
        """
        counters, pins = self._cache.counters, self._cache.pins._pins
        costs = tuple(counters[name] for name in _COSTS)
        is_cheaper, self._costs = costs != self._costs, costs
        for name, promise in list(self._promises.items()):
            if name not in pins:
                self._look_at_end(name, promise)
                del self._promises[name]
            else:
                self._look_at_blocks(name, promise, pins[name], is_cheaper=is_cheaper)
        for name in pins:
            if name not in self._promises:
                raise Broken(f"a prefix of {len(name[2]) // KEY_SIZE} blocks is pinned that nobody has pinned")

    def ticked(self, now_ms: int) -> None:
        """Time has passed: those whose time is over are ended.

        Raises:
            Broken: one is not.
        """
        for name, promise in self._promises.items():
            if promise.until_ms <= now_ms and name in self._cache.pins._pins:
                raise Broken(f"a pin that was to end at {promise.until_ms} ms is there at {now_ms} ms")

    def _look_at_end(self, name: _Name, promise: _Promise) -> None:
        """A pin has gone by itself."""
        tree = name[0]
        is_current = tree in self._cache.trees and tree not in self._cache.offload.namespaces.retired
        is_cleared = tree.namespace != promise.namespace or not is_current or any(pool.clearing for pool in tree.pools)
        used = {id(session.namespace.tree) for session in self._cache.offload.sessions.values()}
        is_idle = not tree.pools and id(tree) not in used
        if promise.until_ms > self._now_ms() and not is_cleared and not is_idle:
            raise Broken(f"a pin until {promise.until_ms} ms has gone at {self._now_ms()} ms")

    def _look_at_blocks(self, name: _Name, promise: _Promise, pin: Pin, *, is_cheaper: bool) -> None:
        tree, pool, _ = name
        device = host = 0
        if pool is not None and pool.state is not PoolState.AWAKE:
            promise.device = 0  # what is pinned in the host pool stays
        if pool is not None:
            device = tree.match(promise.keys, promise.device, pool.index)[1] if promise.device else 0
        if tree.host is not None and promise.host:
            host = tree.match_host(tree.root, 0, promise.keys, promise.host)[1]
        if (device < promise.device or host < promise.host) and not is_cheaper:
            raise Broken(f"of {promise.device} and {promise.host} pinned blocks {device} and {host} are there")
        for held, found in ((pin.device, device), (pin.host, host)):
            self._look_at_held(held, found)
        promise.device, promise.host = device, host

    def _look_at_held(self, held: Held, found: int) -> None:
        if held.depth < found:
            raise Broken(f"{found} blocks are promised, and {held.depth} are pinned")

    def _look_at_quota(self, name: _Name, before: _Promise | None, header: wire.Pinned) -> None:
        tree, pool, _ = name
        of_tree = [(where, each) for (other, where, _), each in self._promises.items() if other is tree]
        device, host = (before.device, before.host) if before is not None else (0, 0)
        if pool is not None and header.device > device:
            self._compare(sum(each.device for where, each in of_tree if where is pool), pool)
        if tree.host is not None and header.host > host:
            self._compare(sum(each.host for _, each in of_tree), tree.host)

    def _compare(self, used: int, slots: SlotPool) -> None:
        if used * 100 > slots.slots * self._quota_percent:
            raise Broken(f"{used} blocks of {slots.name} are pinned, more than the quota of {slots.slots} slots")

    def _name(self, target: str, keys: bytes) -> _Name:
        cache = self._cache
        if target in cache.pools:
            return cache.tree_of(target), cache.pools[target], keys[-KEY_SIZE:]
        spaces = cache.offload.namespaces.by_root.values()
        return next(space.tree for space in spaces if space.spec.label == target), None, keys[-KEY_SIZE:]
