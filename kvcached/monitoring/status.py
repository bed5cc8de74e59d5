"""The daemon's figures as the status page reads them: ``/status.json``. They are made from what metrics are made of."""

from __future__ import annotations

from typing import Final

import msgspec

from kvcached.core.insight.sessions import SessionView
from kvcached.monitoring.families import Snapshot
from kvcached.monitoring.timing import REQUEST_BOUNDS_NS, CopyTimes, RequestTimes

_NS_PER_S: Final = 1_000_000_000
_MS_PER_S: Final = 1000


class ReplicaFigures(msgspec.Struct, frozen=True):
    """A configured replica."""

    name: str
    model: str
    device: str
    shards: int
    block_size: int  #: tokens
    block_bytes: int  #: of all shards


class VerbFigures(msgspec.Struct, frozen=True):
    """Requests of one verb."""

    verb: str
    counts: list[int]  #: by duration; one more than there are bounds
    seconds: float  #: of all of them


class CopyFigures(msgspec.Struct, frozen=True):
    """Copies of one executor and kind."""

    executor: str
    kind: str
    in_flight: int
    copied_bytes: int
    ended: int
    seconds: float  #: of those that have ended


class SessionFigures(msgspec.Struct, frozen=True):
    """A session. For what a field means, see `kvcached.core.insight.sessions`."""

    id: int
    where: str
    is_offload: bool
    state: str
    leases: int
    copies: int
    set_aside: int
    silent_s: float


def status_json(snapshot: Snapshot, sessions: list[SessionView], now_ms: int) -> bytes:
    """The fields of `kvcached stats --json`, and what the status page shows beside them."""
    stats, storage = snapshot.stats, snapshot.storage
    fields = {name: getattr(stats, name) for name in stats.__struct_fields__ if name != "id"}
    fields |= {
        "version": snapshot.description.version,
        "session_list": [SessionFigures(*each[:-1], (now_ms - each.heard_ms) / _MS_PER_S) for each in sessions],
        "replicas": [
            ReplicaFigures(
                each.name,
                each.model,
                each.device,
                each.layout.shards,
                each.layout.block_size,
                each.bytes_per_block * each.layout.shards,
            )
            for each in snapshot.description.replicas
        ],
        "host_pool": {"slabs": snapshot.host_slabs, "slab_bytes": snapshot.slab_bytes},
        "storage": {name: getattr(storage, name) for name in storage.__struct_fields__ if name != "id"}
        if storage.backend
        else None,
        "request_bounds_s": [bound / _NS_PER_S for bound in REQUEST_BOUNDS_NS],
        "requests": _requests(snapshot.request_times),
        "waiting": {wait: count for wait, count in snapshot.waiting.items() if count},
        "copies": _copies(snapshot.copy_times),
    }
    return msgspec.json.encode(fields) + b"\n"


def _requests(times: RequestTimes) -> list[VerbFigures]:
    """Of each verb that somebody has sent."""
    return [
        VerbFigures(str(verb.__struct_config__.tag), durations.counts, durations.sum_ns / _NS_PER_S)  # type: ignore[attr-defined] # each is a message
        for verb, durations in times.by_verb.items()
        if any(durations.counts)
    ]


def _copies(times: CopyTimes) -> list[CopyFigures]:
    return [
        CopyFigures(
            executor,
            kind,
            times.count(executor, kind),
            times.copied_bytes[executor, kind],
            sum(durations.counts),
            durations.sum_ns / _NS_PER_S,
        )
        for (executor, kind), durations in times.durations.items()
    ]
