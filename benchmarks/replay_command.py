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

from benchmarks.local_model import BLOCK_SIZE, MODELS, TOKEN_IDS, LocalModel, daemon_config, make_model
from benchmarks.programs import daemon
from benchmarks.replay_report import report
from benchmarks.replay_run import SEGMENT_S, Play, play_in_turns, warm_up
from benchmarks.replay_trace import Recorded, Scale, calls, read_trace, reuse, thin
from benchmarks.result import Result, judge
from benchmarks.vllm_environment import CONTEXT_TOKENS, interpreter
from benchmarks.vllm_server import VllmServer

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
    figure: Path
    json: bool


def parse(arguments: Sequence[str]) -> Options:
    """Read the command line, after its name."""
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {NAME}",
        description="Play recorded requests against vLLM, with and without kvcached.",
    )
    parser.add_argument("--model", choices=sorted(MODELS), default="small", help="default: small")
    parser.add_argument("--requests", type=int, default=240, help="about so many, in whole conversations; default: 240")
    parser.add_argument("--figure", type=Path, help="SVG file; default: docs/figures/replay-MODEL.svg")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    options = parser.parse_args(arguments)
    figure = options.figure or _FIGURES / f"replay-{options.model}.svg"
    return Options(MODELS[options.model], options.requests, figure, options.json)


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
        play = asyncio.run(_play(drawn, options.model, Path(name)))
    _draw(play, options.model, options.figure)
    _say(f"figure: {options.figure}")
    yield from _setting(options.model, drawn)
    yield from report(options.model.name, play)


def _setting(model: LocalModel, drawn: Sequence[Recorded]) -> list[Result]:
    """What the requests are like, whatever serves them."""
    found = reuse(drawn)
    return [
        judge("replay", f"{model.name}_endless_cache_hit_ratio", found.ratio, "ratio"),
        judge("replay", f"{model.name}_distinct_blocks", found.blocks - found.repeated, "blocks", floor=DEVICE_BLOCKS),
    ]


async def _play(drawn: Sequence[Recorded], model: LocalModel, directory: Path) -> Play:
    """Start both servers, warm them up, and play. How fast the one without kvcached was sets the pace."""
    folder = make_model(model, directory, interpreter())
    host_bytes = sum(len(request.ids) for request in drawn) * model.block_bytes
    _say("two vLLM servers start")
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(daemon(daemon_config(host_bytes), directory))
        starting = [
            stack.enter_context(VllmServer(name, directory, model, folder, device_blocks=DEVICE_BLOCKS, run_dir=place))
            for name, place in (("without", None), ("with", run_dir))
        ]
        without, cached = (server.wait_until_ready() for server in starting)
        seconds, _ = [await warm_up(socket, calls(drawn, SCALE, 1.0), TOKEN_IDS) for socket in (without, cached)]
        timed = calls(drawn, SCALE, LOAD / seconds)
        _say(f"{len(timed)} requests, {LOAD / seconds:.2f} a second, {timed[-1].at_s:.0f} s on each server")
        return await play_in_turns(without, cached, timed)


def _draw(play: Play, model: LocalModel, path: Path) -> None:
    from benchmarks.replay_plot import draw  # noqa: PLC0415 - only here is matplotlib needed

    title = f"vLLM on two shared cores, {model.name} model ({model.description}), {len(play.calls)} requests"
    caption = (
        f"Conversations of the Mooncake trace, a block of 512 tokens as one of {BLOCK_SIZE}; vLLM's own cache "
        f"{DEVICE_BLOCKS} blocks; both servers at the same time, in turns of {SEGMENT_S:.0f} s of the run"
    )
    draw(play, title, caption, path)


def _say(words: str) -> None:
    print(f"replay: {words}", file=sys.stderr, flush=True)
