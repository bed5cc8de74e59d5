"""A daemon under `kvcached supervise`, which a test kills and which comes back."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from kvcached.recovery.supervise import serve_command
from tests.project.daemon_process import START_TIMEOUT_S, STOP_TIMEOUT_S, clean_environment
from tests.project.source_tree import ROOT

_CREDENTIALS = struct.Struct("3i")


class Supervised:
    """The supervisor, and whichever daemon it runs.

    Attributes:
        run_dir: where the daemon's sockets are.
        process: the supervisor.
        log_path: what both have logged.
    """

    def __init__(self, run_dir: Path, process: subprocess.Popen[bytes], notices: socket.socket, log_path: Path) -> None:
        self.run_dir = run_dir
        self.process = process
        self.log_path = log_path
        self._notices = notices

    @property
    def daemon_pid(self) -> int:
        """Whoever listens at the attach socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(str(self.run_dir / "attach.sock"))
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(credentials)[0])

    @property
    def log(self) -> str:
        return self.log_path.read_text()

    def kill(self) -> None:
        """SIGKILL for the daemon; returns when it is dead."""
        pidfd = os.pidfd_open(self.daemon_pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], STOP_TIMEOUT_S)
        finally:
            os.close(pidfd)

    def await_ready(self) -> None:
        """Until a daemon says that it is ready."""
        while True:
            readable, _, _ = select.select([self._notices], [], [], START_TIMEOUT_S)
            assert readable, f"no daemon is ready:\n{self.log}"
            if b"READY=1" in self._notices.recv(4096):
                return

    def forget_notices(self) -> None:
        """Take what daemons have said so far: who speaks to a full socket waits."""
        while select.select([self._notices], [], [], 0)[0]:
            self._notices.recv(4096)

    def kill_and_wait(self) -> None:
        """As `kill`, until the next daemon is ready."""
        self.kill()
        self.await_ready()


@contextlib.contextmanager
def supervised(
    directory: Path, config: str, *, keeper: Path | None = None, within: tuple[str, ...] = (), **policy: float
) -> Iterator[Supervised]:
    """From the first daemon's readiness to the end of all.

    Args:
        directory: where everything is.
        config: the daemon's.
        keeper: the socket of a keeper.
        within: the command that starts the supervisor, such as one that makes a namespace for it.
        policy: as `kvcached.recovery.supervise.Policy` has it.
    """
    path, run_dir, log_path = directory / "kvcached.toml", directory / "run", directory / "run.log"
    path.write_text(config)
    options = ["--config", str(path), "--run-dir", str(run_dir)]
    kept = [] if keeper is None else ["--keeper", str(keeper)]
    command = [*within, sys.executable, "-m", "kvcached", "supervise", *kept, *options]
    if policy:
        supervisor = [sys.executable, "-m", "tests.recovery.supervised", json.dumps(policy)]
        command = [*supervisor, *serve_command(options)]
    (directory / "notify").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, log_path.open("wb") as log:
        notices.bind(str(directory / "notify"))
        environment = {**clean_environment(), "NOTIFY_SOCKET": str(directory / "notify")}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stderr=log) as process:
            running = Supervised(run_dir, process, notices, log_path)
            try:
                running.await_ready()
                yield running
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()
