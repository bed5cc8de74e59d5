"""The figure of the gain by share of hits."""

from __future__ import annotations

import re
import sys
from io import BytesIO, TextIOWrapper
from pathlib import Path

import msgspec
import pytest

from benchmarks.hits_figure import main
from benchmarks.result import Result, judge
from benchmarks.vllm_hits import SHARES_PERCENT, SUITE


def results(gains: dict[int, float], *, different: int = 0) -> list[Result]:
    """What the suite says where each share brings this gain, in both figures."""
    return [
        judge(SUITE, f"{name}_{share}_over_plain_{end}ratio", factor / gain, "ratio")
        for share, gain in gains.items()
        for name in ("time", "first_token")
        for end, factor in (("", 1.0), ("low_", 0.9), ("high_", 1.1))
    ] + [judge(SUITE, f"outputs_that_differ_{share}", different, "requests") for share in gains]


def given(monkeypatch: pytest.MonkeyPatch, told: list[Result]) -> None:
    """Let stdin be the output of the suite."""
    text = b"".join(msgspec.json.encode(each) + b"\n" for each in told)
    monkeypatch.setattr(sys, "stdin", TextIOWrapper(BytesIO(text)))


def test_bars_are_as_long_as_the_gains(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """There are two bars for each share, as long as its gain, and a line where nothing is gained."""
    gains = {0: 0.9, 30: 1.2, 60: 2.0, 90: 6.0}
    given(monkeypatch, results(gains))
    main(tmp_path)
    figure = (tmp_path / "hits.svg").read_text()
    bars = [(float(x), float(width)) for x, width in re.findall(r'<rect x="(.*?)".* width="(.*?)"', figure)]
    (no_gain,) = re.findall(r'<line x1="(.*?)".*stroke="#b0413e"', figure)
    start, unit = bars[0][0], float(no_gain) - bars[0][0]
    expected = [(start, gain * unit) for gain in gains.values() for _ in range(2)]
    assert bars == [pytest.approx(bar, abs=0.5) for bar in expected]
    assert len((tmp_path / "hits.json").read_bytes().splitlines()) == len(results(gains))


@pytest.mark.parametrize(
    ("told", "words"),
    [
        (results({0: 1.0}), "no output of"),
        (results(dict.fromkeys(SHARES_PERCENT, 1.0), different=1), "outputs of this run differ"),
    ],
)
def test_what_is_no_figure_is_not_drawn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, told: list[Result], words: str
) -> None:
    """A run that lacks a share, or whose outputs differ, is refused, and nothing is written."""
    given(monkeypatch, told)
    with pytest.raises(SystemExit, match=words):
        main(tmp_path)
    assert not list(tmp_path.iterdir())
