"""A supervised daemon of both modes on a fake device, and what the runner does to its processes."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from kvcached_client import Admin
from kvcached_client.errors import KvcachedError
from tests.cuda.matrix.arming import EVENTS, VARIABLE, WORKER, arm
from tests.cuda.matrix.children import PATIENCE_S, Child
from tests.cuda_driver import trace
from tests.cuda_driver.device import device_directory, live_granules, settings
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.faults.harness import held
from tests.project.source_tree import ROOT

SLOTS: Final = 48
TTL_MS: Final = 1000
BOTH_MODES: Final = (
    CONFIG.replace("slots = 16", f'slots = {SLOTS}\ndevice = "cuda"').replace("ttl_ms = 600", f"ttl_ms = {TTL_MS}")
    + "\n[host]\nsize_bytes = 16777216\nslab_bytes = 131072\n[offload]\n"
)
EVERY_PROCESS: Final = Path(__file__).parent / "every_process"
_LOOK_PAUSE_S: Final = 0.005


class NotWell(Exception):
    """Something that must come to pass has not."""


class World:
    """The daemon, its device, and a folder for what is armed.

    Attributes:
        device, folder: their directories.
        events: descriptor of the socket that hears of failpoints.
    """

    def __init__(self, daemon: Supervised, device: Path, folder: Path, events: socket.socket) -> None:
        self._daemon = daemon
        self._events = events
        self.device = device
        self.folder = folder
        self.events = events.fileno()
        self._engines: list[Child] = []

    @property
    def run_dir(self) -> Path:
        return self._daemon.run_dir

    @property
    def trace_path(self) -> Path:
        return self.folder / "trace"

    def engine(self, kind: str, **driver: object) -> Child:
        """A new engine; what it says first is still to be heard."""
        self._engines.append(Child(kind, self.run_dir, self.folder, settings(**driver)))
        return self._engines[-1]

    def end_engines(self) -> None:
        """All of them are dead when it returns."""
        while self._engines:
            self._engines.pop().kill()

    def take_event(self) -> tuple[int, int]:
        """Which arming has met which process."""
        number, pid = self._events.recv(64).split()
        return int(number), int(pid)

    def forget_events(self) -> None:
        while select.select([self._events], [], [], 0)[0]:
            self._events.recv(64)
        self._daemon.forget_notices()

    # --- processes --------------------------------------------------------------------------------------------------

    def pid_of(self, role: str) -> int:
        """Of the daemon, or of the only worker.

        Raises:
            ProcessLookupError: there is no worker.
        """
        if role == "daemon":
            return self._daemon.daemon_pid
        written = (self.run_dir / "worker-default-0.lock").read_text()
        if not written:
            raise ProcessLookupError(role)
        return int(written)

    def kill(self, role: str) -> None:
        """SIGKILL; returns when the process is dead."""
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.pid_of(role))
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                select.select([pidfd], [], [], PATIENCE_S)
            finally:
                os.close(pidfd)

    def await_daemon(self) -> None:
        """Until a daemon says that it is ready."""
        self._daemon.await_ready()

    def await_well(self, first: Callable[[], None] = lambda: None) -> None:
        """Until a real request goes through the worker; `first` is called before each."""

        def is_well() -> bool:
            first()
            return admin.health().ok

        with self.admin() as admin:
            until(is_well, "the daemon is not well")

    def prepare_worker(self, **driver: object) -> None:
        """The next worker's driver has these settings."""
        (self.folder / WORKER).write_text(json.dumps(settings(**driver)))

    def forget_prepared(self) -> None:
        """The next worker's driver makes no errors."""
        (self.folder / WORKER).unlink(missing_ok=True)

    def renew_worker(self, first: Callable[[], None] = lambda: None) -> None:
        """The next worker takes the place of the present one; `first` as of `await_well`."""
        self.kill("worker")
        self.await_well(first)

    # --- what is left -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def admin(self) -> Iterator[Admin]:
        with Admin.connect(self.run_dir, deadline_ms=int(PATIENCE_S * 1000)) as admin:
            yield admin

    def await_no_copies(self) -> None:
        """Until no copy is under way."""
        with self.admin() as admin:
            until(lambda: not any(admin.stats().transfers.values()), "copies do not end")

    def await_nothing_held(self) -> None:
        """Until nobody holds anything, when no engine is there."""
        with self.admin() as admin:
            until(lambda: not held(admin.stats()), lambda: f"held: {held(admin.stats())}")

    def violations(self) -> tuple[str, ...]:
        with self.admin() as admin:
            return admin.check().violations

    def broken_rules(self) -> set[str]:
        """Rules of the driver that were broken since the trace was forgotten."""
        return {f"{record.name}: {record.rule}" for record in trace.read(self.trace_path) if record.rule}

    def copies(self) -> int:
        """Copies that the driver was asked for since then."""
        return self.trace_path.read_text().count('"name":"cuMemcpy')

    def forget_trace(self) -> None:
        """Every process appends to it."""
        self.trace_path.open("w").close()

    @property
    def log(self) -> str:
        """What the daemons have said."""
        return self._daemon.log


def until(reached: Callable[[], bool], failure: str | Callable[[], str]) -> None:
    """Wait until something is so.

    Raises:
        NotWell: it never is.
    """
    end_s = time.monotonic() + PATIENCE_S
    while True:
        with contextlib.suppress(KvcachedError):
            if reached():
                return
        if time.monotonic() > end_s:
            raise NotWell(failure if isinstance(failure, str) else failure())
        time.sleep(_LOOK_PAUSE_S)


@contextlib.contextmanager
def driver_environment(library: Path, device: Path, folder: Path, **driver: object) -> Iterator[None]:
    """Of this process, which all others inherit."""
    path = os.pathsep.join(filter(None, (str(EVERY_PROCESS), str(ROOT), os.environ.get("PYTHONPATH"))))
    values = {"directory": device, "delay_us": 200, "register_us_per_mib": 0, "memory_mib": 64, **driver}
    before = dict(os.environ)
    os.environ.update(settings(**{**values, "trace": folder / "trace"}))
    os.environ.update({"LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": path, VARIABLE: str(folder)})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def folder_of_processes() -> Iterator[Path]:
    """A folder in which nothing is armed."""
    with tempfile.TemporaryDirectory(prefix="matrix-") as name:
        folder = Path(name)
        arm(folder, None)
        yield folder


@contextlib.contextmanager
def world(library: Path) -> Iterator[World]:
    """From the first daemon's readiness to the end of all processes.

    Raises:
        NotWell: memory of the device outlives them.
    """
    with (
        device_directory() as device,
        folder_of_processes() as folder,
        driver_environment(library, device, folder),
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events,
    ):
        events.bind(str(folder / EVENTS))
        with supervised(folder, BOTH_MODES, pause_min_s=0.01, pause_max_s=0.01) as daemon:
            made = World(daemon, device, folder, events)
            try:
                yield made
            finally:
                made.end_engines()
        if granules := live_granules(device):
            raise NotWell(f"{granules} granules outlive all processes")
