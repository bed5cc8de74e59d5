"""A real keeper for tests: `kvcached keep` as a process of its own."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

DEADLINE_S = 30


class KeeperProcess:
    """A keeper that is ready.

    Attributes:
        path: its socket.
    """

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log_path: Path) -> None:
        self.path = path
        self._process = process
        self._log_path = log_path

    @property
    def log(self) -> str:
        return self._log_path.read_text()

    def end(self, number: signal.Signals) -> int:
        """End it by a signal; its status."""
        self._process.send_signal(number)
        return self._process.wait(DEADLINE_S)


@contextlib.contextmanager
def keeper_process(directory: Path, *within: str) -> Iterator[KeeperProcess]:
    """A keeper from its readiness on, with its socket in a directory; a second one there follows a dead one.

    Args:
        directory: where everything is.
        within: the command that starts it, such as one that sets limits for it.
    """
    path, told = directory / "keeper.sock", directory / "keeper-notify"
    told.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, (directory / "keeper.log").open("ab") as log:
        notices.bind(str(told))
        notices.settimeout(DEADLINE_S)
        with subprocess.Popen(
            [*within, sys.executable, "-m", "kvcached", "keep", "--socket", str(path)],
            cwd=ROOT,
            env={**clean_environment(), "NOTIFY_SOCKET": str(told)},
            stderr=log,
        ) as process:
            try:
                assert notices.recv(100) == b"READY=1"
                yield KeeperProcess(path, process, directory / "keeper.log")
            finally:
                process.kill()
