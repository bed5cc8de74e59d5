"""One measured figure, and whether it keeps what was promised."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


@dataclass(frozen=True, slots=True)
class Target:
    """A promise about a figure: a limit for its value, or for its ratio to the floor."""

    subject: Literal["value", "ratio"]
    sign: Literal["<=", ">="]
    limit: float

    def __str__(self) -> str:
        return f"{self.subject} {self.sign} {self.limit:g}"

    def is_met(self, value: float, ratio: float | None) -> bool:
        """Whether the promise is kept. A ratio without a floor keeps none."""
        measured = value if self.subject == "value" else ratio
        if measured is None:
            return False
        return measured <= self.limit if self.sign == "<=" else measured >= self.limit


class Result(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of output. Numbers are as measured, never rounded towards a target."""

    suite: str
    metric: str
    value: float
    unit: str
    #: The same figure of the smallest code that could do the job, in the same unit; None where there is no such code.
    floor: float | None
    #: value / floor
    ratio: float | None
    #: In words, as `Target` spells it; None where nothing was promised.
    target: str | None
    #: Whether the target is met; None where nothing was promised.
    ok: bool | None
    #: The device that was measured, as its driver names it; left out where the figure is of no device.
    device: str = ""


def judge(
    suite: str,
    metric: str,
    value: float,
    unit: str,
    *,
    floor: float | None = None,
    target: Target | tuple[Target, ...] = (),
) -> Result:
    """A figure with its ratio and verdict. Of several targets each must be met."""
    ratio = None if floor is None else value / floor
    targets = (target,) if isinstance(target, Target) else target
    return Result(
        suite=suite,
        metric=metric,
        value=value,
        unit=unit,
        floor=floor,
        ratio=ratio,
        target=" and ".join(map(str, targets)) or None,
        ok=all(each.is_met(value, ratio) for each in targets) if targets else None,
    )
