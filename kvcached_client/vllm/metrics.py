"""The connector's counters as vLLM's statistics: in its periodic log line, and as Prometheus metrics.

vLLM itself counts hits: ``vllm:external_prefix_cache_queries`` and ``_hits``, with the source "host".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from kvcached_client.vllm.orders import CopyCounts
from kvcached_client.vllm.settings import VllmConfig

_SKIPPED: Final = "store_skipped_blocks"
_LATE: Final = "late_requests"
_ACCEPTED: Final = "request_wishes_accepted"
_REFUSED: Final = "request_wishes_refused"
_COUNTERS: Final = {
    "loaded_blocks": "KV blocks loaded from kvcached's host pool, counted on every worker.",
    "loaded_bytes": "Bytes of KV loaded from kvcached's host pool.",
    "load_seconds": "Time spent on loads, in seconds.",
    "load_failed_blocks": "KV blocks that could not be loaded after all, and were computed.",
    "stored_blocks": "KV blocks stored into kvcached's host pool, counted on every worker.",
    "stored_bytes": "Bytes of KV stored into kvcached's host pool.",
    "store_seconds": "Time spent on stores, in seconds.",
    "store_failed_blocks": "KV blocks whose store failed on a worker.",
    _SKIPPED: "Computed KV blocks that were not stored: no room, too many stores under way, or no daemon.",
    _LATE: "Requests that were computed without kvcached because the daemon's answer was late.",
    _ACCEPTED: "What requests asked of kvcached (kv_transfer_params, KV hints) and was accepted.",
    _REFUSED: "What requests asked of kvcached and was refused, by the connector or later by the daemon.",
}
_UP: Final = "daemon_up"
_PREFILL: Final = "prefill_tokens_per_s"
#: Metrics of which the last value counts.
_GAUGES: Final = {
    _UP: "1 while the engine has a session with the kvcached daemon, else 0.",
    _PREFILL: "Tokens of prompts that this engine computes in a second, as kvcached has measured; 0: not known yet.",
}


@dataclass
class KvcachedStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the last report, and gauges, by name."""

    def reset(self) -> None:
        """Forget all values."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add the sums of another report; gauges take its values."""
        for name, value in other.data.items():
            self.data[name] = value if name in _GAUGES else self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Values for the log line."""
        return {name: round(value, 3) for name, value in self.data.items() if value or name == _UP}

    def is_empty(self) -> bool:
        """Whether there are no values."""
        return not self.data


def worker_stats(counts: CopyCounts, block_bytes: int) -> KvcachedStats:
    """A worker's statistics."""
    sums = asdict(counts)
    sums["loaded_bytes"] = counts.loaded_blocks * block_bytes
    sums["stored_bytes"] = counts.stored_blocks * block_bytes
    return KvcachedStats(data=sums)


def scheduler_state(*, is_up: bool, prefill_tokens_per_s: float) -> dict[str, float]:
    """The gauges. The rate has two significant digits, so that it does not change with each step."""
    return {_UP: int(is_up), _PREFILL: float(f"{prefill_tokens_per_s:.1e}")}


def scheduler_stats(
    state: Mapping[str, float], *, skipped_blocks: int, late_requests: int, wishes: tuple[int, int]
) -> KvcachedStats:
    """The scheduler's side's statistics; `wishes` are the numbers of those accepted and refused."""
    accepted, refused = wishes
    sums = {_SKIPPED: skipped_blocks, _LATE: late_requests, _ACCEPTED: accepted, _REFUSED: refused}
    return KvcachedStats(data={**state, **sums})


class KvcachedPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """The Prometheus metrics: a counter for each sum, and the gauges."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:kvcached_{name}", documentation=words, labelnames=labelnames)
            for name, words in _COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=f"vllm:kvcached_{name}",
                documentation=words,
                labelnames=labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, words in _GAUGES.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an engine's report."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name in _GAUGES:
                self._gauges[name].labels(*labels).set(value)
            else:
                self._counters[name].labels(*labels).inc(value)
