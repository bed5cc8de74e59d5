"""A daemon, and real SGLang processes on it; and the storage that SGLang loads, without SGLang."""

from __future__ import annotations

import hashlib
import importlib.metadata
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcached_client.engines import weights
from kvcached_client.sglang import hooks, loaded_weights
from tests.project.daemon_process import running_daemon
from tests.project.source_tree import ROOT
from tests.sglang.fake_sglang import FakeSglang, StorageConfig
from tests.sglang.sglang_process import PAGE_SIZE, SglangProcess, ended, interpreter
from tests.vllm.cache_daemon import CacheDaemon

CONFIG = ROOT / "configs/offload-cpu.toml"
Prompts = Callable[..., list[int]]
Storage = Any
Make = Callable[..., Storage]


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
def window_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every other layer of which tokens see a window only."""
    folder = tmp_path_factory.mktemp("window")
    subprocess.run([interpreter(), ROOT / "tests/sglang/window_model.py", folder], check=True)
    return folder / "model"


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


# --- without SGLang ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One daemon for the tests that leave it alone; each has a model of its own."""
    directory = tmp_path_factory.mktemp("daemon") / "run"
    with running_daemon(CONFIG, directory):
        yield directory


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeSglang:
    """SGLang with a model that no other test has."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(request.node.nodeid.encode())
    fake = FakeSglang(model)
    fake.install(monkeypatch)
    monkeypatch.delitem(sys.modules, "kvcached_client.sglang.storage", raising=False)
    monkeypatch.setattr(hooks, "_loaded", [])
    monkeypatch.setattr(loaded_weights, "process_began_ns", lambda: 2**63)  # after its model was written
    monkeypatch.setattr(weights, "default_notes_folder", lambda: None)
    version = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fake.version if name == "sglang" else version(name))
    return fake


@pytest.fixture
def make(fake: FakeSglang, run_dir: Path) -> Iterator[Make]:
    """Makes storages, on the daemon of the module if no other directory is given.

    Each is that of another SGLang, unless it is attached to the one before, which is running.
    """
    made: list[Storage] = []

    def make(
        pool: Any,
        directory: Path | None = None,
        *,
        beside: dict[str, Any] | None = None,
        is_attached: bool = False,
        **config: Any,
    ) -> Storage:
        from kvcached_client.sglang import KvcachedStorage  # noqa: PLC0415 - of this test's SGLang

        if not is_attached:
            hooks._loaded.clear()
        table = {"run_dir": str(directory or run_dir), "side_pools": bool(beside)}
        extra = {"interface_v1": 1, "kvcached": table}
        storage = KvcachedStorage(StorageConfig(**{"extra_config": extra, **config}), {})
        made.append(storage)
        storage.register_mem_pool_host(pool)
        for name, each in {"kv": pool, **(beside or {})}.items():
            storage.register_mem_host_pool_v2(each, name)
        storage.on_host_pools_registered()
        return storage

    yield make
    for storage in made:
        storage.close()
