"""Figures of a replay: time to first token with kvcached, and without it as the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import fmean, quantiles
from typing import Final

from benchmarks.replay_http import Answer
from benchmarks.replay_run import Play, differences
from benchmarks.result import Result, Target, judge

_PERCENTILES: Final = (50, 90, 99)
_Measure = Callable[[Answer], float]


def report(model: str, play: Play) -> Iterator[Result]:
    """All figures. Ratios below 1 are kvcached's gain."""
    yield judge("replay", f"{model}_requests", len(play.calls), "requests")
    yield judge("replay", f"{model}_requests_per_s", len(play.calls) / play.calls[-1].at_s, "1/s")
    tokens = sum(len(call.prompt) for call in play.calls)
    hit, floor = (sum(answer.cached_tokens for answer in answers) / tokens for answers in (play.cached, play.without))
    yield judge("replay", f"{model}_hit_ratio", hit, "ratio", floor=floor)
    measures: dict[str, _Measure] = {
        "ttft": lambda answer: answer.first_token_s,
        "latency": lambda answer: answer.last_token_s,
    }
    for name, measure in measures.items():
        yield from _times(f"{model}_{name}", list(map(measure, play.cached)), list(map(measure, play.without)))
    found = differences(play)
    yield judge("replay", f"{model}_outputs_that_differ_by_ties", found.ties, "requests")
    yield judge("replay", f"{model}_outputs_that_differ", found.others, "requests", target=Target("value", "<=", 0))


def _times(metric: str, cached_s: Sequence[float], without_s: Sequence[float]) -> Iterator[Result]:
    yield judge("replay", f"{metric}_mean_ms", fmean(cached_s) * 1e3, "ms", floor=fmean(without_s) * 1e3)
    for percent in _PERCENTILES:
        value, floor = (percentile(times, percent) * 1e3 for times in (cached_s, without_s))
        yield judge("replay", f"{metric}_p{percent}_ms", value, "ms", floor=floor)


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least two values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]
