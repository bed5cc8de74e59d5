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


def paired_ratio(values: Sequence[float], floors: Sequence[float]) -> Interval:
    """The geometric mean of value / floor over pairs, its interval by bootstrap over the pairs; seeded.

    Raises:
        ValueError: there are no pairs, or one lacks its other half.
    """
    logs = [math.log(value / floor) for value, floor in zip(values, floors, strict=True)]
    if not logs:
        raise ValueError("no pairs")
    source = random.Random("bootstrap")
    means = sorted(fmean(source.choices(logs, k=len(logs))) for _ in range(_RESAMPLES))
    low, high = means[_RESAMPLES // 40], means[-1 - _RESAMPLES // 40]
    return Interval(math.exp(fmean(logs)), math.exp(low), math.exp(high))
