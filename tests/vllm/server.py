"""A vLLM server: a process group of its own, its log in a file, spoken to over a Unix socket."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.vllm import completions
from tests.vllm.completions import BLOCK_SIZE, Completion

#: Three processes import vLLM one after the other: 12 s each on an idle core, several times that on a busy one.
START_TIMEOUT_S = 450
STOP_TIMEOUT_S = 30
LISTEN_TIMEOUT_S = 60
#: Between two looks whether it listens.
PAUSE_S = 0.02
#: How long stores may keep vLLM from resetting its prefix cache.
RESET_TIMEOUT_S = 20
#: What the HTTP server logs last before it serves.
READY = b"Application startup complete."
#: What a failed test shows of its servers' logs: pytest keeps what is written to stdout.
TELLING = re.compile(rb"kvcached|WARNING|ERROR")

#: vLLM's processes find the module that it holds at their start.
_STAND_INS = ROOT / "tests/vllm/stand_ins"
_VARIABLES = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes 20 s and gains nothing here
    "OMP_NUM_THREADS": "1",  # one way to add things up
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else all servers share one core
}
SETTINGS = (
    "--served-model-name=tiny",
    "--dtype=float32",
    "--max-model-len=2048",
    f"--block-size={BLOCK_SIZE}",
    "--enforce-eager",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=512",
    "--kv-cache-memory-bytes=33554432",
    "--enable-prompt-tokens-details",
    "--disable-uvicorn-access-log",
)
CONNECTOR = {
    "kv_connector": "KvcachedConnector",
    "kv_connector_module_path": "kvcached_client.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
    "kv_connector_extra_config": {"hold_deadline_ms": 10_000},  # a busy machine makes tests slow, not red
}


def interpreter() -> Path:
    """Python of vLLM's environment."""
    python = ROOT / os.environ.get("VLLM_VENV", ".venv-vllm") / "bin/python"
    if not python.exists():
        pytest.fail(f"there is no {python}: `make vllm-env` builds vLLM's environment", pytrace=False)
    return python


def environment(run_dir: Path | None) -> dict[str, str]:
    """Variables for a program that imports vLLM; with the run directory of the daemon that it is to use."""
    clean = clean_environment()
    path = os.pathsep.join((str(_STAND_INS), clean["PYTHONPATH"]))
    place = {} if run_dir is None else {"KVCACHED_RUN_DIR": str(run_dir)}
    return {**clean, **_VARIABLES, "PYTHONPATH": path, **place}


class VllmServer:
    """Starts at once; `wait_until_ready` before it is asked for anything. One of several at a time is fine."""

    def __init__(
        self, directory: Path, name: str, model: Path, *settings: str, run_dir: Path | None, connector: Any = CONNECTOR
    ) -> None:
        """`run_dir` is that of the daemon; without one the server has no connector."""
        self.socket = directory / f"{name}.sock"
        self.log_path = directory / f"{name}.log"
        self._command = [str(interpreter()), "-m", "vllm.entrypoints.openai.api_server", f"--model={model}", *SETTINGS]
        self._command += [*settings, f"--uds={self.socket}"]
        self._environment = environment(run_dir)
        if run_dir is not None:
            self._command.append(f"--kv-transfer-config={json.dumps(connector)}")
        self.start()

    def start(self) -> None:
        """Start it, also again after its end."""
        self.socket.unlink(missing_ok=True)  # one that was killed has left it
        self._settled = threading.Event()
        self._ready = False
        self.process = subprocess.Popen(
            self._command,
            cwd=self.log_path.parent,  # away from the checkout: the client is imported from its wheel
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=self._keep_log, args=(self.process.stdout,))
        self._pump.start()

    def _keep_log(self, output: IO[bytes]) -> None:
        """Copy its output to the log until all its processes have closed it; tell when it is ready."""
        with output, self.log_path.open("ab") as log:
            for line in output:
                log.write(line)
                log.flush()
                if TELLING.search(line):
                    sys.stdout.write(f"{self.log_path.stem}: {line.decode(errors='replace')}")
                if READY in line:
                    self._ready = True
                    self._settled.set()
        self._settled.set()

    def wait_until_ready(self) -> VllmServer:
        """Until it serves.

        Raises:
            AssertionError: it has ended instead, or takes too long; with the end of its log.
        """
        self._settled.wait(START_TIMEOUT_S)
        assert self._ready, f"vLLM is not ready (exit status {self.process.poll()}):\n{self.log()[-8000:]}"
        self._await_listener()
        return self

    def _await_listener(self) -> None:
        """It says that it is up a moment before it listens, and has no event for that."""
        deadline, pause = time.monotonic() + LISTEN_TIMEOUT_S, threading.Event()
        while True:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
                if not connection.connect_ex(str(self.socket)):
                    return
            assert time.monotonic() < deadline, f"vLLM does not listen:\n{self.log()[-8000:]}"
            pause.wait(PAUSE_S)

    def wait_until_ended(self) -> int:
        """Its exit status, after it has ended by itself: where it refuses to start."""
        return self.process.wait(START_TIMEOUT_S)

    def log(self) -> str:
        """What it wrote, of all its starts."""
        return self.log_path.read_text(errors="replace")

    # --- requests ----------------------------------------------------------------------------------------------------

    def complete(self, prompt: Iterable[int], **options: Any) -> Completion:
        """See `completions.complete`."""
        return completions.complete(self.socket, prompt, **options)

    def metric(self, name: str) -> int:
        """See `completions.metric`."""
        return round(completions.metric(self.socket, name))

    def forget(self, *, external: bool = False) -> None:
        """Drop vLLM's own prefix cache; with `external` what the connector has behind it, too.

        vLLM refuses while blocks are held, as those are that a store reads. It has no event for the end of that.
        """
        target = f"/reset_prefix_cache?reset_external={str(external).lower()}"
        deadline = time.monotonic() + RESET_TIMEOUT_S
        while json.loads(completions.ask(self.socket, "POST", target)) != {"success": True}:
            assert time.monotonic() < deadline, f"blocks are still held after {RESET_TIMEOUT_S} s"

    # --- the end -----------------------------------------------------------------------------------------------------

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End all its processes at once; they are dead on return."""
        pidfds = list(self._pidfds())
        self.signal_all(signal.SIGKILL)
        self.process.wait(STOP_TIMEOUT_S)
        for pidfd in pidfds:
            select.select([pidfd], [], [], STOP_TIMEOUT_S)
            os.close(pidfd)
        self._pump.join(STOP_TIMEOUT_S)

    def stop(self) -> None:
        """End it in order; what is left after a while is killed."""
        self.signal_all(signal.SIGCONT)
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT_S)
        self.kill()

    def _pidfds(self) -> Iterator[int]:
        """Descriptors of the processes in its group."""
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):
                    if os.getpgid(int(folder.name)) == self.process.pid:
                        yield os.pidfd_open(int(folder.name))


@contextlib.contextmanager
def ended(server: VllmServer) -> Iterator[VllmServer]:
    """Stop a server at the end, whatever happens."""
    try:
        yield server
    finally:
        server.stop()
