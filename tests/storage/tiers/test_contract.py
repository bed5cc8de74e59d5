from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from kvcached.storage.backend import Storage
from kvcached.storage.encryption.backend import EncryptedStorage
from kvcached.storage.redis.opening import open_redis
from kvcached.storage.tiers.backend import TieredStorage
from tests.storage.contract import SharedContract, StorageContract
from tests.storage.redis.servers import Server
from tests.storage.test_contract import disk


class TestDiskBeforeADisk(StorageContract):
    def open(self, directory: Path) -> Storage:
        return TieredStorage(disk(directory / "near"), disk(directory / "far"), "far")


class TestDiskBeforeRedis(SharedContract):
    _server: Server

    @pytest.fixture(autouse=True)
    def _find_server(self, server: Server) -> None:
        self._server = server
        self._opened = count()

    def open(self, directory: Path) -> Storage:
        """Each has a disk of its own, as each machine has."""
        far = open_redis(self._server.settings(f"{directory.parent.name}.{directory.name}"[-64:]))
        return TieredStorage(disk(directory / f"disk {next(self._opened)}"), far, "redis")


class TestEncryptedDiskBeforeRedis(TestDiskBeforeRedis):
    def open(self, directory: Path) -> Storage:
        return EncryptedStorage(super().open(directory), bytes(range(32)))
