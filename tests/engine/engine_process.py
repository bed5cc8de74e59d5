"""The example engine as a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO, Self, cast

import msgspec

from tests.engine.tiny_llama import LIMITS


class Answer(msgspec.Struct):
    """A result line of ``python -m examples.llama_engine serve``."""

    tokens: list[int]
    hit_tokens: int
    loaded_tokens: int
    logits_digest: str


class EngineProcess:
    """An engine in a process group of its own, to be asked and to be killed."""

    def __init__(self, model_dir: Path, run_dir: Path, *options: str) -> None:
        fixed = f"serve --seed 3 --chunk-tokens {LIMITS.chunk_tokens} --run-dir {run_dir} --model {model_dir}".split()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "examples.llama_engine", *fixed, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._requests = cast("IO[bytes]", self.process.stdin)
        self._answers = cast("IO[bytes]", self.process.stdout)

    def wait_ready(self) -> Self:
        """Return when it takes requests."""
        assert self._answers.readline() == b'{"ready":true}\n'
        return self

    def send(self, tokens: list[int]) -> None:
        request = {"prompt": tokens, "max_tokens": 8, "logits": True}
        self._requests.write(msgspec.json.encode([request]) + b"\n")
        self._requests.flush()

    def ask(self, tokens: list[int]) -> Answer:
        self.send(tokens)
        (answer,) = msgspec.json.decode(self._answers.readline(), type=list[Answer])
        return answer

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()
