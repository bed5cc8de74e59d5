"""Evaluates what the alert rules need of PromQL, and plays samples against a rule."""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import promql_parser as promql

Labels = frozenset[tuple[str, str]]
#: How old a sample may be that an expression finds at a time, as Prometheus has it.
_LOOKBACK_S = 300.0
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


@dataclass
class Samples:
    """Samples of series, by name and labels."""

    series: dict[tuple[str, Labels], list[tuple[float, float]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, name: str, at_s: float, value: float, labels: Mapping[str, str]) -> None:
        self.series[name, frozenset(labels.items())].append((at_s, value))

    def within(self, selector: promql.VectorSelector, at_s: float, range_s: float) -> Iterator[tuple[Labels, float]]:
        """The values that a selector finds in a time, the oldest first."""
        for (name, labels), points in self.series.items():
            if name == selector.name and _is_selected(selector, dict(labels)):
                yield from ((labels, value) for then_s, value in points if at_s - range_s < then_s <= at_s)


def _is_selected(selector: promql.VectorSelector, labels: Mapping[str, str]) -> bool:
    for matcher in selector.matchers.matchers:
        value = labels.get(matcher.name, "")
        if matcher.op == promql.MatchOp.Equal:
            is_so = value == matcher.value
        elif matcher.op == promql.MatchOp.Re:
            is_so = re.fullmatch(matcher.value, value) is not None
        else:
            raise NotImplementedError(matcher.op)
        if not is_so:
            return False
    return True


def evaluate(node: promql.Expr, samples: Samples, at_s: float) -> dict[Labels, float]:
    """The vector that an expression is at a time."""
    if isinstance(node, promql.VectorSelector):
        return dict(samples.within(node, at_s, _LOOKBACK_S))  # the latest of a series is the last one
    if isinstance(node, promql.ParenExpr):
        return evaluate(node.expr, samples, at_s)
    if isinstance(node, promql.Call):
        return _over_time(node, samples, at_s)
    if isinstance(node, promql.AggregateExpr) and str(node.op) == "sum":
        kept = () if node.modifier is None else node.modifier.labels
        sums: dict[Labels, float] = defaultdict(float)
        for labels, value in evaluate(node.expr, samples, at_s).items():
            sums[_only(labels, kept)] += value
        return sums
    if isinstance(node, promql.BinaryExpr):
        return _binary(node, samples, at_s)
    raise NotImplementedError(type(node))


def _binary(node: promql.BinaryExpr, samples: Samples, at_s: float) -> dict[Labels, float]:
    """What an operator makes of two vectors, or of a vector and a number."""
    if str(node.op) in _ARITHMETIC:
        return _calculated(node, samples, at_s)
    left = evaluate(node.lhs, samples, at_s)
    if isinstance(node.rhs, promql.NumberLiteral):
        holds = {"==": float.__eq__, ">": float.__gt__, "<": float.__lt__}[str(node.op)]
        return {labels: value for labels, value in left.items() if holds(float(value), node.rhs.val)}
    return _combined(node, left, evaluate(node.rhs, samples, at_s))


def _combined(node: promql.BinaryExpr, left: dict[Labels, float], right: dict[Labels, float]) -> dict[Labels, float]:
    """What a set operator makes of two vectors."""
    matching = None if node.modifier is None else node.modifier.matching
    match str(node.op):
        case "or" if matching is None:
            return right | left
        case "and" if matching is not None and matching.type == promql.LabelModifierType.Include:
            present = {_only(labels, matching.labels) for labels in right}
            return {labels: value for labels, value in left.items() if _only(labels, matching.labels) in present}
    raise NotImplementedError(node.op)


def _quotient(value: float, by: float) -> float:
    return value / by if by else math.copysign(math.inf, value) if value else math.nan


_ARITHMETIC = {"+": operator.add, "-": operator.sub, "/": _quotient}


def _only(labels: Labels, names: Iterable[str]) -> Labels:
    return frozenset(each for each in labels if each[0] in names)


def _over_time(node: promql.Call, samples: Samples, at_s: float) -> dict[Labels, float]:
    (argument,) = node.args
    assert isinstance(argument, promql.MatrixSelector)
    range_s = argument.range.total_seconds()
    found = defaultdict(list)
    for labels, value in samples.within(argument.vector_selector, at_s, range_s):
        found[labels].append(value)
    if node.func.name == "avg_over_time":
        return {labels: sum(values) / len(values) for labels, values in found.items()}
    if node.func.name == "rate":  # of counters that are not reset; and of the samples, not of the whole range
        return {labels: (values[-1] - values[0]) / range_s for labels, values in found.items() if len(values) > 1}
    raise NotImplementedError(node.func.name)


def _calculated(node: promql.BinaryExpr, samples: Samples, at_s: float) -> dict[Labels, float]:
    """What arithmetic makes of two vectors, by their labels, or of a number and a vector."""
    calculate, right = _ARITHMETIC[str(node.op)], evaluate(node.rhs, samples, at_s)
    if isinstance(node.lhs, promql.NumberLiteral):
        return {labels: calculate(node.lhs.val, value) for labels, value in right.items()}
    left = evaluate(node.lhs, samples, at_s)
    return {labels: calculate(left[labels], right[labels]) for labels in left.keys() & right.keys()}


def fires_at_s(rule: Mapping[str, str], samples: Samples, end_s: float, every_s: float = 15.0) -> float | None:
    """When a rule fires first; None where it does not until the end."""
    expression = promql.parse(rule["expr"])
    wait_s = int(rule["for"][:-1]) * _UNIT_S[rule["for"][-1]]
    since_s: dict[Labels, float] = {}
    for number in range(int(end_s / every_s)):
        at_s = number * every_s
        since_s = {labels: since_s.get(labels, at_s) for labels in evaluate(expression, samples, at_s)}
        if any(at_s - began_s >= wait_s for began_s in since_s.values()):
            return at_s
    return None
