"""Verdicts, rounds and output of the benchmarks."""

from __future__ import annotations

import gzip
import hashlib
import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.result import Target, judge
from benchmarks.suites import SUITES, load_suite
from benchmarks.timing import interleave

_TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"


@pytest.mark.parametrize(
    ("target", "value", "ok"),
    [
        (Target("value", "<=", 1.2), 1.2, True),
        (Target("value", "<=", 1.2), 1.2000001, False),
        (Target("ratio", "<=", 1.2), 2.4, True),
        (Target("ratio", "<=", 1.2), 2.5, False),
        (Target("ratio", ">=", 0.85), 1.7, True),
        (Target("ratio", ">=", 0.85), 1.6, False),
    ],
)
def test_verdict_holds_the_exact_limit(target: Target, value: float, ok: bool) -> None:
    """A target is met at its limit and missed beyond it, however little."""
    assert judge("suite", "metric", value, "ms", floor=2.0, target=target).ok is ok


def test_verdict_is_open_without_a_target() -> None:
    """A figure without a target is neither good nor bad."""
    result = judge("suite", "metric", 3.0, "ms", floor=2.0)
    assert (result.ok, result.target, result.ratio) == (None, None, 1.5)


@pytest.mark.parametrize(("value", "ok"), [(2.0, True), (3.5, False), (5.0, False)])
def test_verdict_on_two_targets_needs_both(value: float, ok: bool) -> None:
    """A figure with two targets is good only where it meets both, and names both."""
    targets = (Target("ratio", "<=", 2), Target("value", "<=", 3))
    result = judge("suite", "metric", value, "us", floor=2.0, target=targets)
    assert (result.ok, result.target) == (ok, "ratio <= 2 and value <= 3")


def test_verdict_on_a_ratio_needs_a_floor() -> None:
    """A ratio that was not measured meets no target."""
    assert judge("suite", "metric", 3.0, "ms", target=Target("ratio", "<=", 9)).ok is False


def test_rounds_interleave_the_cases() -> None:
    """After one warm-up each, the cases take turns, and every turn is kept."""
    turns: list[str] = []
    seconds = interleave({"case": lambda: turns.append("case"), "floor": lambda: turns.append("floor")}, 10)
    assert turns == ["case", "floor"] * 11
    assert {name: len(measured) for name, measured in seconds.items()} == {"case": 10, "floor": 10}


def test_rounds_are_at_least_ten() -> None:
    """Fewer rounds than the method asks for are refused."""
    with pytest.raises(ValueError, match="at least 10"):
        interleave({}, 9)


def test_suites_can_all_be_loaded() -> None:
    """Every name in the registry leads to a suite."""
    for name in SUITES:
        assert callable(load_suite(name))


@pytest.mark.parametrize("arguments", [["nonsense"], ["hash", "--rounds", "9"]])
def test_command_line_refuses_what_it_cannot_run(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown suite or too few rounds end in a usage error that names them."""
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert arguments[-1] in capsys.readouterr().err


def test_json_output_is_one_object_a_line_with_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    """The hash suite prints its figures as JSON lines with the documented fields."""
    main(["hash", "--json", "--rounds", "10"])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    fields = ["suite", "metric", "value", "unit", "floor", "ratio", "target", "ok"]
    figures = ["prompt_128k_ms", "prompt_128k_xxh3_ms", "prompt_128k_list_ms", "prompt_128k_pure_ms"]
    assert [line["metric"] for line in lines] == figures
    assert [list(line) for line in lines] == [fields] * len(figures)


def test_trace_is_the_one_its_readme_describes() -> None:
    """The unpacked trace has the checksum in its README."""
    digest = hashlib.sha256(gzip.decompress((_TRACES / "mooncake-conversation.jsonl.gz").read_bytes())).hexdigest()
    assert digest in (_TRACES / "README.md").read_text(encoding="utf-8")
