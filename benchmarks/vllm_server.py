"""A vLLM server, from its start to its end: processes of its own, a Unix socket, its log in a file."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from socket import AF_UNIX
from socket import socket as Socket  # noqa: N812 - `socket` is a path here
from typing import IO, Final, NamedTuple

from benchmarks.engine_child import group_cpu_s
from benchmarks.local_model import BLOCK_SIZE, LocalModel, daemon_config, make_model
from benchmarks.programs import daemon
from benchmarks.replay_http import MODEL_NAME
from benchmarks.vllm_environment import CONNECTOR, CONTEXT_TOKENS, environment, interpreter

_START_TIMEOUT_S: Final = 600
_STOP_TIMEOUT_S: Final = 30
#: What it logs last before it serves; some milliseconds later it listens, and tells nobody.
_READY: Final = b"Application startup complete."
_LISTEN_TIMEOUT_S: Final = 10
_RETRY_S: Final = 0.02
_LOG_TAIL: Final = 4000


class VllmServer(contextlib.AbstractContextManager["VllmServer"]):
    """A server that starts at once, and ends with its block.

    Args:
        name: of its files.
        directory: for socket and log.
        model: what it serves.
        folder: of the model.
        device_blocks: of vLLM's own cache.
        run_dir: of the daemon; None: without connector.

    Attributes:
        socket: that it serves on.
    """

    def __init__(
        self, name: str, directory: Path, model: LocalModel, folder: Path, *, device_blocks: int, run_dir: Path | None
    ) -> None:
        self.socket, self._log = directory / f"{name}.sock", directory / f"{name}.log"
        self._settled = threading.Event()
        self._program = subprocess.Popen(
            _command(model, folder, self.socket, device_blocks, with_connector=run_dir is not None),
            cwd=directory,  # away from the checkout: the client is imported from where it is installed
            env=environment(run_dir),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._pump = threading.Thread(target=_pump, args=(self._program.stdout, self._log, self._settled))
        self._pump.start()

    def wait_until_ready(self) -> Path:
        """Until it serves; its socket.

        Raises:
            RuntimeError: it ended, or was not ready in time; with the end of its log.
        """
        self._settled.wait(_START_TIMEOUT_S)
        written = self._log.read_bytes() if self._log.exists() else b""
        if _READY not in written:
            raise RuntimeError(
                f"vLLM is not ready; its log ends with:\n{written[-_LOG_TAIL:].decode(errors='replace')}"
            )
        _wait_until_it_listens(self.socket)
        return self.socket

    def cpu_s(self) -> float:
        """CPU time that its processes have taken so far."""
        return group_cpu_s(self._program.pid)

    def __exit__(self, *_: object) -> None:
        """End it in order; what is left of its processes is killed."""
        self._program.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._program.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._program.pid, signal.SIGKILL)
        self._program.wait()
        self._pump.join(_STOP_TIMEOUT_S)


class ServerPair(NamedTuple):
    """Two servers of one model.

    Attributes:
        cached: with kvcached.
        plain: without it.
    """

    cached: VllmServer
    plain: VllmServer


@contextlib.contextmanager
def server_pair(directory: Path, model: LocalModel, *, device_blocks: int, host_bytes: int) -> Iterator[ServerPair]:
    """Two servers of one model that are ready, and a daemon for one of them; all end with the block.

    Args:
        directory: for all files.
        model: what both serve.
        device_blocks: of each vLLM's own cache.
        host_bytes: of the daemon's host pool.

    Raises:
        RuntimeError: as `VllmServer.wait_until_ready`.
    """
    folder = make_model(model, directory, interpreter())
    with contextlib.ExitStack() as stack:
        run_dir = stack.enter_context(daemon(daemon_config(host_bytes), directory))
        pair = ServerPair(
            *(
                stack.enter_context(
                    VllmServer(name, directory, model, folder, device_blocks=device_blocks, run_dir=place)
                )
                for name, place in (("cached", run_dir), ("plain", None))
            )
        )
        for server in pair:
            server.wait_until_ready()
        yield pair


def _command(model: LocalModel, folder: Path, socket: Path, device_blocks: int, *, with_connector: bool) -> list[str]:
    command = [
        str(interpreter()),
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={folder}",
        f"--served-model-name={MODEL_NAME}",
        f"--uds={socket}",
        "--dtype=float32",
        f"--max-model-len={CONTEXT_TOKENS}",
        f"--block-size={BLOCK_SIZE}",
        f"--kv-cache-memory-bytes={device_blocks * model.block_bytes}",
        "--max-num-seqs=16",
        "--max-num-batched-tokens=1024",
        "--enforce-eager",
        "--enable-prompt-tokens-details",
        "--disable-uvicorn-access-log",
    ]
    return [*command, f"--kv-transfer-config={json.dumps(CONNECTOR)}"] if with_connector else command


def _pump(output: IO[bytes] | None, path: Path, settled: threading.Event) -> None:
    """Keep the log until all its processes have closed it; tell when the server is ready, or has ended before."""
    assert output is not None
    with output, path.open("wb", buffering=0) as log:
        for line in output:
            log.write(line)
            if _READY in line:
                settled.set()
    settled.set()


def _wait_until_it_listens(path: Path) -> None:
    end = time.monotonic() + _LISTEN_TIMEOUT_S
    while True:
        with Socket(AF_UNIX) as socket:
            try:
                socket.connect(str(path))
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise
            else:
                return
        time.sleep(_RETRY_S)
