"""What a shard process copies in attached mode, against one large copy of as many bytes."""

from __future__ import annotations

import gc
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from time import perf_counter
from typing import Final

from benchmarks.attached_rig import LLAMA_8B, TINY, AttachedRig, PageShape
from benchmarks.result import Result, Target, judge

_COPIED: Final = Target("value", ">=", 0.7)
#: Until every byte of the host pool has been written once, and a process has touched it.
_WARM_UP_ROUNDS: Final = 4


def copies(rounds: int, shapes: tuple[PageShape, ...] = (TINY, LLAMA_8B)) -> Iterator[Result]:
    """Whole stores and loads, from the job to the daemon's word that it is settled, in pages of vLLM's size.

    Ratios are of speeds: 1 is as fast as the large copy. A store always makes checksums; a load compares them or not.
    """
    details: list[Result] = []
    for shape in shapes:
        best = _best(shape, rounds)
        for kind, floor in (("store", "to_host"), ("load", "to_engine"), ("load_unverified", "to_engine")):
            ratio = best[floor] / best[kind]
            details.append(
                judge("vllm", f"copied_over_memcpy_{kind}_{shape.name}_ratio", ratio, "ratio", target=_COPIED)
            )
        python = best["python"] / best["store"]
        details.append(judge("vllm", f"store_over_python_copies_{shape.name}_ratio", python, "ratio"))
    ratios = [each.value for each in details if each.target]
    yield judge("vllm", "copied_over_memcpy_ratio", min(ratios), "ratio", target=_COPIED)
    yield from details


def _best(shape: PageShape, rounds: int) -> dict[str, float]:
    """Seconds of the best round of each."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, action: Callable[[], None]) -> None:
        start = perf_counter()
        action()
        seconds[name].append(perf_counter() - start)

    for verify in (True, False):
        with (
            tempfile.TemporaryDirectory(prefix="kvcached-") as name,
            AttachedRig(shape, Path(name), verify=verify) as rig,
        ):
            _prove(rig)
            for number in range(_WARM_UP_ROUNDS + rounds):
                if number == _WARM_UP_ROUNDS:
                    gc.collect()
                rig.prepare_store()
                timed("store", rig.store)
                timed("to_host", rig.memcpy_to_host)
                timed("python", rig.python_to_host)
                rig.prepare_load()
                timed("load" if verify else "load_unverified", rig.load)
                timed("to_engine", rig.memcpy_to_engine)
    return {name: min(times) for name, times in seconds.items()}


def _prove(rig: AttachedRig) -> None:
    """Refuse to report times of copies that do not arrive."""
    rig.prepare_store()
    rig.store()
    rig.prepare_load()
    rig.forget_targets()
    rig.load()
    rig.compare()
