"""Tells outputs that differ by rounding from outputs that differ for another reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

#: Two log-probabilities that are closer may change places with the order in which a sum is added up.
TIE: Final = 1e-3


@dataclass(frozen=True, slots=True)
class Differences:
    """Requests whose two outputs differ.

    Attributes:
        ties: the first token that differs was as good as decided by rounding.
        others: all others.
    """

    ties: int
    others: int


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The place of the first token that is not the same in two outputs of equal length; None if they are equal."""
    return next((place for place, (mine, theirs) in enumerate(zip(one, other, strict=True)) if mine != theirs), None)
