"""The suites of index and rpc, as far as they can be run in little time."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.__main__ import main
from benchmarks.shapes import ADVERSARIAL, CHAT, TRACE, Shape
from benchmarks.suites import index

_PROMISED = {"match_128k_{}_us", "bytes_per_block_{}", "request_8k_{}_us", "evict_8192_{}_us"}
_FIELDS = ["suite", "metric", "value", "unit", "floor", "ratio", "target", "ok"]


def _lines(output: str) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines()]
    assert all(list(line) == _FIELDS for line in lines)
    return {line["metric"]: line for line in lines}


@pytest.mark.parametrize(
    ("shape", "promised"),
    [
        (TRACE, _PROMISED),
        pytest.param(CHAT, _PROMISED, marks=pytest.mark.slow),
        pytest.param(ADVERSARIAL, {"match_128k_{}_us"}, marks=pytest.mark.slow),
    ],
)
def test_index_suite_has_every_promised_metric(
    shape: Shape, promised: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small caches, a shape gives its metrics, with a target where one was promised and a floor under each time."""
    monkeypatch.setattr(index, "_SLOTS", 30_000)
    monkeypatch.setattr(index, "_EVICTED_BLOCKS", 500)
    monkeypatch.setattr(index, "_MATCH_SECONDS", 0.1)
    paths = shape.paths()[-700:]
    results = list(index._measure(replace(shape, paths=lambda: paths), 10))
    assert {result.metric for result in results if result.target} == {name.format(shape.name) for name in promised}
    assert all((result.floor is not None) == result.metric.endswith("_us") for result in results)


def test_rpc_suite_measures_a_real_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """The suite starts a daemon and an echo, and prints the ratio with its spread and the times that it comes from."""
    main(["rpc", "--json", "--rounds", "10"])
    lines = _lines(capsys.readouterr().out)
    assert lines["acquire_over_echo_ratio"]["target"] == "value <= 1.6"
    for case in ("acquire", "wire"):
        low, middle, high = (lines[f"{case}_over_echo{part}_ratio"]["value"] for part in ("_p10", "", "_p90"))
        assert low <= middle <= high
    assert {name for name in lines if re.fullmatch(r"\w+_us", name)} == {"acquire_us", "echo_us", "wire_us"}
