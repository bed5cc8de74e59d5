"""Uses of the first blocks of a run only: requests that diverge inside the run, or end there.

They say nothing of the blocks behind these, which stay as old and as unimportant as they were. A segment remembers such
uses until a split or an eviction cuts it there.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from operator import attrgetter
from typing import NamedTuple

#: A segment remembers no more. Of more, the two that end nearest to each other become one, which ends with the longer.
PART_USES_MAX = 4


class PartUse(NamedTuple):
    """How the blocks of a segment up to some depth were used.

    Attributes:
        end: the depth, inside the segment.
        last_used: logical time.
        priority: the highest; None stands for 0.
    """

    end: int
    last_used: int
    priority: int | None


def higher(one: int | None, other: int | None) -> int | None:
    """The higher of two priorities; None is none."""
    return other if one is None else one if other is None else max(one, other)


def in_order(uses: Iterable[PartUse], last_used: int, priority: int | None) -> tuple[PartUse, ...]:
    """The uses that make their blocks newer or more important than those behind them; the longest first.

    `last_used` and `priority` are those of the blocks behind all of them. Whoever uses a block uses those before it.
    """
    kept: list[PartUse] = []
    for use in sorted(uses, key=attrgetter("end"), reverse=True):
        known = PartUse(use.end, max(last_used, use.last_used), higher(priority, use.priority))
        if (known.last_used, known.priority) == (last_used, priority):
            continue
        if kept and kept[-1].end == use.end:
            kept.pop()
        kept.append(known)
        _, last_used, priority = known
    while len(kept) > PART_USES_MAX:
        gaps = [longer.end - shorter.end for longer, shorter in pairwise(kept)]
        nearest = gaps.index(min(gaps))
        kept[nearest] = kept.pop(nearest + 1)._replace(end=kept[nearest].end)
    return tuple(kept)
