"""Failpoints of processes that run already: what is armed stands in a file that each process reads at its failpoints.

The folder has three files: ``armed`` says what is armed, ``events`` is the socket that hears of each failpoint before
its action, and ``worker`` has environment variables for the next worker, which takes the file away.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
from pathlib import Path
from typing import Final

import msgspec

from kvcached_client import failpoints

#: Of the environment: the folder.
VARIABLE: Final = "MATRIX_FOLDER"
ARMED, EVENTS, WORKER = "armed", "events", "worker"
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


class Armed(msgspec.Struct, frozen=True):
    """An action at one failpoint, for the first process that reaches it.

    Attributes:
        number: of this arming; no other one has it.
        role: which processes: "engine", "worker" or "daemon".
        action: "kill" or "stop".
    """

    number: int
    role: str
    place: str
    at: int
    action: str


def arm(folder: Path, armed: Armed | None) -> None:
    """Arm a failpoint and nothing else, or nothing at all."""
    fresh = folder / "fresh"
    fresh.write_bytes(msgspec.json.encode(armed))
    fresh.rename(folder / ARMED)


class LivePlan:
    """Stands where `failpoints` has what was armed at the start of the process."""

    def __init__(self, role: str, folder: Path) -> None:
        self._role = role
        self._folder = folder
        self._lock = threading.Lock()
        self._read = (0, 0)
        self._armed: Armed | None = None
        self._passes = 0

    def get(self, place: str) -> None:
        """A failpoint is reached."""
        with self._lock:
            armed = self._current()
            if armed is None or (armed.role, armed.place) != (self._role, place):
                return
            self._passes += 1
            if self._passes != armed.at:
                return
        if self._is_first(armed.number):
            self._tell(armed.number)
            signal.pthread_kill(threading.get_ident(), _SIGNALS[armed.action])

    def _current(self) -> Armed | None:
        path = self._folder / ARMED
        status = path.stat()
        version = (status.st_ino, status.st_mtime_ns)
        if version != self._read:
            self._armed = msgspec.json.decode(path.read_bytes(), type=Armed | None)
            self._read, self._passes = version, 0
        return self._armed

    def _is_first(self, number: int) -> bool:
        try:
            os.close(os.open(self._folder / f"fired-{number}", os.O_CREAT | os.O_EXCL, 0o600))
        except FileExistsError:
            return False
        return True

    def _tell(self, number: int) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
            events.sendto(f"{number} {os.getpid()}".encode(), str(self._folder / EVENTS))


def follow(role: str, folder: Path) -> None:
    """Let this process follow what is armed."""
    setattr(failpoints, "_ARMED", LivePlan(role, folder))  # noqa: B010 - nobody else may set it
