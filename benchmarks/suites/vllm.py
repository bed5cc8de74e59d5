"""Suite ``vllm``: what attached mode costs a vLLM, and what it gains. Needs vLLM's environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.local_model import MODELS
from benchmarks.result import Result
from benchmarks.timing import ROUNDS_MIN
from benchmarks.vllm_copies import copies
from benchmarks.vllm_environment import interpreter
from benchmarks.vllm_hooks import made_up_steps, real_steps
from benchmarks.vllm_pairs import engine_pair, hits, misses

#: A round of a real vLLM takes seconds where other suites' rounds take milliseconds.
_ROUNDS_PER_VLLM_ROUND: Final = 3


def run(rounds: int) -> Iterator[Result]:
    """Measure the scheduler's hooks, a shard's copies, and pairs of engines with two models."""
    interpreter()
    engine_rounds = max(ROUNDS_MIN, rounds // _ROUNDS_PER_VLLM_ROUND)
    yield from made_up_steps(rounds)
    yield from copies(rounds)
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        yield from real_steps(Path(name), engine_rounds)
    for model in MODELS.values():
        with tempfile.TemporaryDirectory(prefix="kvcached-") as name, engine_pair(model, Path(name)) as pair:
            yield from misses(pair, model, rounds)
            yield from hits(pair, model, engine_rounds)
