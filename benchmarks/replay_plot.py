"""The figure of a replay. Needs the extra `plots`; nothing else here imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.replay_http import Answer
from benchmarks.replay_run import Play

_COLOURS: Final = {"without kvcached": "#b0413e", "with kvcached": "#2a6f97"}
_SIZE_INCHES: Final = (10, 4.2)


def draw(plays: Sequence[Play], title: str, caption: str, path: Path) -> None:
    """Time to first token, as a distribution and over the time of the run, into an SVG file."""
    mpl.rcParams["svg.hashsalt"] = "kvcached"  # the same figures give the same file
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    distribution, course = figure.subplots(1, 2)
    for name, colour in _COLOURS.items():
        answers = [play.cached if name == "with kvcached" else play.without for play in plays]
        times = sorted(answer.first_token_s * 1e3 for answer in chain.from_iterable(answers))
        shares = [(place + 1) / len(times) for place in range(len(times))]
        distribution.step(times, shares, where="post", color=colour, label=name)
        for some in answers:
            course.plot(*_course(some), ".", markersize=4, alpha=0.7, color=colour)
    distribution.set(xscale="log", xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1))
    distribution.legend(loc="lower right", frameon=False)
    course.set(yscale="log", xlabel="time of the run, s", ylabel="time to first token, ms")
    for axes in (distribution, course):
        axes.grid(visible=True, which="major", linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(caption, fontsize=7.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})


def _course(answers: Sequence[Answer]) -> tuple[list[float], list[float]]:
    """When requests were sent, from the first one, and how long each waited, in ms."""
    start = min(answer.sent_s for answer in answers)
    return [answer.sent_s - start for answer in answers], [answer.first_token_s * 1e3 for answer in answers]
