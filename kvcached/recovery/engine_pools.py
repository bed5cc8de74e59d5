"""The engine pools of a daemon: made for engines that ask, kept for those that come back, given back for others.

An engine that starts gets the pool that an engine of its name and sizes has left. While an engine lives, nobody else
gets its pool, and the pool stays. What no engine uses stays until another one needs the room: then pools go that are of
the same name and other sizes, then those that were asked for longest ago.

The service manager keeps the descriptors, so pools outlive the daemon, too. A pool of which it has not kept all is
dropped.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Final

import msgspec

from kvcached.memory.available import NotEnoughMemory, check_available
from kvcached.memory.engine_pool import EnginePool
from kvcached.recovery.fd_store import KEPT_MAX, remove, store
from kvcached_client.blocks.engine_table import table_bytes
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.attach import ClaimedPool, ClaimPool
from kvcached_client.protocol.reports import EnginePoolStats

#: Under which name the service manager keeps a part of a pool: this prefix, the pool's id, and the part's number.
ENGINE_POOL_PREFIX: Final = "engine-"
#: Other descriptors need room at the service manager, too.
_DESCRIPTORS_MAX: Final = KEPT_MAX // 2
#: How many bytes of a namespace's root reports show.
_SHOWN_BYTES: Final = 8

_log: Final = logging.getLogger(__name__)


class EnginePools:
    """All engine pools.

    Args:
        limit_bytes: of all of them; 0 = there are none.
        now_s: the clock, in seconds since the machine's start, which all daemons count alike.
    """

    def __init__(self, limit_bytes: int, now_s: Callable[[], float] = time.monotonic) -> None:
        self.limit_bytes = limit_bytes
        self._now_s = now_s
        self._pools: list[EnginePool] = []

    # --- from one daemon to the next --------------------------------------------------------------------------------

    def take_over(self, found: dict[str, list[int]]) -> None:
        """Take over the pools whose descriptors the service manager has kept, and remove these from `found`."""
        for pool_id, parts in _kept_parts(found).items():
            names = [_part_name(pool_id, part) for part in sorted(parts)]
            descriptors = [parts[part] for part in sorted(parts)]
            pool = EnginePool.adopt(descriptors) if sorted(parts) == list(range(len(parts))) else None
            if pool is None:
                _log.warning("engine pool %s was not kept whole, or is damaged: it is dropped", pool_id)
                _drop(names, descriptors)
                continue
            self._pools.append(pool)
            _log.info("engine pool %s of %s is kept: %d bytes", pool_id, pool.head.name, pool.size_bytes)
        self._make_room("", 0)

    def close(self) -> None:
        """Close all descriptors; the service manager goes on keeping them."""
        for pool in self._pools:
            pool.close()
        self._pools = []

    # --- requests ---------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimPool, user: str = "") -> tuple[ClaimedPool, tuple[int, ...]]:
        """The pool of an engine, and its descriptors, which stay this object's.

        Args:
            request: of the engine.
            user: whose engine it is, the same at each start; "" for the daemon's own user. Part of the name of the
                pool, so that nobody gets the memory that another user's engine has left.

        Raises:
            RequestError: this daemon keeps no such memory, or there is no room for it.
        """
        if not self.limit_bytes:
            raise request_error(
                ErrorCode.LIMIT,
                "this daemon keeps no device memory of engines",
                "set device_memory_bytes in its table [offload]",
            )
        if request.rank is not None and request.rank >= request.ranks:
            raise request_error(ErrorCode.BAD_VALUE, f"rank {request.rank} of {request.ranks}", "count ranks from 0")
        if user:
            request = msgspec.structs.replace(request, name=f"{request.name} ({user})")
        pool = self._claimed(request) or self._left(request) or self._make(request)
        pool.claim = request.claim
        pool.table.note_use(int(self._now_s()))
        claimed = ClaimedPool(pool=pool.head.pool_id, rank_bytes=pool.head.rank_bytes, blocks=pool.head.blocks)
        return claimed, pool.descriptors(request.rank)

    def cleared(self, namespace: bytes) -> None:
        """Drop what the pools hold of a namespace; pools that no engine uses are given back."""
        for pool in self._pools[:]:
            if pool.table.namespace == namespace:
                pool.table.new_epoch()
                if not pool.is_used:
                    self._give_back(pool, "its namespace was cleared")

    def stats(self) -> tuple[EnginePoolStats, ...]:
        """Every pool."""
        return tuple(
            EnginePoolStats(
                pool=pool.shown,
                name=pool.head.name,
                namespace=pool.table.namespace[:_SHOWN_BYTES].hex(),
                ranks=len(pool.head.memories),
                size_bytes=pool.size_bytes,
                blocks=pool.head.blocks,
                named=pool.table.named,
                used=pool.is_used,
            )
            for pool in self._pools
        )

    def _claimed(self, request: ClaimPool) -> EnginePool | None:
        """The pool that another process of the same start has asked for."""
        for pool in self._pools:
            if pool.claim == request.claim:
                if _fits(pool, request):
                    return pool
                raise request_error(
                    ErrorCode.WRONG_LAYOUT,
                    f"another process of this engine has asked for {len(pool.head.memories)} x "
                    f"{pool.head.rank_bytes} bytes of {pool.head.blocks} blocks",
                    "ask for memory of the same size on all ranks",
                )
        return None

    def _left(self, request: ClaimPool) -> EnginePool | None:
        """The pool that an engine of this name has left; the one used last, of several."""
        left = [pool for pool in self._pools if _fits(pool, request) and not pool.is_used]
        return max(left, key=lambda pool: pool.table.used_s, default=None)

    def _make(self, request: ClaimPool) -> EnginePool:
        size_bytes = table_bytes(request.blocks) + request.ranks * request.rank_bytes
        left_bytes = self._make_room(request.name, size_bytes)
        parts = 1 + request.ranks + sum(len(pool.all_descriptors) for pool in self._pools)
        if left_bytes < size_bytes or parts > _DESCRIPTORS_MAX:
            raise request_error(
                ErrorCode.LIMIT,
                f"device memory for {request.name} takes {size_bytes} bytes, and {max(left_bytes, 0)} of "
                f"{self.limit_bytes} are left by the pools of other engines that live",
                "raise device_memory_bytes in the daemon's table [offload], or end another engine",
            )
        try:
            check_available(size_bytes, f"device memory for {request.name}")
            pool = EnginePool.make(request.name, request.ranks, request.rank_bytes, request.blocks)
        except (NotEnoughMemory, OSError) as error:
            raise request_error(ErrorCode.LIMIT, str(error), "give the daemon more memory") from error
        for part, descriptor in enumerate(pool.all_descriptors):
            store(_part_name(pool.shown, part), descriptor)
        self._pools.append(pool)
        _log.info("engine pool %s is made for %s: %d bytes", pool.shown, request.name, size_bytes)
        return pool

    def _make_room(self, name: str, size_bytes: int) -> int:
        """Give back pools that no engine uses, as far as that is needed; the room that there is then."""
        idle = [pool for pool in self._pools if not pool.is_used]
        idle.sort(key=lambda pool: (pool.head.name != name, pool.table.used_s))
        left_bytes = self.limit_bytes - sum(pool.size_bytes for pool in self._pools)
        if size_bytes and left_bytes + sum(pool.size_bytes for pool in idle) < size_bytes:
            return left_bytes
        for pool in idle:
            if left_bytes >= size_bytes:
                break
            left_bytes += pool.size_bytes
            self._give_back(pool, "its room is needed")
        return left_bytes

    def _give_back(self, pool: EnginePool, why: str) -> None:
        _log.info("engine pool %s of %s is given back: %s", pool.shown, pool.head.name, why)
        self._pools.remove(pool)
        names = [_part_name(pool.shown, part) for part in range(len(pool.all_descriptors))]
        pool.close()
        _drop(names, ())


def _fits(pool: EnginePool, request: ClaimPool) -> bool:
    return pool.fits(request.name, request.ranks, request.rank_bytes, request.blocks)


def _part_name(pool_id: str, part: int) -> str:
    return f"{ENGINE_POOL_PREFIX}{pool_id}-{part}"


def _kept_parts(found: dict[str, list[int]]) -> Mapping[str, dict[int, int]]:
    """The kept descriptors by pool and part, removed from `found`; of several with one name the first."""
    pools: dict[str, dict[int, int]] = {}
    for name in [name for name in found if name.startswith(ENGINE_POOL_PREFIX)]:
        pool_id, _, part = name.removeprefix(ENGINE_POOL_PREFIX).rpartition("-")
        if not part.isdecimal():
            continue
        descriptors = found.pop(name)
        pools.setdefault(pool_id, {})[int(part)] = descriptors[0]
        for other in descriptors[1:]:
            os.close(other)
    return pools


def _drop(names: list[str], descriptors: tuple[int, ...] | list[int]) -> None:
    for name in names:
        remove(name)
    for descriptor in descriptors:
        os.close(descriptor)
