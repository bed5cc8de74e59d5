"""Timing of short operations: interleaved rounds, so that a case and its floor see the same machine."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from typing import Final

#: The best of fewer rounds depends on luck on a machine that does other work too.
ROUNDS_MIN: Final = 10
ROUNDS_DEFAULT: Final = 60


def interleave(cases: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in every round, one warm-up round not counted.

    A round runs each case once, in order, so that case and floor can also be compared pair by pair. The garbage
    collector runs between rounds and never inside one.
    """
    if rounds < ROUNDS_MIN:
        raise ValueError(f"{rounds} rounds; at least {ROUNDS_MIN}")
    for case in cases.values():
        case()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    collecting, frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.disable()
    if not frozen:  # a collection between two rounds looks at what the rounds left, not at all that the process has
        gc.collect()
        gc.freeze()
    try:
        for _ in range(rounds):
            gc.collect()
            for name, case in cases.items():
                start = time.perf_counter()
                case()
                seconds[name].append(time.perf_counter() - start)
    finally:
        if not frozen:
            gc.unfreeze()
        if collecting:
            gc.enable()
    return seconds
