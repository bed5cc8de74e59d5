"""What the connector costs vLLM's scheduler thread: in a real vLLM, and between a made-up vLLM and a made-up daemon."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Final

import msgspec

from benchmarks.local_model import BLOCK_SIZE, MODELS, TOKEN_IDS, daemon_config, make_model
from benchmarks.programs import daemon
from benchmarks.result import Result, Target, judge
from benchmarks.scheduler_rig import SchedulerRig
from benchmarks.vllm_child import running_engine
from benchmarks.vllm_environment import interpreter

#: In steps that admit nothing.
_STEP: Final = Target("value", "<=", 100)
_RUNNING: Final = (1, 8, 64)
_STEPS_PER_ROUND: Final = 64
_MODEL: Final = MODELS["tiny"]
#: Ends within a block, and how far differs from request to request.
_PROMPT_BLOCKS: Final = 2
_OUTPUT_TOKENS: Final = 3 * BLOCK_SIZE
_CACHE_BLOCKS: Final = 2 * max(_RUNNING) * (_PROMPT_BLOCKS + 4)
_HOST_BYTES: Final = 256 << 20


def made_up_steps(rounds: int) -> Iterator[Result]:
    """Requests that decode, stores included. A round is 64 steps of each number of requests."""
    rigs = {running: SchedulerRig(running) for running in _RUNNING}
    means: dict[int, list[float]] = {running: [] for running in _RUNNING}
    medians: dict[int, list[float]] = {running: [] for running in _RUNNING}
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            for running, rig in rigs.items():
                times = [rig.step_ns() for _ in range(_STEPS_PER_ROUND)]
                means[running].append(fmean(times))
                medians[running].append(median(times))
            gc.collect()
    finally:
        gc.enable()
    for running in _RUNNING:
        yield judge("vllm", f"made_up_step_{running}_running_us", min(means[running]) / 1e3, "us", target=_STEP)
        yield judge("vllm", f"made_up_step_{running}_running_median_us", min(medians[running]) / 1e3, "us")


class _Step(msgspec.Struct):
    """A line of `hook_clock`."""

    running: int
    admits: bool
    spent_ns: int


def real_steps(directory: Path, rounds: int) -> Iterator[Result]:
    """The same in a real vLLM with a real daemon, by timing every hook of the scheduler's connector from outside.

    Steps that admit requests are apart.
    """
    quiet: dict[int, list[list[int]]] = {running: [] for running in _RUNNING}
    admitting: dict[int, list[list[int]]] = {running: [] for running in _RUNNING}
    for running, steps in _played_steps(directory, rounds):
        times = {admits: [step.spent_ns for step in steps if step.admits is admits] for admits in (True, False)}
        admitting[running].append(times[True])
        quiet[running].append(times[False])
    for running in _RUNNING:
        best, best_median = min(fmean(each) for each in quiet[running]), min(median(each) for each in quiet[running])
        yield judge("vllm", f"step_{running}_running_us", best / 1e3, "us", target=_STEP)
        yield judge("vllm", f"step_{running}_running_median_us", best_median / 1e3, "us")
        best = min(fmean(each) for each in admitting[running])
        yield judge("vllm", f"admitting_step_{running}_running_us", best / 1e3, "us")


def _played_steps(directory: Path, rounds: int) -> Iterator[tuple[int, list[_Step]]]:
    """The steps of every round but the first, with all of so many requests running."""
    folder = make_model(_MODEL, directory, interpreter())
    source = random.Random("hooks")
    times = directory / "hook-times"
    times.touch()
    with (
        daemon(daemon_config(_HOST_BYTES), directory) as run_dir,
        running_engine(
            "hooks",
            directory,
            folder,
            cache_bytes=_CACHE_BLOCKS * _MODEL.block_bytes,
            sequences=max(_RUNNING),
            run_dir=run_dir,
            timed_hooks=times,
        ) as engine,
        times.open("rb") as lines,
    ):
        for number in range(rounds + 1):
            for running in _RUNNING:
                engine.generate([_prompt(source, index) for index in range(running)], _OUTPUT_TOKENS)
                steps = [msgspec.json.decode(line, type=_Step) for line in lines]
                if number:
                    yield running, [step for step in steps if step.running == running or step.admits]


def _prompt(source: random.Random, index: int) -> list[int]:
    length = _PROMPT_BLOCKS * BLOCK_SIZE + index % BLOCK_SIZE
    return [source.randrange(*TOKEN_IDS) for _ in range(length)]
