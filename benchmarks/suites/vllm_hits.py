"""Suite ``vllm-hits``: what a vLLM gains by the share of its prompts that hit. Needs vLLM's environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.local_model import MODELS
from benchmarks.result import Result
from benchmarks.vllm_environment import interpreter
from benchmarks.vllm_hits import gains


def run(rounds: int) -> Iterator[Result]:
    """Measure two servers in turns, with and without kvcached."""
    interpreter()
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        yield from gains(MODELS["small"], Path(name), rounds)
