"""What the daemon tells about itself: replies that only read."""

from __future__ import annotations

import os

from kvcached import VERSION
from kvcached.core.cache import LEASES_PER_SESSION_MAX, Cache
from kvcached.core.pool import DevicePool
from kvcached.core.states import SlotState
from kvcached.replica import Replica
from kvcached_client import protocol as wire


def stats_report(request_id: int, cache: Cache, uptime_ms: int) -> wire.StatsReport:
    """Counters and gauges of every pool."""
    return wire.StatsReport(
        id=request_id,
        daemon_epoch=cache.epoch,
        uptime_ms=uptime_ms,
        sessions=len(cache.sessions),
        runs=sum(tree.run_count for tree in cache.trees),
        cached_blocks=sum(pool.counts[SlotState.CACHED] for pool in cache.pools.values()),
        pools=tuple(_pool_stats(cache, pool) for _, pool in sorted(cache.pools.items())),
        counters=dict(sorted(cache.counters.items())),
    )


def _pool_stats(cache: Cache, pool: DevicePool) -> wire.PoolStats:
    sessions = [session for session in cache.sessions.values() if session.pool is pool]
    return wire.PoolStats(
        replica=pool.name,
        epoch=pool.epoch,
        slots=pool.slots,
        states={state.name.lower(): pool.counts[state] for state in SlotState},
        evictable=pool.evictable,
        leases=sum(len(session.leases) for session in sessions),
        session=sessions[0].id if sessions else 0,
        healthy=pool.healthy,
    )


def description(request_id: int, daemon_epoch: int, replicas: list[Replica]) -> wire.Description:
    """Versions, replicas and limits."""
    return wire.Description(
        id=request_id,
        version=VERSION,
        protocol_min=wire.PROTOCOL_VERSION_MIN,
        protocol_max=wire.PROTOCOL_VERSION,
        daemon_epoch=daemon_epoch,
        pid=os.getpid(),
        replicas=tuple(replica.info() for replica in replicas),
        limits={
            "header_bytes": wire.HEADER_SIZE_BYTES_MAX,
            "frame_bytes": wire.FRAME_SIZE_BYTES_MAX,
            "blocks_per_message": wire.BLOCKS_PER_MESSAGE_MAX,
            "tokens_per_message": wire.TOKENS_PER_MESSAGE_MAX,
            "leases_per_session": LEASES_PER_SESSION_MAX,
        },
    )
