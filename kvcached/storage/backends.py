"""Backends by name: the entry points of the group `kvcached.storage`, ours and those of other distributions.

An entry point is a callable that takes the settings of the backend's table, checks them and returns it open. Its module
is imported in the storage process, and only if its name is asked for.
"""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Final

from kvcached.storage.backend import Storage, StorageMisconfigured

GROUP: Final = "kvcached.storage"
#: The one that is ours.
DISK: Final = "disk"


def open_backend(name: str, settings: dict[str, object]) -> Storage:
    """An open backend.

    Raises:
        StorageMisconfigured: none of that name is installed, or it cannot be imported.
        StorageUnusable: it cannot be opened with these settings.
    """
    found = entry_points(group=GROUP)
    if name not in found.names:
        installed = ", ".join(sorted(found.names)) or "none"
        raise StorageMisconfigured(f"no storage backend {name!r}; installed: {installed}")
    try:
        opener = found[name].load()
    except (ImportError, AttributeError) as error:
        raise StorageMisconfigured(
            f"storage backend {name!r} ({found[name].value}) cannot be imported: {error}"
        ) from error
    storage = opener(settings)
    if not isinstance(storage, Storage):
        raise StorageMisconfigured(
            f"storage backend {name!r} ({found[name].value}) made {type(storage).__name__}, no Storage"
        )
    return storage
