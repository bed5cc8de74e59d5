"""Engines of vLLM, each a process, and the daemon that they use."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

from tests.daemon.supervised import Supervised, supervised
from tests.project.source_tree import ROOT
from tests.vllm.tiny_model import TOKENIZER, TOKENIZER_CONFIG

PATIENCE_S: Final = 60
GIB: Final = 1 << 30
OPTIONS: Final = {
    "block_size": 32,
    "dtype": "bfloat16",
    "gpu_memory_utilization": 0.2,
    "disable_log_stats": True,
}
EAGER: Final = {"enforce_eager": True}
#: A decode step is one graph; torch compiles nothing.
GRAPHS: Final = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
_CONFIG: Final = """
session_ttl_ms = 60000
[host]
size_bytes = {host_bytes}
slab_bytes = 67108864
[offload]
namespaces_max = 16
device_memory_bytes = {device_bytes}
"""
_VARIABLES: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it compiles kernels
}

Report = dict[str, Any]
Prompt = Sequence[int]


def connected(options: Mapping[str, Any], connector: str, settings: Mapping[str, Any]) -> Report:
    """The options of an engine with kvcached's connector."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": "kvcached_client.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"hold_deadline_ms": 10_000, **settings},
    }
    return {**options, "kv_transfer_config": transfer}


def describe_model(folder: Path, config: Mapping[str, Any]) -> None:
    """Write all of a model but its weights."""
    folder.mkdir(parents=True)
    documents = {"config.json": config, "tokenizer.json": TOKENIZER, "tokenizer_config.json": TOKENIZER_CONFIG}
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document))


@dataclasses.dataclass
class Engine:
    """A fork that takes requests.

    Attributes:
        start_s: from its fork until it could take requests.
        backends: the names of its attention backends.
    """

    start_s: float
    backends: list[str]
    _process: int  #: a descriptor
    _connection: socket.socket
    _stream: IO[str]
    _log: Path

    def ask(
        self,
        prompts: Sequence[Prompt],
        *,
        tokens: int = 16,
        forget: bool = False,
        at_once: bool = False,
        words: bool = True,
    ) -> Report:
        """Answers, and what they took: see `tests.gpu.vllm_forks`.

        Raises:
            RuntimeError: the engine has ended; with the end of its log.
        """
        self._order(prompts, tokens=tokens, forget=forget, at_once=at_once, words=words)
        return _reply(self._stream, self._log)

    def kill_at_work(self, prompts: Sequence[Prompt], after_s: float) -> None:
        """SIGKILL so long after it was asked for answers; it is dead on return."""
        self._order(prompts, tokens=64, forget=False, at_once=True, words=False)
        threading.Event().wait(after_s)
        _kill(self._process)
        self._close()

    def stop(self) -> None:
        """End it in order."""
        self._connection.shutdown(socket.SHUT_WR)
        _await_end(self._process)
        self._close()

    def _order(self, prompts: Sequence[Prompt], **how: Any) -> None:
        self._stream.write(json.dumps({"prompts": prompts, **how}) + "\n")
        self._stream.flush()

    def _close(self) -> None:
        os.close(self._process)
        with contextlib.suppress(OSError):
            self._stream.close()
        self._connection.close()


class Forks:
    """The process that forks engines.

    Attributes:
        log: what vLLM writes.
    """

    def __init__(self, folder: Path, run_dir: Path) -> None:
        self.log = folder / "engines.log"
        self._folder = folder
        self._count = 0
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.vllm_forks"],
                cwd=ROOT,
                env={**os.environ, **_VARIABLES, "KVCACHED_RUN_DIR": str(run_dir)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )

    def wait_until_ready(self) -> None:
        """Until vLLM is imported.

        Raises:
            SystemExit: it cannot be; with the end of its log.
        """
        assert self._process.stdout is not None
        if self._process.stdout.readline() != "ready\n":
            sys.exit(f"{sys.executable} cannot import vLLM, name another PYTHON; what it said:\n{_end(self.log)}")

    def start(self, options: Report, *, loads_nothing: bool = False) -> Engine:
        """An engine, once it takes requests, perhaps with a fault: its loads copy nothing.

        Raises:
            RuntimeError: it has ended instead; with the end of its log.
        """
        assert self._process.stdin is not None
        self._count += 1
        path, began = self._folder / f"{self._count}.sock", time.monotonic()
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(path))
            listener.listen()
            listener.settimeout(PATIENCE_S)
            work = {"socket": str(path), "options": options, "loads_nothing": loads_nothing}
            self._process.stdin.write(json.dumps(work) + "\n")
            self._process.stdin.flush()
            connection, _ = listener.accept()
        connection.settimeout(PATIENCE_S)
        stream = connection.makefile("rw")
        up = _reply(stream, self.log)
        process = os.pidfd_open(up["pid"])
        return Engine(time.monotonic() - began, up["backends"], process, connection, stream, self.log)

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Place(NamedTuple):
    """A folder, a daemon, and forks, ready for engines."""

    folder: Path
    daemon: Supervised
    forks: Forks


@contextlib.contextmanager
def place(*, host_gib: float, device_gib: float) -> Iterator[Place]:
    """A daemon with a host pool, and room for memory of engines. In the end, all logs go to stderr."""
    config = _CONFIG.format(host_bytes=int(host_gib * GIB), device_bytes=int(device_gib * GIB))
    with tempfile.TemporaryDirectory() as name, supervised(Path(name), config) as daemon:
        forks = Forks(Path(name), daemon.run_dir)
        try:
            forks.wait_until_ready()
            yield Place(Path(name), daemon, forks)
        finally:
            forks.close()
            sys.stderr.write(daemon.log + forks.log.read_text(errors="replace"))


def _reply(stream: IO[str], log: Path) -> Report:
    line = stream.readline()
    if not line:
        raise RuntimeError(f"vLLM has ended:\n{_end(log)}")
    return dict(json.loads(line))


def _kill(process: int) -> None:
    signal.pidfd_send_signal(process, signal.SIGKILL)
    _await_end(process)


def _await_end(process: int) -> None:
    if not select.select([process], [], [], PATIENCE_S)[0]:
        raise RuntimeError(f"an engine has not ended after {PATIENCE_S} s")


def _end(log: Path) -> str:
    return log.read_text(errors="replace")[-5000:]
