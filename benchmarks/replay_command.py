"""The command ``python -m benchmarks replay``: recorded requests against a real vLLM, with and without kvcached."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.programs import daemon
from benchmarks.replay_http import Answer
from benchmarks.replay_report import report
from benchmarks.replay_run import Play, play, warm_up
from benchmarks.replay_trace import Call, Recorded, Scale, calls, read_trace, reuse, thin
from benchmarks.result import Result, judge
from benchmarks.vllm_environment import (
    BLOCK_SIZE,
    CONTEXT_TOKENS,
    MODELS,
    TOKEN_IDS,
    LocalModel,
    daemon_config,
    interpreter,
    make_model,
)
from benchmarks.vllm_server import vllm_server

NAME: Final = "replay"
#: A recorded block of 512 tokens becomes one block of vLLM's.
SCALE: Final = Scale(BLOCK_SIZE, TOKEN_IDS, CONTEXT_TOKENS)
#: vLLM's own cache: two of the longest prompts.
DEVICE_BLOCKS: Final = 2 * CONTEXT_TOKENS // BLOCK_SIZE
#: Of what the server can take without any hit, at the start of the run.
LOAD: Final = 0.6
_SEED: Final = 0
_FIGURES: Final = Path(__file__).resolve().parents[1] / "docs" / "figures"


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says; see its help."""

    model: LocalModel
    requests: int
    passes: int
    figure: Path
    json: bool


@dataclass(frozen=True, slots=True)
class _Arm:
    """One server of a pass: what it needs."""

    name: str
    model: LocalModel
    folder: Path
    directory: Path
    run_dir: Path | None


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, after its name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {NAME}",
        description="Play recorded requests against vLLM, with and without kvcached.",
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="small", help="default: small")
    parser.add_argument("--requests", type=int, default=240, help="about so many, in whole conversations; default: 240")
    parser.add_argument(
        "--passes", type=int, default=1, help="fresh servers for each, every other one in reverse order; default: 1"
    )
    parser.add_argument("--figure", type=Path, help="SVG file; default: docs/figures/replay-MODEL.svg")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args(arguments)
    figure = options.figure or _FIGURES / f"replay-{options.model}.svg"
    return Options(MODELS[options.model], options.requests, options.passes, figure, options.json)


def run(options: Options) -> Iterator[Result]:
    """Play, draw, and tell.

    Raises:
        SystemExit: vLLM's environment or matplotlib is missing; says what to run.
    """
    interpreter()
    if importlib.util.find_spec("matplotlib") is None:
        raise SystemExit("the figure needs matplotlib, which comes with an extra: pip install -e '.[plots]'")
    drawn = thin(read_trace(), SCALE, options.requests, _SEED)
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        plays = _passes(drawn, options.model, Path(name), options.passes)
    _draw(plays, options.model, options.figure)
    _say(f"figure: {options.figure}")
    yield from _setting(options.model, drawn)
    yield from report(options.model.name, plays)


def _setting(model: LocalModel, drawn: Sequence[Recorded]) -> list[Result]:
    """What the requests are like, whatever serves them."""
    found = reuse(drawn)
    return [
        judge("replay", f"{model.name}_endless_cache_hit_ratio", found.ratio, "ratio"),
        judge("replay", f"{model.name}_distinct_blocks", found.blocks - found.repeated, "blocks", floor=DEVICE_BLOCKS),
    ]


def _passes(drawn: Sequence[Recorded], model: LocalModel, directory: Path, passes: int) -> list[Play]:
    folder = make_model(model, directory)
    host_bytes = sum(len(request.ids) for request in drawn) * model.block_bytes
    requests_per_s = 0.0
    plays: list[Play] = []
    for number in range(passes):
        found: dict[str, tuple[Answer, ...]] = {}
        for name in ("without", "with") if number % 2 == 0 else ("with", "without"):
            with contextlib.ExitStack() as stack:
                place = directory / f"{number}-{name}"
                place.mkdir()
                run_dir = stack.enter_context(daemon(daemon_config(host_bytes), place)) if name == "with" else None
                arm = _Arm(name, model, folder, place, run_dir)
                requests_per_s, found[name] = asyncio.run(_serve(arm, drawn, requests_per_s, stack))
        timed = calls(drawn, SCALE, requests_per_s)
        plays.append(Play(tuple(timed), found["without"], found["with"]))
    return plays


async def _serve(
    arm: _Arm, drawn: Sequence[Recorded], requests_per_s: float, stack: contextlib.ExitStack
) -> tuple[float, tuple[Answer, ...]]:
    """Start a server, warm it up and play. The first server of all sets the pace."""
    _say(f"{arm.directory.name}: vLLM starts")
    socket = stack.enter_context(
        vllm_server("vllm", arm.directory, arm.model, arm.folder, device_blocks=DEVICE_BLOCKS, run_dir=arm.run_dir)
    )
    seconds = await warm_up(socket, calls(drawn, SCALE, 1.0), TOKEN_IDS)
    pace = requests_per_s or LOAD / seconds
    timed: list[Call] = calls(drawn, SCALE, pace)
    _say(f"{arm.directory.name}: {len(timed)} requests, {pace:.2f} a second, {timed[-1].at_s:.0f} s")
    return pace, await play(socket, timed)


def _draw(plays: Sequence[Play], model: LocalModel, path: Path) -> None:
    from benchmarks.replay_plot import draw  # noqa: PLC0415 - only here is matplotlib needed

    calls_played = len(plays[0].calls)
    title = f"vLLM on two shared cores, {model.name} model ({model.description}), {calls_played} requests"
    caption = (
        f"Conversations of the Mooncake trace, a block of 512 tokens as one of {BLOCK_SIZE}; vLLM's own cache "
        f"{DEVICE_BLOCKS} blocks; {len(plays)} run(s) each, one after the other, fresh servers"
    )
    draw(plays, title, caption, path)


def _say(words: str) -> None:
    print(f"replay: {words}", file=sys.stderr, flush=True)
