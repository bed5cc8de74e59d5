from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from kvcached.storage.backend import Storage
from tests.storage.redis.servers import Server, opened


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """A server that all tests of a process use, each by a prefix of its own."""
    with closing(Server()) as server:
        yield server


@pytest.fixture
def storage(server: Server, request: pytest.FixtureRequest) -> Iterator[Storage]:
    """An open backend."""
    with opened(server, request.node.name[:64].replace("[", ".").replace("]", ".")) as storage:
        yield storage
