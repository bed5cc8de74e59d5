"""The figure of a replay. Needs the extra `plots`; nothing else here imports matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.replay_run import Play

_SIZE_INCHES: Final = (10, 4.2)


def draw(play: Play, title: str, caption: str, path: Path) -> None:
    """Time to first token, as a distribution and over the time of the run, into an SVG file."""
    mpl.rcParams["svg.hashsalt"] = "kvcached"  # the same figures give the same file
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    distribution, course = figure.subplots(1, 2)
    sent_s = [call.at_s for call in play.calls]
    for name, colour, answers in (
        ("without kvcached", "#b0413e", play.without),
        ("with kvcached", "#2a6f97", play.cached),
    ):
        times_ms = [answer.first_token_s * 1e3 for answer in answers]
        shares = [(place + 1) / len(times_ms) for place in range(len(times_ms))]
        distribution.step(sorted(times_ms), shares, where="post", color=colour, label=name)
        course.plot(sent_s, times_ms, ".", markersize=4, alpha=0.7, color=colour)
    distribution.set(xscale="log", xlabel="time to first token, ms", ylabel="share of requests", ylim=(0, 1))
    distribution.legend(loc="lower right", frameon=False)
    course.set(yscale="log", xlabel="time of the request in the run, s", ylabel="time to first token, ms")
    for axes in (distribution, course):
        axes.grid(visible=True, which="major", linewidth=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=11)
    figure.supxlabel(caption, fontsize=7.5)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="svg", metadata={"Date": None})
