"""A daemon in a process of its own, from ready to stopped."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.project.source_tree import ROOT

START_TIMEOUT_S = 30
STOP_TIMEOUT_S = 15
#: What is not in the product, but installed for daemons of tests: `tests.storage.fault`.
_FAULTY_BACKEND = ROOT / "tests/storage/faulty_backend"


@contextlib.contextmanager
def running_daemon(
    config: Path,
    directory: Path,
    *options: str,
    program: str = "kvcached",
    command: str = "serve",
    variables: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Serve `config` with `directory` as run directory; its log is `directory`.log.

    `program` is the module that has the daemon's command line, `command` its subcommand; `variables` are added to the
    environment.

    Raises:
        AssertionError: it ended before it was ready, or was not ready in time.
    """
    log_path = directory.with_suffix(".log")
    notify_path = directory.with_suffix(".notify")
    notify_path.unlink(missing_ok=True)  # of an earlier daemon there
    arguments = [
        sys.executable,
        "-m",
        program,
        command,
        "--config",
        str(config),
        "--run-dir",
        str(directory),
        *options,
    ]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, log_path.open("wb") as log:
        notices.bind(str(notify_path))
        environment = {**clean_environment(), "NOTIFY_SOCKET": str(notify_path), **(variables or {})}
        with subprocess.Popen(arguments, cwd=ROOT, env=environment, stderr=log) as process:
            try:
                wait_for_ready(process, notices, log_path)
                yield process
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


def wait_for_ready(process: subprocess.Popen[bytes], notices: socket.socket, log_path: Path) -> None:
    """Until READY=1 arrives on `notices`, whatever else the daemon tells there before."""
    pidfd = os.pidfd_open(process.pid)
    try:
        ready = False
        while not ready:
            readable, _, _ = select.select([notices.fileno(), pidfd], [], [], START_TIMEOUT_S)
            assert notices.fileno() in readable, (
                f"the daemon is not ready (exit status {process.poll()}):\n{log_path.read_text()}"
            )
            ready = b"READY=1" in notices.recv(4096)
    finally:
        os.close(pidfd)


def clean_environment() -> dict[str, str]:
    """This process's environment without settings for kvcached, and with the storage backend "faulty"."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
    path = [each for each in (ours.get("PYTHONPATH"), str(_FAULTY_BACKEND)) if each]
    return {**ours, "PYTHONPATH": os.pathsep.join(path)}
