"""What anybody may ask about the daemon: requests that need no session and change nothing, one method each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvcached.admission import unknown_replica
from kvcached.answers import Answer
from kvcached.core.cache import Cache
from kvcached.core.invariants import check
from kvcached.modes import Modes
from kvcached.replica import Replica
from kvcached.reports import description, explained, inspect_report, stats_report, tree_report
from kvcached_client import protocol as wire


class ReportVerbs:
    """Answers from what is there now.

    Args:
        attached: what engines in attached mode are offered.
        now_ms: the clock; the daemon is up since now.
        modes: its state.

    Attributes:
        by_type: what serves each verb.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        attached: wire.AttachedInfo | None,
        now_ms: Callable[[], int],
        modes: Modes,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._attached = attached
        self._now_ms = now_ms
        self._modes = modes
        self._started_ms = now_ms()
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.Stats: self._stats,
            wire.Check: self._check,
            wire.Describe: self._describe,
            wire.Tree: self._tree,
            wire.Inspect: self._inspect,
            wire.Explain: self._explain,
        }

    def _stats(self, _: bytes, request: wire.Stats, __: list[bytes]) -> Answer:
        uptime_ms = self._now_ms() - self._started_ms
        return Answer(stats_report(request.id, self._cache, self._replicas, uptime_ms, self._modes.state))

    def _check(self, _: bytes, request: wire.Check, __: list[bytes]) -> Answer:
        violations = tuple(check(self._cache))
        return Answer(wire.CheckReport(id=request.id, ok=not violations, violations=violations))

    def _describe(self, _: bytes, request: wire.Describe, __: list[bytes]) -> Answer:
        replicas = list(self._replicas.values())
        return Answer(description(request.id, self._cache.epoch, self._modes.state, replicas, self._attached))

    def _tree(self, _: bytes, request: wire.Tree, __: list[bytes]) -> Answer:
        self._check_replica(request.replica)
        report, nodes = tree_report(request, self._cache, self._replicas)
        return Answer(report, (nodes,))

    def _inspect(self, _: bytes, request: wire.Inspect, __: list[bytes]) -> Answer:
        return Answer(inspect_report(request, self._cache, self._replicas))

    def _explain(self, _: bytes, request: wire.Explain, frames: list[bytes]) -> Answer:
        self._check_replica(request.replica)
        return Answer(explained(request, frames[0], self._cache, self._replicas))

    def _check_replica(self, name: str) -> None:
        """Refuse a name that no replica has; "" stands for all."""
        if name and name not in self._replicas:
            raise unknown_replica(name, self._replicas)
