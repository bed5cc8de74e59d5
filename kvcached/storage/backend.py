"""What a storage backend is: values of bytes under keys of 32 bytes, in batches, from and into memory not its own.

A backend is used by one process, the storage process, from as many threads at a time as it says it can bear. It may
forget anything at any time: storage is asked, never assumed. It may also be wrong: every value is a frame that names
its block and proves its bytes (`kvcached.storage.frame`), and what does not match is deleted and counts as absent. So a
backend needs no checksums and no transactions of its own. `docs/storage.md` shows a complete one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Final, NamedTuple

from kvcached_client.types import KEY_SIZE_BYTES

#: Entry points of this group are backends: ours, and those of other distributions.
GROUP: Final = "kvcached.storage"
#: The backend that is part of this distribution.
DISK: Final = "disk"

#: A key is the digest of what makes blocks interchangeable, then the block's own key.
PREFIX_BYTES: Final = 16
STORED_KEY_BYTES: Final = PREFIX_BYTES + KEY_SIZE_BYTES


class StorageUnusable(Exception):
    """A backend cannot be opened now; it is tried again. The message says why, and what to do."""


class StorageMisconfigured(StorageUnusable):
    """A backend can never be opened with these settings: trying again is of no use."""


class Outcome(StrEnum):
    """What became of one block of a batch."""

    DONE = "done"
    ABSENT = "absent"  #: get: there is no such key, or a value of another size
    FULL = "full"  #: put: no room, and none to be made
    FAILED = "failed"  #: the device or the service failed


class Result(NamedTuple):
    """Of one block; `detail` says why it failed, for the log."""

    outcome: Outcome
    detail: str = ""


DONE: Final = Result(Outcome.DONE)
ABSENT: Final = Result(Outcome.ABSENT)


class Block(NamedTuple):
    """One value: a key, and the memory that it is written from or read into.

    Attributes:
        key: 32 bytes.
        parts: what the value consists of, in order: its frame, then the block's bytes of each shard. Contiguous, of
            format "B"; together as long as the value. All begin at a multiple of 4096 where their sizes allow it.
    """

    key: bytes
    parts: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        """Of the value."""
        return sum(part.nbytes for part in self.parts)


class Capabilities(NamedTuple):
    """What a backend can do.

    Attributes:
        threads: calls that it serves well at a time: the queue depth.
        batch_blocks: blocks that it is given at most in one call.
        persistent: whether values outlive the process.
        deletes: whether `delete` and `clear` have an effect; where not, old generations stay until it drops them.
    """

    threads: int = 4
    batch_blocks: int = 32
    persistent: bool = True
    deletes: bool = True


class Usage(NamedTuple):
    """How full it is; -1 where that is not known."""

    blocks: int
    size_bytes: int
    capacity_bytes: int


class Storage(ABC):
    """A backend. Methods are called from several threads at a time, and may wait for the device.

    A batch never raises because of one of its blocks: each has a result of its own. What is raised counts as a failure
    of all of them. `timeout_s` is when the caller stops counting on the answer: a backend that talks to a service hands
    it on. Memory in `parts` is the backend's until the call returns, however late.
    """

    capabilities = Capabilities()

    @abstractmethod
    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether there is a value, for each key. A hint: it may be gone when it is asked for."""

    @abstractmethod
    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read values into the parts. What the parts hold after another outcome than DONE does not matter."""

    @abstractmethod
    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write values. One that is there already under the key is as good as the new one."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Forget values; returns how many there were."""

    @abstractmethod
    def clear(self, prefix: bytes, *, timeout_s: float) -> int:
        """Forget all values whose key begins with these 16 bytes; all of them for b"". Returns how many there were.

        Nobody waits: it may take some minutes. Where it fails it is called again.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """How full it is."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Give everything back. No other method is called afterwards, and none is running."""


def open_backend(name: str, settings: dict[str, object]) -> Storage:
    """Open the backend of this name, which is an entry point of the group `GROUP`.

    An entry point is a callable that takes the settings of the backend's table, checks them and returns the backend
    open. Its module is imported in the storage process, and only if its name is asked for.

    Raises:
        StorageMisconfigured: no backend of that name is installed, or it cannot be imported.
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
