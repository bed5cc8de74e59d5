"""What anybody may ask about the daemon: requests that need no session and change nothing, one method each."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.service.admission import DrainState
from kvcached.service.replica import Replica, check_replica
from kvcached.service.replies import Answer, Verb
from kvcached.service.reports import ShownKeys, description, explained, inspect_report, stats_report, tree_report
from kvcached_client.protocol import engine as wire


class ReportVerbs:
    """Answers from what is there now.

    Args:
        offload: what engines in offload mode are offered.
        now_ms: the clock; the daemon is up since now.
        drain_state: its state.

    Attributes:
        by_type: what serves each verb.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        offload: wire.OffloadInfo | None,
        now_ms: Callable[[], int],
        drain_state: DrainState,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._offload = offload
        self._now_ms = now_ms
        self._drain_state = drain_state
        self._started_ms = now_ms()
        self._shown = ShownKeys()
        self.by_type: dict[type[wire.Header], Verb] = {
            wire.Stats: self._stats,
            wire.Check: self._check,
            wire.Describe: self._describe,
            wire.Tree: self._tree,
            wire.Inspect: self._inspect,
            wire.Explain: self._explain,
        }

    def _stats(self, _: bytes, request: wire.Stats, __: list[bytes]) -> Answer:
        uptime_ms = self._now_ms() - self._started_ms
        return Answer(stats_report(request.id, self._cache, self._replicas, uptime_ms, self._drain_state.state))

    def _check(self, _: bytes, request: wire.Check, __: list[bytes]) -> Answer:
        violations = tuple(check(self._cache))
        return Answer(wire.CheckReport(id=request.id, ok=not violations, violations=violations))

    def _describe(self, _: bytes, request: wire.Describe, __: list[bytes]) -> Answer:
        replicas = list(self._replicas.values())
        return Answer(description(request.id, self._cache.epoch, self._drain_state.state, replicas, self._offload))

    def _tree(self, _: bytes, request: wire.Tree, __: list[bytes]) -> Answer:
        check_replica(request.replica, self._replicas)
        report, nodes = tree_report(request, self._cache, self._replicas, self._shown)
        return Answer(report, (nodes,))

    def _inspect(self, _: bytes, request: wire.Inspect, __: list[bytes]) -> Answer:
        return Answer(inspect_report(request, self._cache, self._replicas, self._shown))

    def _explain(self, _: bytes, request: wire.Explain, frames: list[bytes]) -> Answer:
        check_replica(request.replica, self._replicas)
        return Answer(explained(request, frames[0], self._cache, self._replicas))
