"""Fixtures of the client's tests: a run directory, a fake daemon in it, and clients of that."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import Client
from tests.client.fake_daemon import FakeDaemon


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A directory whose sockets have short paths."""
    path = Path(tempfile.mkdtemp(prefix="kvc"))
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(run_dir: Path) -> Iterator[FakeDaemon]:
    """A running fake daemon in `run_dir`."""
    fake = FakeDaemon(run_dir)
    yield fake
    fake.stop()


@pytest.fixture
def connect(daemon: FakeDaemon) -> Iterator[Callable[..., Client]]:
    """Opens clients of the fake daemon and closes them at the end."""
    with contextlib.ExitStack() as stack:

        def open_client(**options: Any) -> Client:
            settings = {"deadline_ms": 2000, "heartbeat": False, **options}
            return stack.enter_context(Client.connect(daemon.run_dir, **settings))

        yield open_client


@pytest.fixture
def memory() -> Iterator[list[int]]:
    """Descriptors that the test closes at its end."""
    descriptors: list[int] = []
    yield descriptors
    for descriptor in descriptors:
        os.close(descriptor)
