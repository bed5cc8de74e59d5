"""The bars of the README: ``kvcached demo --json | python -m benchmarks.demo_figure docs/figures``.

Writes what it read as ``demo.json``, and the time to the first token of each round as ``demo.svg``. Draws by hand, and
so needs no package.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path
from statistics import median
from typing import Final

import msgspec

from examples.demo.report import Report, Round

_WIDTH: Final = 760
_ROW: Final = 28
_TOP: Final = 46
_LABEL: Final = 300
_BAR: Final = 360
_COLOURS: Final = {"computed": "#b0413e", "device": "#2a6f97", "host": "#2a6f97", "disk": "#468faf"}
_FONT: Final = 'font-family="system-ui, sans-serif" font-size="14"'


def draw(report: Report) -> str:
    """The figure as SVG, the same for the same report."""
    longest = max(median(each.first_token_ms) for each in report.rounds)
    height = _TOP + _ROW * len(report.rounds) + 12
    title = f"Time to the first token, prompts of {report.prompt_tokens[0]} tokens, example engine on a CPU"
    rows = "\n".join(_row(each, number, longest) for number, each in enumerate(report.rounds))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}"'
        f' role="img" aria-label="{escape(title)}" {_FONT}>\n'
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>\n'
        f'<text x="16" y="26" font-weight="600" fill="#222222">{escape(title)}</text>\n'
        f"{rows}\n</svg>\n"
    )


def _row(each: Round, number: int, longest: float) -> str:
    time_ms = median(each.first_token_ms)
    top, width = _TOP + _ROW * number, max(2.0, time_ms / longest * _BAR)
    middle = top + _ROW * 0.62
    return (
        f'<text x="{_LABEL - 10}" y="{middle:.1f}" text-anchor="end" fill="#222222">{escape(each.meaning)}</text>\n'
        f'<rect x="{_LABEL}" y="{top + 4}" width="{width:.1f}" height="{_ROW - 8}" fill="{_COLOURS[each.source]}"/>\n'
        f'<text x="{_LABEL + width + 8:.1f}" y="{middle:.1f}" fill="#222222">{time_ms:.0f} ms</text>'
    )


def main(directory: Path) -> None:
    """Read a report from stdin, and write both files.

    Raises:
        SystemExit: what was read is no report of a demo whose outputs are identical.
    """
    text = sys.stdin.buffer.read()
    try:
        report = msgspec.json.decode(text, type=Report)
    except msgspec.DecodeError as error:
        raise SystemExit(f"stdin is no output of `kvcached demo --json`: {error}") from None
    if not report.outputs_identical:
        raise SystemExit("the outputs of this run differ: it is no figure, but a bug to report")
    (directory / "demo.json").write_bytes(msgspec.json.format(text, indent=1) + b"\n")
    (directory / "demo.svg").write_text(draw(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
