"""Counters: what each total of `kvcached stats` and of storage is called in Prometheus."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import CounterMetricFamily, Metric

from kvcached.core.transfers.storage_state import PrefetchEnd
from kvcached_client.errors import ErrorCode


class Total(NamedTuple):
    """A counter, whose samples are totals of a report.

    Attributes:
        name: without ``_total``.
        meaning: what it counts.
        labels: names of its labels.
        sources: the values of its labels, by the name of the total.
    """

    name: str
    meaning: str
    sources: Mapping[str, tuple[str, ...]]
    labels: tuple[str, ...] = ()

    def metric(self, totals: Mapping[str, int]) -> Metric:
        """The counter as it stands. A total that is missing is 0."""
        family = CounterMetricFamily(self.name, self.meaning, labels=self.labels)
        for source, values in self.sources.items():
            family.add_metric(values, totals.get(source, 0))
        return family


def _plain(name: str, source: str, meaning: str) -> Total:
    return Total(f"kvcached_{name}", meaning, {source: ()})


#: Of `StatsReport.counters`.
TOTALS: Final = (
    _plain("acquires", "acquires", "Leases granted."),
    _plain("releases", "releases", "Leases given back."),
    Total(
        "kvcached_hit_blocks",
        "Full blocks of acquired prompts that were found, by the tier that had them. Blocks of the host tier that were"
        " not loaded (threshold, quota) count as missed, too.",
        {"hit_blocks": ("device",), "host_hit_blocks": ("host",)},
        ("tier",),
    ),
    _plain("missed_blocks", "missed_blocks", "Full blocks of acquired prompts that had to be computed."),
    _plain("committed_blocks", "committed_blocks", "Blocks made findable."),
    _plain("duplicate_blocks", "duplicate_blocks", "Committed blocks that were cached already."),
    Total(
        "kvcached_evicted_blocks",
        "Copies of blocks that left a tier: room for others (room), ahead of need because the host pool has them"
        " (demotion), or because a block before them was lost (lost_prefix).",
        {
            "evicted_blocks": ("device", "room"),
            "demoted_blocks": ("device", "demotion"),
            "host_evicted_blocks": ("host", "room"),
            "host_dropped_blocks": ("host", "lost_prefix"),
        },
        ("tier", "reason"),
    ),
    _plain("lost_blocks", "dropped_blocks", "Blocks evicted from a device pool that had no other copy in memory."),
    _plain("cleared_blocks", "cleared_blocks", "Blocks removed because their namespace was cleared."),
    _plain("forgotten_blocks", "forgotten_blocks", "Copies of blocks in memory that `kvcached forget` has removed."),
    _plain("corrupt_blocks", "corrupt_blocks", "Copies in the host pool that differed from what was stored."),
    Total(
        "kvcached_store_blocks",
        "Blocks for the host pool: copied (stored), copy failed (failed), copy failed again and again for this block"
        " alone (given_up), no room there (refused), or not selected by the write policy (declined).",
        {
            "stored_blocks": ("stored",),
            "store_failed_blocks": ("failed",),
            "store_given_up_blocks": ("given_up",),
            "store_refused_blocks": ("refused",),
            "store_declined_blocks": ("declined",),
        },
        ("outcome",),
    ),
    Total(
        "kvcached_load_blocks",
        "Blocks in the host pool behind a prompt's hit: copied (loaded), copy failed or was cut off (failed), cancelled"
        " by the engine (called_off), or computed instead, because there were too few (below_threshold) or too many"
        " others were being loaded (over_quota).",
        {
            "loaded_blocks": ("loaded",),
            "load_failed_blocks": ("failed",),
            "load_called_off_blocks": ("called_off",),
            "load_below_threshold_blocks": ("below_threshold",),
            "load_over_quota_blocks": ("over_quota",),
        },
        ("outcome",),
    ),
    _plain("joined_loads", "joined_loads", "Requests that waited for a load that another request had started."),
    _plain("store_waits", "store_waits", "Prefetches that waited for blocks that another session was storing."),
    Total(
        "kvcached_forgotten_paths",
        "Paths that were dropped from the queue for the host pool, or for storage, because it was too long.",
        {"stores_forgotten": ("host",), "backup_skipped_paths": ("storage",)},
        ("queue",),
    ),
    Total(
        "kvcached_backup_blocks",
        "Blocks of the host pool that storage has now, those that it had before included (written), or that could not"
        " be written after three attempts (failed).",
        {"backed_up_blocks": ("written",), "backup_failed_blocks": ("failed",)},
        ("outcome",),
    ),
    Total(
        "kvcached_prefetch_blocks",
        "Blocks from storage: copied to the host pool (fetched), or missing or different there (failed).",
        {"prefetched_blocks": ("fetched",), "prefetch_failed_blocks": ("failed",)},
        ("outcome",),
    ),
    Total(
        "kvcached_prefetches",
        "Prefetches that have ended, by the reason: whether their blocks were loaded from storage, are predicted to be"
        " computed sooner (recompute), or why else not.",
        {f"prefetches_{end}": (str(end),) for end in PrefetchEnd},
        ("end",),
    ),
    _plain("reclaimed_slabs", "reclaimed_slabs", "Slabs of the host pool that one namespace had to give to another."),
    _plain("pins_set", "pins_set", "Pins that were set or renewed."),
    _plain("pins_ended", "pins_ended", "Pins that have ended."),
    _plain("no_capacity", "no_capacity", "Times that leases or copies in flight held too much of a pool."),
    _plain("sessions_opened", "sessions_opened", "Sessions begun."),
    _plain("sessions_ended", "sessions_ended", "Sessions over for any reason."),
    _plain("sessions_expired", "sessions_expired", "Sessions over whose processes may still write."),
    _plain("sessions_resumed", "sessions_resumed", "Engines from before a restart that rejoined."),
    _plain("leases_declared", "leases_declared", "Leases that rejoined engines kept."),
    _plain("workers_lost", "workers_lost", "Worker processes that ended while they served."),
    _plain("requests", "requests", "Well-formed requests, heartbeats and what a scrape asks included."),
    _plain("disconnects", "disconnects", "Closed connections of engines and commands."),
    _plain("tcp_unknown_keys", "tcp_unknown_keys", "Handshakes at the TCP port of keys that are not let in."),
    _plain(
        "tcp_violations",
        "tcp_violations",
        "Connections at the TCP port that were cut off: no CURVE, another daemon's key, or changed bytes.",
    ),
    _plain("dropped_replies", "dropped_replies", "Replies whose reader was gone or read too slowly."),
    Total(
        "kvcached_errors",
        "Error replies, and refused offers of `prepare_stores`, by their code in docs/protocol.md.",
        {f"errors_{code}": (str(code),) for code in ErrorCode},
        ("code",),
    ),
)

#: Of `StorageReport.counters`.
STORAGE_TOTALS: Final = (
    _plain("storage_written_blocks", "written_blocks", "Blocks written to storage, without those that it had."),
    _plain("storage_fetched_blocks", "fetched_blocks", "Blocks read from storage."),
    _plain("storage_wrong_blocks", "wrong_blocks", "Blocks in storage that differed from what had been stored."),
    _plain(
        "storage_refused_writes", "refused_writes", "Orders of which working storage accepted no block, or not all."
    ),
    _plain("storage_failures", "failures", "Orders to storage that failed."),
    _plain("storage_timeouts", "timeouts", "Times that storage answered no order in time."),
)


def totals(counters: Mapping[str, int]) -> Iterator[Metric]:
    """What has happened since the daemon's start."""
    return (total.metric(counters) for total in TOTALS)


def storage_totals(counters: Mapping[str, int] | None) -> Iterator[Metric]:
    """What storage did since the daemon's start; without samples where there is none."""
    for total in STORAGE_TOTALS:
        if counters is not None:
            yield total.metric(counters)
        else:
            yield CounterMetricFamily(total.name, total.meaning, labels=total.labels)
