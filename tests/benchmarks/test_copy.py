"""The copy suite and what it stands on, at small sizes."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import get_args

import pytest

from benchmarks.c_loop import compile_copy_loop
from benchmarks.copy_rig import LAYERS, CopyRig
from benchmarks.suites import copy
from kvcached_client.blocks.layout import PageOrder

_ORDERS = get_args(PageOrder)
_PROMISED = {"scattered_over_memcpy": "value >= 0.85", "scattered_over_cloop": "value >= 0.95"}


def test_c_loop_copies_every_piece_and_nothing_else(tmp_path: Path) -> None:
    """The compiled floor moves the bytes of its pieces, by offsets from both addresses, and no others."""
    loop = compile_copy_loop(tmp_path)
    source, destination = array("B", range(64)), array("B", bytes(64))
    loop(array("q", (0, 8, 4, 16, 60, 4)), destination.buffer_info()[0], source.buffer_info()[0])
    assert bytes(destination) == bytes((8, 9, 10, 11)) + bytes(12) + bytes((60, 61, 62, 63)) + bytes(44)


def test_c_loop_without_a_compiler_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is no compiler, the suite ends with a message that names what is missing."""
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="no compiler 'no-such-compiler'"):
        compile_copy_loop(tmp_path)


@pytest.mark.parametrize("order", _ORDERS)
def test_rig_copies_arrive(order: PageOrder) -> None:
    """A store and a load to other slots give equal blocks, and the pieces of the floor are the worker's bytes."""
    with closing(CopyRig(order, 8)) as rig:
        rig.check()
        for to_host in (True, False):
            assert sum(rig.pieces(to_host=to_host)[2::3]) == rig.size_bytes
        assert len(rig.block_by_block()) == len(rig.pieces(to_host=False))


@pytest.mark.parametrize("order", _ORDERS)
def test_rig_floors_do_the_same_job(order: PageOrder, tmp_path: Path) -> None:
    """The C loop and the bulk copy bring the same bytes to the same places as the worker does."""
    loop = compile_copy_loop(tmp_path)
    with closing(CopyRig(order, 8)) as rig:
        rig.check()
        device, host = rig.addresses
        floors: list[Callable[[], None]] = [
            lambda: loop(rig.pieces(to_host=False), device, host),
            lambda: rig.bulk_load(rig.block_by_block()),
        ]
        for copy_again in floors:
            rig.clear_targets()
            with pytest.raises(AssertionError):
                rig.compare()
            copy_again()
            rig.compare()


def test_rig_notes_the_first_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer-wise load tells of its first layer before the last, and of none before it began."""
    clock = count(1.0)
    with closing(CopyRig("layer_first", 8)) as rig:
        rig.store()
        assert rig.progress.first_layer_at is None
        monkeypatch.setattr("benchmarks.copy_rig.perf_counter", lambda: next(clock))
        rig.load(verify=True)
        assert rig.progress.first_layer_at == 1.0
        assert LAYERS > 1


def test_copy_suite_has_every_promised_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    """On few blocks, the suite gives both ratios for both orders and directions, the worst of them, and all costs."""
    monkeypatch.setattr(copy, "_BLOCKS", 8)
    results = {result.metric: result for result in copy.run(10)}
    for name, target in _PROMISED.items():
        cases = [f"{name}_{kind}_{order}_ratio" for kind in ("store", "load") for order in _ORDERS]
        assert all(results[case].target == target for case in cases)
        assert results[f"{name}_ratio"].value == min(results[case].value for case in cases)
        assert results[f"{name}_ratio"].target == target
    costs = {f"{kind}_over_copies_{order}_ratio" for kind in ("store", "load", "load_unverified") for order in _ORDERS}
    assert costs | {"layerwise_over_bulk"} <= results.keys()
    assert all(result.value > 0 for result in results.values())
