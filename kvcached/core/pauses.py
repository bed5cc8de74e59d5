"""Copies between the tiers stop on request: no new ones are started, and those under way can be counted.

Requests go on. A hit is what the device has; engines in offload mode are told to compute, and have nothing to store.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvcached.core.cache import Cache
from kvcached.core.slots.slots import DevicePool


def pause(cache: Cache, replica: str = "") -> None:
    """Start no copies for a replica; for "" none at all, those of engines in offload mode included."""
    _set(cache, replica, is_paused=True)


def resume(cache: Cache, replica: str = "") -> None:
    """The end of `pause`, of a replica's or of all."""
    _set(cache, replica, is_paused=False)


def is_paused(cache: Cache, replica: str = "") -> bool:
    """Whether a pause of these holds: for "" of all, so that the end of one replica's is the end of it."""
    return all(pool.paused for pool in _pools(cache, replica)) and (bool(replica) or cache.offload.paused)


def copies_under_way(cache: Cache, replica: str = "") -> int:
    """Copies of a replica that have not ended; for "" all, those of engines in offload mode included."""
    pools = {id(pool) for pool in _pools(cache, replica)}
    transfers = sum(id(transfer.pool) in pools for transfer in cache.transfers.values())
    return transfers + (0 if replica else len(cache.offload.transfers) + len(cache.storage.copies))


def _set(cache: Cache, replica: str, *, is_paused: bool) -> None:
    for pool in _pools(cache, replica):
        pool.paused = is_paused
    if not replica:
        cache.offload.paused = cache.storage.paused = cache.storage.prefetches.paused = is_paused


def _pools(cache: Cache, replica: str) -> Iterable[DevicePool]:
    return (cache.pools[replica],) if replica else cache.pools.values()
