"""An SGLang in a process group of its own, which a test asks, kills and starts again."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

PAGE_SIZE = 32
#: It imports for half a minute on a core of its own.
START_TIMEOUT_S = 800
#: Of one request. The first one may take half a minute.
ANSWER_TIMEOUT_S = 120
STOP_TIMEOUT_S = 30
#: How long copies may keep it from dropping pages.
FORGET_TIMEOUT_S = 60
PAUSE_S = 0.05
TELLING = re.compile(r"kvcached|Traceback|Error")

OPTIONS = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "page_size": PAGE_SIZE,
    "max_total_tokens": 4096,
    "context_length": 2048,
    "log_level": "warning",
    "random_seed": 1,
    "sleep_on_idle": True,  # else its scheduler asks for work all the time
}
STORAGE = {
    "backend_name": "kvcached",
    "module_path": "kvcached_client.sglang",
    "class_name": "KvcachedStorage",
    "interface_v1": 1,
    "hicache_storage_pass_prefix_keys": True,
    "prefetch_threshold": PAGE_SIZE,
    "kvcached": {"deadline_ms": 2000, "side_pools": True},  # a busy machine makes tests slow, not red
}
HIERARCHICAL = {
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_backend": "dynamic",
    "hicache_storage_prefetch_policy": "wait_complete",
}
_VARIABLES = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "SGLANG_CPU_OMP_THREADS_BIND": "0|0",  # two ranks on one NUMA node have to be told cores; nobody binds them here
}


def interpreter() -> Path:
    """Python of SGLang's environment."""
    python = ROOT / ".venv-sglang/bin/python"
    if not python.exists():
        pytest.fail(f"there is no {python}: `make sglang-env` builds SGLang's environment", pytrace=False)
    return python


@dataclass(frozen=True, slots=True)
class Answer:
    """The likeliest output of a prompt, and how many of the prompt's tokens came from where."""

    tokens: list[int]
    logprobs: list[float]
    found: int = field(compare=False)  #: in storage, as SGLang calls the daemon
    cached: int = field(compare=False)


class SglangProcess:
    """Starts at once; `wait_until_ready` before it is asked. With a run directory it uses the daemon there."""

    def __init__(self, log: Path, model: Path, run_dir: Path | None, **options: Any) -> None:
        self._log = log
        self._run_dir = run_dir
        self._options = {**OPTIONS, "model_path": str(model), **options}
        if run_dir is not None:
            extra = json.dumps(STORAGE)
            self._options = {**HIERARCHICAL, "hicache_storage_backend_extra_config": extra, **self._options}
        self.start()

    def start(self) -> None:
        """Start it, also again after its end."""
        environment = {**clean_environment(), **_VARIABLES, "PYTHONPATH": str(ROOT / "tests/sglang/cpu")}
        if self._run_dir is not None:
            environment["KVCACHED_RUN_DIR"] = str(self._run_dir)
        (theirs_in, ours_out), (ours_in, theirs_out) = os.pipe(), os.pipe()
        command = [str(interpreter()), "-P", str(ROOT / "tests/sglang/answering.py"), json.dumps(self._options)]
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [*command, str(theirs_in), str(theirs_out)],
                cwd=self._log.parent,  # away from the checkout: the client is imported from its wheel
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(theirs_in, theirs_out),
                start_new_session=True,
            )
        os.close(theirs_in)
        os.close(theirs_out)
        self._out, self._in = os.fdopen(ours_out, "w"), os.fdopen(ours_in)

    def wait_until_ready(self) -> SglangProcess:
        """Until it answers."""
        self._hear(START_TIMEOUT_S)
        return self

    def complete(self, *prompts: Sequence[int], tokens: int = 8) -> list[Answer]:
        """The likeliest outputs of prompts, asked at the same time."""
        return [Answer(**each) for each in self._ask("complete", prompts, tokens)]

    def forget(self) -> None:
        """Drop what it has in memory of its own, so that only the daemon has pages.

        SGLang refuses while it copies pages, and has no event for the end of that.
        """
        deadline, pause = time.monotonic() + FORGET_TIMEOUT_S, threading.Event()
        while not self._ask("forget"):
            assert time.monotonic() < deadline, f"SGLang still copies after {FORGET_TIMEOUT_S} s"
            pause.wait(PAUSE_S)

    def load_weights(self, model: Path) -> None:
        """Replace the weights in memory."""
        assert self._ask("load_weights", str(model))

    def log(self) -> str:
        """What it wrote, of all its starts."""
        return self._log.read_text(errors="replace")

    def stop(self) -> None:
        """Kill all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        self._out.close()
        self._in.close()

    def _ask(self, *request: Any) -> Any:
        self._out.write(json.dumps(request) + "\n")
        self._out.flush()
        return self._hear(ANSWER_TIMEOUT_S)

    def _hear(self, timeout_s: float) -> Any:
        readable, _, _ = select.select([self._in], [], [], timeout_s)
        line = self._in.readline() if readable else ""
        if not line:
            told = [each for each in self.log().splitlines() if TELLING.search(each)]
            sys.stdout.write("\n".join(told[-40:]))
            what = "has ended" if readable else f"says nothing in {timeout_s} s"
            raise AssertionError(f"SGLang {what}:\n{self.log()[-6000:]}")
        return json.loads(line)


@contextlib.contextmanager
def ended(process: SglangProcess) -> Iterator[SglangProcess]:
    """Kill it at the end, whatever happens."""
    try:
        yield process
    finally:
        process.stop()
