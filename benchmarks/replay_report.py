"""Figures of a replay: time to first token with kvcached, and without it as the floor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from statistics import fmean, quantiles
from typing import Final

from benchmarks.replay_http import Answer
from benchmarks.replay_run import Differences, Play, differences
from benchmarks.result import Result, Target, judge

_PERCENTILES: Final = (50, 90, 99)
_Measure = Callable[[Answer], float]


def report(model: str, plays: Sequence[Play]) -> Iterator[Result]:
    """All figures, those of several plays together. Ratios below 1 are kvcached's gain."""
    calls = [call for play in plays for call in play.calls]
    without = list(chain.from_iterable(play.without for play in plays))
    cached = list(chain.from_iterable(play.cached for play in plays))
    yield judge("replay", f"{model}_requests", len(calls), "requests")
    yield judge("replay", f"{model}_requests_per_s", len(plays[0].calls) / plays[0].calls[-1].at_s, "1/s")
    tokens = sum(len(call.prompt) for call in calls)
    hit, floor = (sum(answer.cached_tokens for answer in answers) / tokens for answers in (cached, without))
    yield judge("replay", f"{model}_hit_ratio", hit, "ratio", floor=floor)
    measures: dict[str, _Measure] = {
        "ttft": lambda answer: answer.first_token_s,
        "latency": lambda answer: answer.last_token_s,
    }
    for name, measure in measures.items():
        yield from _times(f"{model}_{name}", [measure(each) for each in cached], [measure(each) for each in without])
    yield from _agreement(model, plays)


def _times(metric: str, cached_s: Sequence[float], without_s: Sequence[float]) -> Iterator[Result]:
    yield judge("replay", f"{metric}_mean_ms", fmean(cached_s) * 1e3, "ms", floor=fmean(without_s) * 1e3)
    for percent in _PERCENTILES:
        value, floor = (percentile(times, percent) * 1e3 for times in (cached_s, without_s))
        yield judge("replay", f"{metric}_p{percent}_ms", value, "ms", floor=floor)


def _agreement(model: str, plays: Sequence[Play]) -> Iterator[Result]:
    found: list[Differences] = [differences(play) for play in plays]
    ties, others = sum(each.ties for each in found), sum(each.others for each in found)
    yield judge("replay", f"{model}_outputs_that_differ_by_ties", ties, "requests")
    yield judge("replay", f"{model}_outputs_that_differ", others, "requests", target=Target("value", "<=", 0))


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least two values."""
    return quantiles(values, n=100, method="inclusive")[percent - 1]
