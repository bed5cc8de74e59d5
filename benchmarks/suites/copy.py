"""Suite ``copy``: scattered blocks between device pool and host pool, as a CPU worker moves them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Final, get_args

from benchmarks.c_loop import CopyLoop, compile_copy_loop
from benchmarks.copy_rig import CopyRig
from benchmarks.result import Result, Target, judge
from benchmarks.timing import interleave
from kvcached_client.blocks.layout import PageOrder

#: 64 MiB: more than processors' caches hold, so that one large copy is one through memory.
_BLOCKS: Final = 128
_OVER_MEMCPY: Final = Target("value", ">=", 0.85)
_OVER_C_LOOP: Final = Target("value", ">=", 0.95)


def run(rounds: int) -> Iterator[Result]:
    """Measure both orders of pages in both directions. A ratio is one of speeds: 1 is as fast as the floor."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as directory:
        loop = compile_copy_loop(Path(directory))
    details: list[Result] = []
    for order in get_args(PageOrder):
        with closing(CopyRig(order, _BLOCKS)) as rig:
            rig.check()
            details += _scattered(rig, order, loop, rounds)
            details += _proven(rig, order, rounds)
    for floor, target in (("memcpy", _OVER_MEMCPY), ("cloop", _OVER_C_LOOP)):
        ratios = [each.value for each in details if each.metric.startswith(f"scattered_over_{floor}_")]
        yield judge("copy", f"scattered_over_{floor}_ratio", min(ratios), "ratio", target=target)
    yield from details


def _scattered(rig: CopyRig, order: PageOrder, loop: CopyLoop, rounds: int) -> Iterator[Result]:
    """Copies alone, against one large copy and against a loop in C over the same pieces."""
    device, host = rig.addresses
    to_host, to_device = rig.pieces(to_host=True), rig.pieces(to_host=False)
    best = _best(
        {
            "store": rig.copy_to_host,
            "store_memcpy": rig.memcpy_to_host,
            "store_cloop": lambda: loop(to_host, host, device),
            "load": rig.copy_to_device,
            "load_memcpy": rig.memcpy_to_device,
            "load_cloop": lambda: loop(to_device, device, host),
        },
        rounds,
    )
    for kind in ("store", "load"):
        for floor, target in (("memcpy", _OVER_MEMCPY), ("cloop", _OVER_C_LOOP)):
            ratio = best[f"{kind}_{floor}"] / best[kind]
            yield judge("copy", f"scattered_over_{floor}_{kind}_{order}_ratio", ratio, "ratio", target=target)
        speed, floor_speed = (rig.size_bytes / best[name] / 1e9 for name in (kind, f"{kind}_memcpy"))
        yield judge("copy", f"scattered_{kind}_{order}_gb_per_s", speed, "GB/s", floor=floor_speed)


def _proven(rig: CopyRig, order: PageOrder, rounds: int) -> Iterator[Result]:
    """Whole stores and loads: what checksums cost, and what it costs to copy layer by layer."""
    rig.check()  # large copies have overwritten both pools
    first_layers: dict[bool, list[float]] = {True: [], False: []}

    def load(*, verify: bool) -> None:
        start = perf_counter()
        rig.load(verify=verify)
        assert rig.progress.first_layer_at is not None
        first_layers[verify].append(rig.progress.first_layer_at - start)

    best = _best(
        {
            "copy_to_host": rig.copy_to_host,
            "store": rig.store,
            "copy_to_device": rig.copy_to_device,
            "load": partial(load, verify=True),
            "load_unverified": partial(load, verify=False),
            "bulk": partial(rig.bulk_load, rig.block_by_block()),
        },
        rounds,
    )
    if order == "layer_first":
        yield judge("copy", "layerwise_over_bulk", best["bulk"] / best["load_unverified"], "ratio")
        for name, verify in (("load", True), ("load_unverified", False)):
            share = min(first_layers[verify]) / best[name]
            yield judge("copy", f"first_layer_of_{name}_ratio", share, "ratio")
    for name, copies in (
        ("store", "copy_to_host"),
        ("load", "copy_to_device"),
        ("load_unverified", "copy_to_device"),
    ):
        yield judge("copy", f"{name}_over_copies_{order}_ratio", best[copies] / best[name], "ratio")


def _best(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    return {name: min(seconds) for name, seconds in interleave(cases, rounds).items()}
