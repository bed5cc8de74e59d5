"""Backends by name: the entry points of the group `kvcached.storage`, ours and those of other distributions.

An entry point is a callable that takes the settings of the backend's table, checks them and returns it open. Its module
is imported in the storage process, and only if its name is asked for.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from kvcached.storage.interface import Storage, StorageUnusable

GROUP: Final = "kvcached.storage"


def open_backend(name: str, settings: dict[str, object]) -> Storage:
    """An open backend.

    Raises:
        StorageUnusable: none of that name is installed, it cannot be imported, or not opened with these settings.
    """
    found = entry_points(group=GROUP)
    if name not in found.names:
        installed = ", ".join(sorted(found.names)) or "none"
        raise StorageUnusable(f"no storage backend {name!r}; installed: {installed}")
    try:
        opener = found[name].load()
    except (ImportError, AttributeError) as error:
        raise StorageUnusable(f"storage backend {name!r} ({found[name].value}) cannot be imported: {error}") from error
    storage = opener(settings)
    if not isinstance(storage, Storage):
        raise StorageUnusable(
            f"storage backend {name!r} ({found[name].value}) made {type(storage).__name__}, no Storage"
        )
    return storage
