"""Suite ``vllm-queue``: how long requests wait in vLLM's queue where nothing hits. Needs vLLM's environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.result import Result
from benchmarks.vllm_queue import queueing


def run(rounds: int) -> Iterator[Result]:
    """Measure two servers in turns, with and without kvcached."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        yield from queueing(Path(name), rounds)
