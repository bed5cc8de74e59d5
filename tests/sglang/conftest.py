"""A daemon, and real SGLang processes on it."""

from __future__ import annotations

import hashlib
import random
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.project.source_tree import ROOT
from tests.sglang.sglang_process import PAGE_SIZE, SglangProcess, ended, interpreter
from tests.vllm.cache_daemon import CacheDaemon

Prompts = Callable[..., list[int]]


def write_model(folder: Path, seed: int) -> Path:
    """A tiny model."""
    script = ROOT / "tests/vllm/tiny_model.py"
    subprocess.run([interpreter(), script, folder, "--seed", str(seed)], check=True)
    return folder / "model"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("tiny"), 0)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the same shape, with other weights."""
    return write_model(tmp_path_factory.mktemp("other"), 1)


@pytest.fixture(scope="session")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """With storage."""
    daemon = CacheDaemon(tmp_path_factory.mktemp("daemon"), has_storage=True)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="session")
def processes(
    tmp_path_factory: pytest.TempPathFactory, model: Path, daemon: CacheDaemon
) -> Iterator[tuple[SglangProcess, SglangProcess]]:
    """SGLang on the daemon, and SGLang alone. They start together: most of a start is imports."""
    folder = tmp_path_factory.mktemp("sglang")
    with (
        ended(SglangProcess(folder / "sglang.log", model, daemon.run_dir)) as sglang,
        ended(SglangProcess(folder / "reference.log", model, None, disable_radix_cache=True)) as reference,
    ):
        yield sglang.wait_until_ready(), reference.wait_until_ready()


@pytest.fixture
def sglang(processes: tuple[SglangProcess, SglangProcess]) -> SglangProcess:
    """SGLang on the daemon."""
    return processes[0]


@pytest.fixture
def reference(processes: tuple[SglangProcess, SglangProcess]) -> SglangProcess:
    """SGLang without hierarchical cache and without kvcached; it computes every prompt."""
    return processes[1]


@pytest.fixture
def prompt(request: pytest.FixtureRequest) -> Prompts:
    """Makes prompts of so many pages that no other test has; with a name several that share nothing."""

    def make(pages: int, name: object = "") -> list[int]:
        seed = hashlib.blake2b(f"{request.node.nodeid} {name}".encode()).digest()
        source = random.Random(seed)
        return [source.randrange(3, 500) for _ in range(pages * PAGE_SIZE)]

    return make
