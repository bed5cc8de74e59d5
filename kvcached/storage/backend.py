"""The interface of a storage backend: values of bytes under keys of 32 bytes, read and written in batches.

Only the storage process uses a backend, from as many threads at a time as the backend allows. A backend may forget any
value at any time: whether it has a value is always asked. It may also return wrong bytes: every value begins with a
frame that names its block and has checksums of its bytes (`kvcached.storage.frame`), and a value that does not match is
deleted and counts as absent. So a backend needs no checksums and no transactions. `docs/storage.md` shows a complete
backend.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import StrEnum
from importlib.metadata import entry_points
from typing import Final, NamedTuple

from kvcached_client.types import KEY_SIZE_BYTES

#: The group of entry points for backends, of this distribution and of others.
GROUP: Final = "kvcached.storage"
#: The backend of which one daemon has a directory. Of others, a daemon learns whether they are shared when they open.
DISK: Final = "disk"

_PAGE: Final = 4096
#: A key is a digest of everything that makes blocks interchangeable, followed by the block's own key.
PREFIX_BYTES: Final = 16
#: Of the record of generations in a shared backend.
SHARED_RECORD_BYTES_MAX: Final = 4 << 20
STORED_KEY_BYTES: Final = PREFIX_BYTES + KEY_SIZE_BYTES


def no_progress() -> None:
    """Nobody waits for a sign."""


class StorageUnusable(Exception):
    """A backend cannot be opened now; it will be tried again. The message says why, and what to do."""


class StorageMisconfigured(StorageUnusable):
    """A backend cannot be opened with these settings, or a service refuses them: who starts a daemon is told at once.

    A daemon that has taken over memory goes on without storage, and so does one whose storage was open before. Both try
    again: what a service refuses now it may accept later.
    """


class StorageGone(Exception):
    """What a backend has opened is no longer what its settings name, so that it has to be opened anew.

    From any method; the storage process then ends, and the next one opens the backend. The message says why.

    Args:
        why: in words.
        can_open: whether it can be opened now. While it cannot, a local disk is left out, and the service goes on.
    """

    def __init__(self, why: str, *, can_open: bool = True) -> None:
        super().__init__(why)
        self.can_open = can_open


class RecordUnusable(StorageUnusable):
    """What is in the place of the record of generations is none for this daemon, which must not use storage then.

    Args:
        why: what it is, and what to do.
        version: by which it can be replaced; empty if it cannot.
    """

    def __init__(self, why: str, version: bytes = b"") -> None:
        super().__init__(why)
        self.version = version


class Outcome(StrEnum):
    """The outcome for one block of a batch."""

    DONE = "done"
    ABSENT = "absent"  #: get: there is no value for the key
    WRONG = "wrong"  #: get: there is something else than a value of that size; the caller discards it
    FULL = "full"  #: put: there is no room, and none can be made
    FAILED = "failed"  #: the device or the service failed


class Result(NamedTuple):
    """The result for one block; `detail` says in the log why it failed."""

    outcome: Outcome
    detail: str = ""


DONE: Final = Result(Outcome.DONE)
ABSENT: Final = Result(Outcome.ABSENT)
WRONG: Final = Result(Outcome.WRONG)


class Block(NamedTuple):
    """One value: its key, and the memory to write it from or to read it into.

    Attributes:
        key: 32 bytes.
        parts: the parts of the value in order: its frame, then the block's bytes of each shard. Contiguous memoryviews
            of format "B"; together as long as the value. All begin at a multiple of 4096 if their sizes allow it.
    """

    key: bytes
    parts: Sequence[memoryview]

    @property
    def size_bytes(self) -> int:
        """Of the value."""
        return sum(part.nbytes for part in self.parts)


def memory_for(sizes: Sequence[int]) -> list[memoryview]:
    """New memory for the parts of a value, of these sizes: each begins on a page."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _PAGE) * _PAGE)
    memory = memoryview(mmap.mmap(-1, max(starts[-1], 1)))
    return [memory[start : start + size] for start, size in zip(starts, sizes, strict=False)]


class Capabilities(NamedTuple):
    """What a backend can do.

    Attributes:
        threads: how many calls at a time it serves well: the queue depth.
        batch_blocks: the most blocks of one call.
        persistent: whether values outlive the process.
        deletes: whether `delete` and `clear` have an effect; if not, old generations stay until it drops them.
        is_shared: whether daemons of several machines use it at a time, and it keeps their record of generations.
    """

    threads: int = 4
    batch_blocks: int = 32
    persistent: bool = True
    deletes: bool = True
    is_shared: bool = False


