"""A daemon started where a test has prepared something: it serves, or it ends with a reason."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.project.daemon_process import START_TIMEOUT_S, STOP_TIMEOUT_S, clean_environment
from tests.project.source_tree import ROOT


class Start(NamedTuple):
    """What became of a start.

    Attributes:
        status: 0 where it was ready, and was told to end then.
        log: all that it said.
    """

    is_ready: bool
    status: int
    log: str


def start(config: Path, run_dir: Path, *, prefix: Sequence[str] = ()) -> Start:
    """Start a daemon, and end it when it is ready; `prefix` is a command that becomes it."""
    log_path, notify_path = run_dir.with_name("start.log"), run_dir.with_name("start.notify")
    notify_path.unlink(missing_ok=True)
    command = [*prefix, sys.executable, "-m", "kvcached", "serve", "--config", str(config), "--run-dir", str(run_dir)]
    environment = {**clean_environment(), "NOTIFY_SOCKET": str(notify_path)}
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, log_path.open("wb") as log:
        notices.bind(str(notify_path))
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log) as process:
            is_ready = _await(process, notices)
            process.terminate()
            try:
                process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
    return Start(is_ready, process.returncode, log_path.read_text())


def _await(process: subprocess.Popen[bytes], notices: socket.socket) -> bool:
    """Whether it becomes ready; no longer than a start may take."""
    pidfd = os.pidfd_open(process.pid)
    try:
        while True:
            readable, _, _ = select.select([notices.fileno(), pidfd], [], [], START_TIMEOUT_S)
            if notices.fileno() in readable:
                if b"READY=1" in notices.recv(4096):
                    return True
            else:
                return False
    finally:
        os.close(pidfd)
