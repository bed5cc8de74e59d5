"""The requests by which people keep prefixes cached: pin and unpin."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcached.answers import Answer
from kvcached.core.cache import Cache
from kvcached.core.pool import DevicePool
from kvcached.core.tree import PrefixTree
from kvcached.replica import Replica
from kvcached.targets import find_target
from kvcached_client import protocol as wire
from kvcached_client.errors import ErrorCode, request_error


class PinVerbs:
    """Serves them.

    Attributes:
        by_type: what serves which.
    """

    def __init__(self, cache: Cache, replicas: Mapping[str, Replica], now_ms: Callable[[], int]) -> None:
        self._cache = cache
        self._replicas = replicas
        self._now_ms = now_ms
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Pin: self._pin,
            wire.Unpin: self._unpin,
        }

    def _pin(self, _: bytes, request: wire.Pin, frames: list[bytes]) -> Answer:
        tree, pool = self._place(request.target, frames[0])
        pin = self._cache.pins.pin(tree, pool, frames[0], self._now_ms() + request.ttl_ms)
        return Answer(wire.Pinned(id=request.id, device=pin.device.depth, host=pin.host.depth))

    def _unpin(self, _: bytes, request: wire.Unpin, frames: list[bytes]) -> Answer:
        tree, pool = self._place(request.target, frames[0])
        return Answer(wire.Unpinned(id=request.id, was_pinned=self._cache.pins.unpin(tree, pool, frames[0])))

    def _place(self, target: str, keys: bytes) -> tuple[PrefixTree, DevicePool | None]:
        """The tree, and for a replica its own pool."""
        if not keys:
            raise request_error(ErrorCode.BAD_VALUE, "a prefix of no blocks", "send the keys of its full blocks")
        tree = find_target(self._cache, self._replicas, target).tree
        pool = self._cache.pools.get(target)
        if pool is None and tree.host is None:
            raise request_error(
                ErrorCode.BAD_VALUE, f"{target!r} has no host pool to pin in", "name one of its replicas"
            )
        return tree, pool
