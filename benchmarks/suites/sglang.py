"""Suite ``sglang``: what kvcached costs an SGLang, and what it gains after a restart. Needs SGLang's environment."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks.local_model import MODELS
from benchmarks.result import Result
from benchmarks.sglang_pairs import misses_and_hits


def run(rounds: int) -> Iterator[Result]:
    """Measure three engines in turns: without storage, with kvcached, with SGLang's own files."""
    with tempfile.TemporaryDirectory(prefix="kvcached-") as name:
        yield from misses_and_hits(MODELS["small"], Path(name), rounds)
