"""Ratios of pairs that were measured one after the other, with the range that they leave open."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean
from typing import Final, NamedTuple

_RESAMPLES: Final = 5000


class Interval(NamedTuple):
    """A ratio and its 95 % confidence interval."""

    ratio: float
    low: float
    high: float


class Difference(NamedTuple):
    """A mean difference and its 95 % confidence interval, in the unit of what was compared."""

    mean: float
    low: float
    high: float


def paired_ratio(values: Sequence[float], floors: Sequence[float]) -> Interval:
    """The geometric mean of value / floor over pairs, its interval by bootstrap over the pairs; seeded.

    Raises:
        ValueError: there are no pairs, or one lacks its other half.
    """
    logs = [math.log(value / floor) for value, floor in zip(values, floors, strict=True)]
    if not logs:
        raise ValueError("no pairs")
    mean, low, high = _mean_of(logs)
    return Interval(math.exp(mean), math.exp(low), math.exp(high))


def mean_difference(values: Sequence[float], floors: Sequence[float]) -> Difference:
    """The mean of value - floor over pairs, its interval by bootstrap over the pairs; seeded.

    Raises:
        ValueError: there are no pairs, or one lacks its other half.
    """
    differences = [value - floor for value, floor in zip(values, floors, strict=True)]
    if not differences:
        raise ValueError("no pairs")
    return Difference(*_mean_of(differences))


def _mean_of(values: Sequence[float]) -> tuple[float, float, float]:
    """The mean, and the ends of its 95 % confidence interval."""
    source = random.Random("bootstrap")
    means = sorted(fmean(source.choices(values, k=len(values))) for _ in range(_RESAMPLES))
    return fmean(values), means[_RESAMPLES // 40], means[-1 - _RESAMPLES // 40]
