from __future__ import annotations

from collections.abc import Callable
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvcached.storage import backend
from kvcached.storage.backend import GROUP, StorageUnusable, open_backend
from kvcached.storage.disk.backend import DiskStorage

Install = Callable[[str, str], None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Makes it look as if a distribution with one more backend were installed."""

    def add(name: str, value: str) -> None:
        ours = EntryPoint("disk", "kvcached.storage.disk.backend:open_disk", GROUP)
        found = EntryPoints([ours, EntryPoint(name, value, GROUP)])
        monkeypatch.setattr(backend, "entry_points", lambda *, group: found.select(group=group))

    return add


def test_disk_is_installed(tmp_path: Path) -> None:
    """The disk backend is found by its name, and opened with its settings."""
    storage = open_backend("disk", {"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})

    assert isinstance(storage, DiskStorage)
    storage.close()


def test_unknown_backend_is_told_from_those_installed(install: Install) -> None:
    """A name that nobody has registered is answered with those that there are."""
    install("redis", "nowhere:open")

    with pytest.raises(StorageUnusable, match="no storage backend 's3'; installed: disk, redis"):
        open_backend("s3", {})


@pytest.mark.parametrize("value", ["no_such_module:open", "kvcached.storage.disk.backend:no_such_function"])
def test_backend_that_cannot_be_imported_is_named(install: Install, value: str) -> None:
    """A registered backend whose module or function is missing says which."""
    install("broken", value)

    with pytest.raises(StorageUnusable, match=f"'broken' \\({value}\\) cannot be imported"):
        open_backend("broken", {})


def test_backend_is_a_storage(install: Install) -> None:
    """What an entry point makes has to be a Storage."""
    install("odd", "builtins:dict")

    with pytest.raises(StorageUnusable, match="made dict, no Storage"):
        open_backend("odd", {})
