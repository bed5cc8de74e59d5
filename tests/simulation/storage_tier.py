"""Storage of one daemon: the real link and verbs, with a simulated process at their end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from kvcached.service.storage_verbs import StorageService
from kvcached.storage import client as link
from kvcached.storage.client import StorageLink
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import StorageConfig
from kvcached.storage_start import keep_record
from tests.simulation.storage_process import TIMEOUT_S, SimulatedStorage
from tests.simulation.virtual_loop import none_runs

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World

_WAIT_MS = 200
_WAIT_US_PER_TOKEN = 1000


class StorageOfDaemon:
    """What `kvcached.storage_start` makes, without waiting for it to be ready.

    Attributes:
        processes: those that were started, the last one last.
        link: to the last one; None where no storage is configured.
    """

    def __init__(self, world: World, daemon: Daemon) -> None:
        self.processes: list[SimulatedStorage] = []
        self.link: StorageLink | None = None
        self._world = world
        self._daemon = daemon

    def start(self) -> None:
        """As it is configured."""
        spec, service = self._world.plan.storage, self._daemon.service
        if spec is None:
            return
        config = StorageConfig(backend="simulated", settings={}, key_file="", timeout_s=TIMEOUT_S, host_bytes=1)
        self.link = StorageLink(
            config, (0, 0), Path(), self._daemon.cache.epoch, service.storage.format_of, service.on_event
        )
        service.storage.storage = StorageService(self.link, "simulated", spec.backup, _WAIT_MS, _WAIT_US_PER_TOKEN)
        keep_record(service, self.link, self._world.record.record, self._world.record, "engine")
        self.link.attach()

    def new_process(self, on: dict[str, Any]) -> SimulatedStorage:
        """The link starts one.

        Raises:
            OSError: the machine has no room for it.
        """
        if self._world.chance.happens(0.02) and not self._world.faults.ceased:
            raise OSError("no room for another process")
        started = SimulatedStorage(self._world, self._daemon, on["on_opened"], on["on_reply"], on["on_exit"])
        self.processes.append(started)
        return started

    def orphan(self) -> None:
        """The daemon is dead."""
        for each in self.processes:
            each.orphan()

    def all_dead(self) -> bool:
        """Whether nothing of it touches the host pool any more; who lives is killed, as the next daemon does it."""
        living = [each for each in self.processes if not each.process.dead]
        for each in living:
            each.kill("the next daemon waits for its end")
        return not living

    def left(self) -> dict[str, int]:
        """What is under way or waits, by name."""
        tier = self._daemon.cache.storage
        asked = 0 if self.link is None else len(self.link._in_flight) + len(self.link._forgets)
        is_ready = self.link is not None and self.link.state is LinkState.READY
        return {
            "copies by storage": len(tier.copies),
            "prefetches": len(tier.prefetches.under_way),
            "orders without an answer": asked if is_ready else 0,
        }


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """While the block runs, what the product starts as a storage process is one of `world`."""

    def start(*_: object, **on: Any) -> SimulatedStorage:
        return world.daemon.storage.new_process(on)

    with patch.object(link, "StorageProcess", start):
        try:
            yield
        finally:
            none_runs()