class VersionedRecord(NamedTuple):
    """The record of generations as a shared backend has it.

    Attributes:
        data: at most `SHARED_RECORD_BYTES_MAX`; a backend does not look into it.
        version: changes with every write, and is never empty.
    """

    data: bytes
    version: bytes


class LocalDisk(NamedTuple):
    """How full a disk of this machine is that stands before the service, and how much was read from it.

    Attributes:
        blocks, size_bytes, capacity_bytes: as in `Usage`.
        read_blocks: blocks that were read from it since it was opened, and not from the service.
    """

    blocks: int
    size_bytes: int
    capacity_bytes: int
    read_blocks: int


class Usage(NamedTuple):
    """How full a backend is; -1 for an unknown figure. Only the storage process itself fills in `local_disk`."""

    blocks: int
    size_bytes: int
    capacity_bytes: int
    local_disk: LocalDisk | None = None


UNKNOWN_USAGE: Final = Usage(-1, -1, -1)


class Storage(ABC):
    """A backend. Its methods are called from several threads at a time, and may wait for the device.

    At most `capabilities.threads` calls are under way at a time; those about the record, one at a time, come beside.

    A call does not raise because one of its blocks failed: each block has its own result. An exception counts as a
    failure of all blocks. After `timeout_s` the caller no longer expects the reply: a backend that uses a service
    passes this limit on. The backend may use the memory in `parts` until the call returns, however late.
    """

    capabilities = Capabilities()

    @abstractmethod
    def exists(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether there is a value for each key. This is a hint: the value may be gone when it is read."""

    def missing(self, keys: Sequence[bytes], *, timeout_s: float) -> list[bool]:
        """Whether a `put` of each key would add something. By default, where there is no value."""
        return [not is_there for is_there in self.exists(keys, timeout_s=timeout_s)]

    @abstractmethod
    def get(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Read values into the parts. After any outcome but DONE, the parts may hold any bytes."""

    @abstractmethod
    def put(self, blocks: Sequence[Block], *, timeout_s: float) -> list[Result]:
        """Write values. If there is a value under the key already, it may be kept instead of the new one."""

    @abstractmethod
    def delete(self, keys: Sequence[bytes], *, timeout_s: float) -> int:
        """Delete values; returns how many there were."""

    def unsettled(self, keys: Sequence[bytes]) -> str:  # noqa: ARG002 - of backends of services
        """Why some of the keys may be there again after a `delete`, for people; empty if none may.

        For writes of a `put` that ended without an answer. By default there are none.
        """
        return ""

    def discard(self, keys: Sequence[bytes], *, timeout_s: float) -> None:
        """Delete what was read and is wrong: `missing` names it then. By default as `delete`, if that has an effect."""
        if self.capabilities.deletes:
            self.delete(keys, timeout_s=timeout_s)

    @abstractmethod
    def clear(self, prefix: bytes, *, timeout_s: float, progress: Callable[[], None] = no_progress) -> int:
        """Delete all values whose key begins with these 16 bytes; all values for b"". Returns how many there were.

        No request waits for this call, which may take as long as it gets on: it calls `progress` after each page or
        other part. If it fails, it is called again. A shared backend keeps the record.
        """

    @abstractmethod
    def usage(self) -> Usage:
        """How full the backend is."""

    def trouble(self) -> str:
        """What is wrong although the backend works, for people; empty if nothing is."""
        return ""

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        """The record of generations; None if there is none. Only of shared backends.

        Raises:
            RecordUnusable: what is there is no record for this daemon.
            Exception: it cannot be told whether there is one.
        """
        raise NotImplementedError

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        """Replace the record, if it is still the one of a version. Only of shared backends.

        The service compares and writes in one step, so that of two daemons that write after the same version, one
        writes. What it has answered to outlives its failures as far as the values do.

        Args:
            data: the new record.
            after: the version that it replaces; b"" = there is none yet.
            timeout_s: as in the other methods.

        Returns:
            Its version; None if there is another record than `after`, which stays.

        Raises:
            Exception: it cannot be told whether it was written.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Release all resources. No other method is running, and none is called afterwards.

        For who opens a backend by himself: the storage process ends without it, as it may at any moment.
        """


def open_backend(name: str, settings: dict[str, object]) -> Storage:
    """Open the backend of this name, which is an entry point of the group `GROUP`.

    An entry point is a callable that takes the settings of the backend's table, checks them and returns an open
    backend. Its module is imported in the storage process, and only if the configuration names it.

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
