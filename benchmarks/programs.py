"""Programs that a suite measures from outside: each a child process, ended with its block."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvcached.process import notify

_ROOT: Final = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S: Final = 60
_STOP_TIMEOUT_S: Final = 10
_HOST_POOL: Final = "/memfd:kvcached-host"
_MADV_POPULATE_WRITE: Final = 23
#: Variables of ours that they do not get: configuration, and that modules are compiled at every start, as those of an
#: installed program are not.
_LEFT_OUT: Final = ("KVCACHED_", "PYTHONDONTWRITEBYTECODE")


@contextlib.contextmanager
def running(name: str, arguments: list[str], directory: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """``python -m`` with `arguments`, from its start to its end; its output goes to ``<directory>/<name>.log``."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
    with (directory / f"{name}.log").open("wb") as log:
        program = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=_ROOT,
            env={**inherited, **environment},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
    try:
        yield program
    finally:
        program.terminate()
        try:
            program.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()


@contextlib.contextmanager
def daemon(config: str, directory: Path) -> Iterator[Path]:
    """A daemon with this configuration (TOML, without `run_dir`), from ready to stopped; its run directory.

    Raises:
        RuntimeError: it ended or was not ready in time; carries the end of its log.
    """
    with daemon_process(config, directory):
        yield directory / "run"


@contextlib.contextmanager
def daemon_process(config: str, directory: Path, *, command: str = "serve") -> Iterator[subprocess.Popen[bytes]]:
    """The same, as a process whose run directory is ``<directory>/run``. `command` is the one that starts it.

    Raises:
        RuntimeError: as `daemon`.
    """
    directory.mkdir(exist_ok=True)
    file = directory / "kvcached.toml"
    file.write_text(f'run_dir = "{directory / "run"}"\n{config}', encoding="utf-8")
    address = directory / "notify.sock"
    address.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(address))
        arguments = ["kvcached", command, "--config", str(file)]
        with running("daemon", arguments, directory, **{notify.NOTIFY_VARIABLE: str(address)}) as program:
            _wait_until_ready(program, notices, directory / "daemon.log")
            yield program


def touch_host_pool(process: subprocess.Popen[bytes]) -> None:
    """Make all of a daemon's host pool resident, as it is once a daemon has run for a while.

    Raises:
        RuntimeError: the daemon has none.
    """
    maps = Path(f"/proc/{process.pid}/maps").read_text().splitlines()
    # The daemon maps all of the pool; the file is longer.
    places = [line.split()[0].split("-") for line in maps if _HOST_POOL in line]
    size_bytes = sum(int(end, 16) - int(start, 16) for start, end in places)
    for descriptor in Path(f"/proc/{process.pid}/fd").iterdir():
        if str(descriptor.readlink()).startswith(_HOST_POOL):
            with descriptor.open("r+b") as memory, mmap.mmap(memory.fileno(), size_bytes) as mapped:
                mapped.madvise(_MADV_POPULATE_WRITE)
            return
    raise RuntimeError("the daemon has no host pool")


def _wait_until_ready(program: subprocess.Popen[bytes], notices: socket.socket, log: Path) -> None:
    death = os.pidfd_open(program.pid)
    try:
        while True:
            readable, _, _ = select.select([notices.fileno(), death], [], [], _START_TIMEOUT_S)
            if notices.fileno() not in readable:
                raise RuntimeError(f"the daemon is not ready; its log ends with:\n{log.read_text()[-2000:]}")
            if notices.recv(4096) == notify.READY.encode():
                return
    finally:
        os.close(death)
