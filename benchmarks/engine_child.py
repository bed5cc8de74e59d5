"""Engines as child processes that carry out commands, JSON lines, until their stdin ends; each ends with its block."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

_ROOT: Final = Path(__file__).resolve().parents[1]
_STOP_TIMEOUT_S: Final = 60
_LOG_TAIL: Final = 4000
#: In /proc/PID/stat, counted behind the name.
_PROCESS_GROUP: Final = 2
_USER_TICKS: Final = 11
_SYSTEM_TICKS: Final = 12

Prompts = Sequence[Sequence[int]]


def interpreter_of(engine: str, variable: str) -> Path:
    """Python of the environment that an engine has for itself.

    Args:
        engine: its name for people; ``make NAME-env`` builds the environment in ``.venv-NAME``.
        variable: that names another folder; a relative one is in the checkout.

    Raises:
        SystemExit: there is none; says what to run.
    """
    name = engine.lower()
    python = _ROOT / os.environ.get(variable, f".venv-{name}") / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"this needs {engine}, and there is no {python}: `make {name}-env` builds that environment; "
            f"{variable}=FOLDER names another one that has {engine} and kvcached-client"
        )
    return python


class Engine:
    """An engine that is ready, or about to be: the first command waits for that.

    Attributes:
        process: its first process.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self._is_ready = False

    def generate(self, prompts: Prompts, tokens: int) -> dict[str, Any]:
        """See `vllm_engine.generate` and `sglang_engine.generate`."""
        self.wait_until_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def wait_until_ready(self) -> None:
        """Until commands are carried out at once.

        Raises:
            RuntimeError: it has ended; with the end of its log.
        """
        if not self._is_ready:
            self._read()
            self._is_ready = True

    def cpu_s(self) -> float:
        """CPU time that its processes have taken so far."""
        return group_cpu_s(self.process.pid)

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            written = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"the engine has ended; its log ends with:\n{written[-_LOG_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def running(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[Engine]:
    """An engine in a process group of its own; it runs in the folder of its log."""
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command,
            cwd=log.parent,  # away from the checkout: the client is imported from where it is installed
            env=dict(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    try:
        yield Engine(process, log)
    finally:
        _stop(process)


def group_cpu_s(group: int) -> float:
    """CPU time that the processes of a group have taken so far."""
    ticks = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            fields = status.read_text().rpartition(")")[2].split()
            if int(fields[_PROCESS_GROUP]) == group:
                ticks += int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])
    return ticks / os.sysconf("SC_CLK_TCK")


def _stop(process: subprocess.Popen[str]) -> None:
    """Let it end by itself, which ends its other processes, too; what is left of them is killed."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
