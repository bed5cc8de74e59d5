"""The storage process's states, without a process."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvcached.core.events import StorageEvent, StorageLost, StorageReady
from kvcached.storage import link
from kvcached.storage.link import LinkState, StorageLink
from kvcached.storage.messages import Opened, StorageConfig

CONFIG = StorageConfig(backend="fake", settings={}, faults={}, key_file="", lock_path="", timeout_s=1.0)


class FakeProcess:
    """A storage process that opens and dies when a test says so."""

    made: list[FakeProcess]

    def __init__(self, *_: object, on_opened: Any, on_reply: Any, on_exit: Any) -> None:
        self.on_opened, self.on_exit = on_opened, on_exit
        self.dead = asyncio.Event()
        FakeProcess.made.append(self)

    async def stop(self, _: float) -> None:
        await self.dead.wait()
        self.on_exit("ended")


def test_attach_waits_for_the_process_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes never have one backend: what is attached while it is detached starts when that is dead."""
    monkeypatch.setattr(link, "StorageProcess", FakeProcess)
    FakeProcess.made = []
    events: list[StorageEvent] = []

    async def play() -> None:
        storage = StorageLink(CONFIG, -1, "", 1, lambda *_: None, events.append)
        storage.attach()
        FakeProcess.made[0].on_opened(Opened(persistent=True, threads=1))
        detaching = asyncio.create_task(storage.detach(1.0))
        await asyncio.sleep(0)
        storage.attach()
        assert len(FakeProcess.made) == 1
        FakeProcess.made[0].dead.set()
        await detaching
        assert len(FakeProcess.made) == 2
        FakeProcess.made[1].on_opened(Opened(persistent=True, threads=1))
        assert storage.state is LinkState.READY

    asyncio.run(play())

    assert events == [StorageReady(), StorageLost(), StorageReady()]
