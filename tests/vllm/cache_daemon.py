"""A daemon for vLLM servers: started, killed and started again in one place, asked until it says what is awaited."""

from __future__ import annotations

import contextlib
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcached_client import Admin
from kvcached_client.protocol import HostStats, StatsReport
from tests.project.daemon_process import running_daemon

SLAB_BYTES = 1 << 20
CONFIG = """
heartbeat_interval_ms = 500
session_ttl_ms = 3000

[host]
size_bytes = {size_bytes}
slab_bytes = {slab_bytes}
verify_loads = true

[attached]
namespaces_max = 8
"""
#: How long what must happen by itself may take: a session that ends, a link that is made again.
CHANGE_TIMEOUT_S = 30
#: Between two questions. Asking all the time would take a core away from vLLM.
PAUSE_S = 0.02


class CacheDaemon:
    """A daemon with a host pool of so many slabs. Started by `start`, not before."""

    def __init__(self, directory: Path, *, slabs: int = 64) -> None:
        self.run_dir = directory / "run"
        self._config = directory / "kvcached.toml"
        self._config.write_text(CONFIG.format(size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES))
        self._running = contextlib.ExitStack()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The daemon, while it runs."""
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start it, also again after its end; nothing if it runs."""
        if self._process is not None:
            return
        self.run_dir.with_suffix(".notify").unlink(missing_ok=True)
        self._process = self._running.enter_context(running_daemon(self._config, self.run_dir))

    def kill(self) -> None:
        """SIGKILL; it is dead on return."""
        self.process.kill()
        self.process.wait()
        self.stop()

    def stop(self) -> None:
        """End it in order, if it is there."""
        self._running.close()
        self._process = None

    # --- what it says ------------------------------------------------------------------------------------------------

    def stats(self) -> StatsReport:
        """Counters and gauges."""
        with Admin.connect(self.run_dir) as admin:
            return admin.stats()

    def count(self, counter: str) -> int:
        """A counter; one that never counted is 0."""
        return self.stats().counters.get(counter, 0)

    def until(self, reached: Callable[[StatsReport], bool], what: str) -> None:
        """Wait until its figures are as wanted. There is no event for that outside of the daemon.

        Raises:
            AssertionError: they never were; with the last ones.
        """
        deadline = time.monotonic() + CHANGE_TIMEOUT_S
        pause = threading.Event()
        with Admin.connect(self.run_dir) as admin:
            while not reached(stats := admin.stats()):
                assert time.monotonic() < deadline, f"not {what} after {CHANGE_TIMEOUT_S} s: {stats}"
                pause.wait(PAUSE_S)

    def until_sessions(self, sessions: int) -> None:
        """Wait until there are as many sessions."""
        self.until(lambda stats: stats.sessions == sessions, f"{sessions} sessions")

    def until_idle(self) -> None:
        """Wait until nothing is held or copied, and check its invariants."""
        self.until(_is_idle, "idle")
        with Admin.connect(self.run_dir) as admin:
            report = admin.check()
        assert report.ok, report.violations


def _is_idle(stats: StatsReport) -> bool:
    return not any(stats.transfers.values()) and all(map(_holds_nothing, stats.hosts))


def _holds_nothing(host: HostStats) -> bool:
    return not (host.leases or host.states["filling"] or host.states["quarantined"])
