"""A daemon for vLLM servers: started, killed and started again in one place, asked until it says what is awaited."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kvcached_client import Admin
from kvcached_client.protocol.engine import HostStats, StatsReport
from tests.daemon.supervised import Supervised, supervised

SLAB_BYTES = 1 << 20
CONFIG = """
heartbeat_interval_ms = 500
session_ttl_ms = 6000

[host]
size_bytes = {size_bytes}
slab_bytes = {slab_bytes}
verify = "always"

[[host.quota.tenant]]
label = "acme"
cap_percent = 5

[offload]
namespaces_max = 8
device_memory_bytes = {device_memory_bytes}
"""
STORAGE = """
[storage]
backend = "{backend}"
layout = "{layout}"

[storage.settings]
directory = "{directory}"
capacity_bytes = 268435456
free_space_floor_bytes = 0
"""
SHARED_STORAGE = """
[storage]
backend = "redis"

[storage.settings]
url = "{url}"
"""
#: `tests.storage.fault`
DELAYS = """
[storage.settings.faults]
rates = {{ delay = 1.0 }}
delay_s = {delay_s}
"""
#: How long what must happen by itself may take: a session that ends, a link that is made again.
CHANGE_TIMEOUT_S = 30
#: Between two questions. Asking all the time would take a core away from vLLM.
PAUSE_S = 0.02


class CacheDaemon:
    """A supervised daemon with a host pool of so many slabs, and storage if wanted. Started by `start`, not before.

    Each call of the storage takes `storage_delay_s` longer. `shared_url` is of a server that other daemons share.
    `tables` are further ones of its configuration.
    """

    def __init__(
        self,
        directory: Path,
        *,
        slabs: int = 64,
        has_storage: bool = False,
        storage_delay_s: float = 0.0,
        storage_layout: str = "engine",
        shared_url: str = "",
        device_memory_bytes: int = 0,
        tables: str = "",
    ) -> None:
        self.run_dir = directory / "run"
        self._directory = directory
        self._config = CONFIG.format(
            size_bytes=slabs * SLAB_BYTES, slab_bytes=SLAB_BYTES, device_memory_bytes=device_memory_bytes
        )
        self._config += tables
        if has_storage:
            backend = "faulty" if storage_delay_s else "disk"
            self._config += STORAGE.format(backend=backend, layout=storage_layout, directory=directory / "disk")
        if shared_url:
            self._config += SHARED_STORAGE.format(url=shared_url)
        if storage_delay_s:
            self._config += DELAYS.format(delay_s=storage_delay_s)
        self._parts = contextlib.ExitStack()
        self._supervised: Supervised | None = None
        self._was_killed = False

    @property
    def pid(self) -> int:
        """Of the daemon."""
        assert self._supervised is not None
        return self._supervised.daemon_pid

    def start(self) -> None:
        """Start it; after a `kill`, wait until the next one is ready. Nothing if it runs."""
        if self._supervised is None:
            self._supervised = self._parts.enter_context(supervised(self._directory, self._config))
        elif self._was_killed:
            self._supervised.await_ready()
        self._was_killed = False

    def kill(self) -> None:
        """SIGKILL; it is dead on return, and the next one on its way."""
        assert self._supervised is not None
        self._supervised.kill()
        self._was_killed = True

    def stop(self) -> None:
        """End it in order, if it is there."""
        self._parts.close()
        self._supervised = None

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

    def until_stored(self, blocks: int) -> None:
        """Wait until storage has so many blocks."""
        with Admin.connect(self.run_dir) as admin:
            self.until(lambda _: admin.storage().blocks >= blocks, f"{blocks} blocks in storage")

    def until_written(self, blocks: int) -> None:
        """Wait until so many blocks were written to storage that does not count its blocks."""
        with Admin.connect(self.run_dir) as admin:
            self.until(lambda _: admin.storage().counters.get("written_blocks", 0) >= blocks, f"{blocks} blocks")

    def until_storage(self) -> None:
        """Wait until its storage can be read."""
        with Admin.connect(self.run_dir) as admin:
            self.until(lambda _: admin.storage().state == "ready", "reading storage")

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
