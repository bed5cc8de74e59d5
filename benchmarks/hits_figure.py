"""The gain by share of hits: ``python -m benchmarks vllm-hits --json | python -m benchmarks.hits_figure docs/figures``.

Writes what it read as ``hits.json``, a result a line, and ``hits.svg``. Draws by hand, and so needs no package.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.result import Result
from benchmarks.vllm_hits import SHARES_PERCENT, SUITE

_WIDTH: Final = 760
_ROW: Final = 24
_GAP: Final = 14
_TOP: Final = 62
_LABEL: Final = 250
_BAR: Final = 400
#: Name in the metrics, words, and colour.
_BARS: Final = (("time", "requests a second", "#468faf"), ("first_token", "time to the first token", "#2a6f97"))
_FONT: Final = 'font-family="system-ui, sans-serif" font-size="14"'
_TITLE: Final = "How much faster vLLM is with kvcached, by the part of each prompt that is cached"
_SUBTITLE: Final = "stock vLLM on two CPU cores, model small, prompts of 1280 tokens; 1 = as without; 95 % intervals"


def draw(values: Mapping[str, float]) -> str:
    """The figure as SVG, the same for the same values by metric.

    Raises:
        KeyError: a metric of the suite is missing.
    """
    longest = max(_gain(values, name, share)[2] for name, _, _ in _BARS for share in SHARES_PERCENT)
    group = _ROW * len(_BARS) + _GAP
    height = _TOP + group * len(SHARES_PERCENT) + 8
    rows = "\n".join(
        _row(values, bar, share, _TOP + group * place + _ROW * number, longest)
        for place, share in enumerate(SHARES_PERCENT)
        for number, bar in enumerate(_BARS)
    )
    one = _LABEL + _BAR / longest
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(_TITLE)}" {_FONT}>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="24" font-weight="600" fill="#222222">{escape(_TITLE)}</text>\n'
        f'<text x="16" y="44" font-size="12" fill="#555555">{escape(_SUBTITLE)}</text>\n'
        f"{rows}\n"
        f'<line x1="{one:.1f}" y1="{_TOP - 4}" x2="{one:.1f}" y2="{height - 8}" stroke="#b0413e" stroke-width="1"/>\n'
        f"</svg>\n"
    )


def _gain(values: Mapping[str, float], name: str, share: int) -> tuple[float, float, float]:
    """How many times as fast, and the ends of the interval."""
    metric = f"{name}_{share}_over_plain"
    return 1 / values[f"{metric}_ratio"], 1 / values[f"{metric}_high_ratio"], 1 / values[f"{metric}_low_ratio"]


def _row(values: Mapping[str, float], bar: tuple[str, str, str], share: int, top: int, longest: float) -> str:
    name, words, colour = bar
    gain, low, high = (each / longest * _BAR for each in _gain(values, name, share))
    middle = top + _ROW * 0.62
    return (
        f'<text x="{_LABEL - 10}" y="{middle:.1f}" text-anchor="end" fill="#222222">{share} %: {escape(words)}</text>\n'
        f'<rect x="{_LABEL}" y="{top + 3}" width="{gain:.1f}" height="{_ROW - 6}" fill="{colour}"/>\n'
        f'<line x1="{_LABEL + low:.1f}" y1="{top + _ROW / 2:.1f}" x2="{_LABEL + high:.1f}" y2="{top + _ROW / 2:.1f}"'
        ' stroke="#222222" stroke-width="2"/>\n'
        f'<text x="{_LABEL + high + 8:.1f}" y="{middle:.1f}" fill="#222222">{gain / _BAR * longest:.2f} times</text>'
    )


def main(directory: Path) -> None:
    """Read results from stdin, and write both files.

    Raises:
        SystemExit: what was read is no output of the suite, or outputs differ.
    """
    lines = sys.stdin.buffer.read().splitlines()
    try:
        results = [msgspec.json.decode(line, type=Result) for line in lines]
        values = {each.metric: each.value for each in results if each.suite == SUITE}
        figure = draw(values)
    except (msgspec.DecodeError, KeyError) as error:
        raise SystemExit(f"stdin is no output of `python -m benchmarks {SUITE} --json`: {error}") from None
    if any(values[f"outputs_that_differ_{share}"] for share in SHARES_PERCENT):
        raise SystemExit("the outputs of this run differ: it is no figure, but a bug to report")
    (directory / "hits.json").write_bytes(b"\n".join(lines) + b"\n")
    (directory / "hits.svg").write_text(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
