from __future__ import annotations

from pathlib import Path

import pytest

from kvcached.storage.backend import Storage
from kvcached.storage.encryption.backend import EncryptedStorage
from kvcached.storage.redis.opening import open_redis
from tests.storage.contract import SharedContract, StorageContract
from tests.storage.redis.servers import Server


class _InServer:
    _server: Server

    @pytest.fixture(autouse=True)
    def _find_server(self, server: Server) -> None:
        self._server = server

    def open(self, directory: Path) -> Storage:
        """A backend whose prefix is the directory's name."""
        return open_redis(self._server.settings(f"{directory.parent.name}.{directory.name}"[-64:]))


class TestRedis(_InServer, SharedContract):
    pass


class TestRedisWithExpiry(_InServer, StorageContract):
    def open(self, directory: Path) -> Storage:
        prefix = f"{directory.parent.name}.{directory.name}"[-64:]
        return open_redis(self._server.settings(prefix, ttl_s=100, threads=2))


class TestEncryptedRedis(_InServer, SharedContract):
    def open(self, directory: Path) -> Storage:
        return EncryptedStorage(super().open(directory), bytes(range(32)))
