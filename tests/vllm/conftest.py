"""A daemon, and real vLLM servers on it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import random_tokens
from tests.vllm.fleet import REFERENCE, Fleet
from tests.vllm.server import VllmServer, interpreter

Prompts = Callable[..., list[int]]


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and adapters for it."""
    folder = tmp_path_factory.mktemp("tiny")
    subprocess.run([interpreter(), ROOT / "tests/vllm/tiny_model.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def one_head_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with one head of K and V."""
    folder = tmp_path_factory.mktemp("one-head")
    subprocess.run([interpreter(), ROOT / "tests/vllm/tiny_model.py", folder, "--kv-heads", "1"], check=True)
    return folder / "model"


@pytest.fixture(scope="session")
def shared_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """The daemon of the fleet."""
    daemon = CacheDaemon(tmp_path_factory.mktemp("daemon"))
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory, models: Path, shared_daemon: CacheDaemon) -> Iterator[Fleet]:
    """The servers that tests share. The first one who asks waits for all three."""
    fleet = Fleet(tmp_path_factory.mktemp("servers"), models, shared_daemon)
    try:
        fleet.servers("a", "b", REFERENCE)
        yield fleet
    finally:
        fleet.stop()


@pytest.fixture
def daemon(fleet: Fleet, shared_daemon: CacheDaemon) -> Iterator[CacheDaemon]:
    """The daemon of the fleet; after the test nothing of it may be held."""
    shared_daemon.start()  # where a test failed before it could do so
    yield shared_daemon
    shared_daemon.until_idle()


@pytest.fixture
def server(fleet: Fleet, daemon: CacheDaemon) -> VllmServer:
    """A server on the daemon."""
    return fleet.servers("a")[0]


@pytest.fixture
def other(fleet: Fleet, daemon: CacheDaemon) -> VllmServer:
    """Another one on the same daemon."""
    return fleet.servers("b")[0]


@pytest.fixture
def reference(fleet: Fleet) -> VllmServer:
    """The server without a connector."""
    return fleet.servers(REFERENCE)[0]


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompts:
    """Makes prompts of so many blocks that no other test has; with a name several that share nothing."""

    def make(blocks: int, name: object = "") -> list[int]:
        return random_tokens(f"{request.node.nodeid} {name}", blocks)

    return make
