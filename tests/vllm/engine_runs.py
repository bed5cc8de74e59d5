"""Engines that `engine_forks` runs for tests, and their answers."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.project.source_tree import ROOT
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.server import CONNECTOR, environment, interpreter

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": BLOCK_SIZE,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "kv_cache_memory_bytes": 1 << 25,
}
#: It waits for storage, however fast the model computes.
EXTRA = {"hold_deadline_ms": 10_000, "prefetch": "wait_complete"}
HYBRID = CONNECTOR | {"kv_connector": "KvcachedHybridConnector"}
CLOSE_TIMEOUT_S = 60


@dataclass(frozen=True)
class Answer:
    """The likeliest continuation of a prompt, and how much of the prompt came from a cache."""

    tokens: list[int]
    logprobs: list[list[tuple[int, float]]]
    cached: int


class EngineRuns:
    """The process that forks engines, with a connector to the daemon in `run_dir`."""

    def __init__(self, log: Path, run_dir: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [interpreter(), "-P", ROOT / "tests/vllm/engine_forks.py"],
                cwd=log.parent,  # away from the checkout: the client is imported from its wheel
                env=environment(run_dir),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def run(
        self,
        model: Path,
        turns: Sequence[Sequence[Sequence[int]]],
        *,
        name: str = "",
        on_device: bool = False,
        is_async: bool = False,
        is_patient: bool = False,
        kernel_tokens: int = 0,
        **options: Any,
    ) -> list[list[Answer]]:
        """The answers of a new engine to some turns of prompts; it has ended on return.

        Args:
            model: the folder of the model.
            turns: prompts of each turn, which are asked at the same time.
            name: engines share blocks only with those of the same name; "" = no connector.
            on_device: its KV cache is memory of the fake CUDA device.
            is_async: it decides on a step before it has the output of the last one, as vLLM does on GPUs.
            is_patient: its steps wait for the stores of those before them, however slow the daemon is.
            kernel_tokens: of blocks that its attention takes, of which each of its blocks is several; 0 = one.
            options: of `vllm.LLM`.

        Raises:
            AssertionError: it failed; with the end of the log.
        """
        all_options = {**OPTIONS, **options, "model": str(model)}
        if name:
            all_options["kv_transfer_config"] = HYBRID | {
                "kv_connector_extra_config": EXTRA | {"weights_version": name}
            }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        kind = {"on_device": on_device, "is_async": is_async, "is_patient": is_patient, "kernel_tokens": kernel_tokens}
        work = {"options": all_options, "turns": turns} | kind
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()
        told = json.loads(self._process.stdout.readline() or "null")
        assert told is not None, self.log.read_text(errors="replace")[-6000:]
        return [[Answer(**answer) for answer in turn] for turn in told]

    def close(self) -> None:
        """End it, if need be at once."""
        with self._process:  # closes its pipes, and waits
            try:
                self._process.communicate(timeout=CLOSE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()


@contextlib.contextmanager
def engine_runs(log: Path, run_dir: Path) -> Iterator[EngineRuns]:
    """Such a process, ended in the end."""
    runs = EngineRuns(log, run_dir)
    try:
        yield runs
    finally:
        runs.close()
