"""The record of each namespace's generation, which survives a reboot, and how a start uses it.

Storage finds blocks by namespace and generation, also after a reboot. The record is a file beside the stored blocks. It
holds the present generation of each namespace, its version of the weights, and the earlier generations that storage has
still to forget. If the record is missing or damaged, each namespace begins a generation under which nothing was ever
stored. The blocks in storage are then not found, and no cleared block comes back.

The record's device may hang, so a thread writes the record, and the daemon serves meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec
from msgspec import structs

from kvcached.config.replica import ReplicaConfig
from kvcached.config.tables import StorageLayout
from kvcached.core.generations import RANDOM_BITS, Edition
from kvcached.core.namespaces import NamespaceSpec
from kvcached.recovery.state_file import Count, Hex, Ledger, NamespaceRecord, ReplicaRecord
from kvcached_client.types import WritePolicy

#: Headers in the host pool carry the namespace of this generation, whatever the present generation is.
FIRST_GENERATION: Final = 0
#: The generations of one life of the daemon begin with its epoch, a time in milliseconds, and random bits: two lives do
#: not share one even where the clock was set back. Together 53 bits until the year 2039: every JSON reader takes such a
#: number for what it is.
_EPOCH_MASK: Final = (1 << 50) - 1

FORMAT: Final = 1
#: Of the file: 1024 editions with the longest version of weights, and as many generations to forget.
RECORD_BYTES_MAX: Final = 4 << 20
#: If the record cannot be read within this time, the start continues without it.
READ_DEADLINE_S: Final = 10.0

_MODE: Final = 0o600

_log: Final = logging.getLogger(__name__)


class Generation(NamedTuple):
    """A generation of a replica's namespace.

    Attributes:
        number: changes with each clear.
        weights_version: as `set-weights` has set it; "" = that of the configuration.
        namespace: the root of its keys, 32 bytes.
    """

    number: int
    weights_version: str
    namespace: bytes


def first_of(epoch: int, chance: int) -> int:
    """The first generation that a daemon may begin; no earlier daemon has used it.

    Args:
        epoch: the daemon's.
        chance: `RANDOM_BITS` random bits.
    """
    return (epoch & _EPOCH_MASK) << RANDOM_BITS | chance


def spec_of(record: NamespaceRecord, *, canonical: bool) -> NamespaceSpec:
    """A recorded namespace as the core has it, if storage holds blocks in their canonical layout, or as they are."""
    return NamespaceSpec(
        bytes.fromhex(record.root),
        record.label,
        record.block_size,
        record.shards,
        record.slots_per_slab,
        bytes.fromhex(record.canonical_root) if canonical else b"",
    )


def editions_of(record: Record | None, ledger: Ledger | None, *, canonical: bool = False) -> dict[bytes, Edition]:
    """The recorded editions of namespaces, by the root that they have in storage.

    A clear may have reached only one of the two files. If they differ, the later edition holds: the larger number. So
    it does for namespaces that now share a root in storage, and did not before.

    Namespaces with a canonical root do not go on where a daemon with another layout ended: storage may have blocks in
    this layout under that number which were cleared since. If it is later than that of the record, none is known.

    Args:
        record: what is written down beside storage.
        ledger: that of the daemon before.
        canonical: storage holds blocks in their canonical layout, where there is one.
    """
    found = {} if record is None else record.by_root()
    if ledger is None:
        return found
    for replica in ledger.replicas:
        _put_later(found, bytes.fromhex(replica.namespace), Edition(replica.generation, replica.weights_version))
    is_of_this_layout = ledger.layout == ("canonical" if canonical else "engine")
    for space in ledger.namespaces:
        root = spec_of(space, canonical=canonical).storage_root
        if is_of_this_layout or not space.canonical_root:
            _put_later(found, root, Edition(space.generation))
        elif root in found and found[root].generation < space.generation:
            del found[root]
    return found


def _put_later(found: dict[bytes, Edition], root: bytes, edition: Edition) -> None:
    if root not in found or found[root].generation < edition.generation:
        found[root] = edition


def generation_of(replica: ReplicaConfig, editions: Mapping[bytes, Edition], first: int) -> Generation:
    """The latest recorded generation of a configured replica's namespace; `first` if none is recorded.

    It may be recorded for another replica that shares the namespace. If the model, revision or layout has changed, so
    has the namespace.
    """
    latest: Generation | None = None
    for root, (number, weights_version) in editions.items():
        namespace = replica.namespace(number, weights_version)
        if namespace == root and (latest is None or number > latest.number):
            latest = Generation(number, weights_version, namespace)
    return latest or Generation(first, "", replica.namespace(first))


def provisional_roots(
    generations: Iterable[Generation], first: int, editions: Iterable[bytes], ledger: Ledger | None, *, is_shared: bool
) -> list[bytes]:
    """Roots whose editions no other daemon can know: where storage has another one, that takes its place.

    They are those that begin now, and all of them where the daemon before had no storage that others share.
    """
    if is_shared and ledger is not None and ledger.shared is msgspec.UNSET:
        return list(editions)
    return [each.namespace for each in generations if each.number == first]


def write_policy_of(replica: ReplicaConfig, generation: Generation, ledger: Ledger | None) -> WritePolicy:
    """The write policy set for a replica's namespace; the configured one if none was set, or if it has changed."""
    configured = WritePolicy(replica.write_policy)
    for record in () if ledger is None else ledger.replicas:
        if record.namespace == generation.namespace.hex():
            return recorded_policy(record, configured)
    return configured


def recorded_policy(record: ReplicaRecord | NamespaceRecord, configured: WritePolicy) -> WritePolicy:
    """The write policy of a record; the configured one if that has changed since the record was written."""
    return record.write_policy if record.configured_policy is configured else configured


class EditionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The present edition of a namespace, which is named by the root of its keys in hex."""

    namespace: Hex
    generation: Count
    weights_version: str = ""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the file.

    Attributes:
        format: the file's.
        layout: as the daemon that wrote it had storage configured; not written if it is that of the engines, so that
            daemons that know no other read the record.
        editions: those of namespaces, least recently used first.
        forgets: prefixes, in hex, of the keys that storage has still to forget.
    """

    format: Literal[1] = FORMAT
    layout: Literal["canonical"] | msgspec.UnsetType = msgspec.UNSET
    editions: tuple[EditionRecord, ...] = ()
    forgets: tuple[Hex, ...] = ()

    def by_root(self) -> dict[bytes, Edition]:
        """The editions by their roots."""
        return {bytes.fromhex(each.namespace): Edition(each.generation, each.weights_version) for each in self.editions}


def in_layout(record: Record, layout: StorageLayout, replicas: Iterable[ReplicaConfig]) -> Record:
    """A record for a daemon whose storage has a layout: in another one, only the editions of replicas count.

    While storage has one layout, clears of engines' namespaces tell nothing of what is stored in the other.
    """
    if recorded_layout(layout) == record.layout:
        return record
    kept = tuple(
        each
        for each in record.editions
        if any(replica.namespace(each.generation, each.weights_version).hex() == each.namespace for replica in replicas)
    )
    return structs.replace(record, layout=recorded_layout(layout), editions=kept)


def recorded_layout(layout: StorageLayout) -> Literal["canonical"] | msgspec.UnsetType:
    """A layout as a record has it."""
    return msgspec.UNSET if layout == "engine" else layout


class RecordWriter(Protocol):
    """Writes the record to its place."""

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """Replace the record. Later report in the caller's thread why that failed, or "" once it is on the device."""


class RecordFile:
    """The record in a file. The storage process has locked the directory, so no other process writes the file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """Replace the file. If the process dies meanwhile, the file is the old one or the new one, never a mixture."""
        data = msgspec.json.encode(record)
        _in_thread(lambda: _replace(self._path, data), lambda _, why: done(why))


async def read_record(path: Path, deadline_s: float | None = READ_DEADLINE_S) -> Record | None:
    """The record that a daemon has written; None if there is none, with the reason in the log.

    Args:
        path: of the file.
        deadline_s: after this long there is none; None = wait for the device for ever.
    """
    read: asyncio.Future[tuple[bytes | None, str]] = asyncio.get_running_loop().create_future()

    def tell(data: bytes | None, why: str) -> None:
        if not read.done():
            read.set_result((data, why))

    _in_thread(lambda: _content(path), tell)
    try:
        async with asyncio.timeout(deadline_s):
            data, why = await read
    except TimeoutError:
        data, why = None, f"its device has not answered for {deadline_s:g} s"
    if data is not None:
        try:
            return msgspec.json.decode(data, type=Record)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = f"it is damaged: {error}"
    if why:
        _log.warning("%s not used, so that nothing is found that was stored before: %s", path, why)
    return None


def _in_thread(work: Callable[[], bytes | None], tell: Callable[[bytes | None, str], None]) -> None:
    """Run a function that may wait for a device for ever, and report its result or its failure to the loop."""
    loop = asyncio.get_running_loop()

    def act() -> None:
        result, why = None, ""
        try:
            result = work()
        except (OSError, ValueError) as error:
            why = str(error)
        try:
            loop.call_soon_threadsafe(tell, result, why)
        except RuntimeError:  # the loop is closed: no task waits for the result
            return

    try:
        threading.Thread(target=act, name="record of generations", daemon=True).start()
    except RuntimeError as error:  # a limit of processes is reached
        loop.call_soon(tell, None, str(error))


def _replace(path: Path, data: bytes) -> None:
    new = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(new, flags, _MODE), "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _content(path: Path) -> bytes | None:
    """The file's content; None if there is no file."""
    try:
        # If a pipe has the file's name, the thread must not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is no file of this user's")
        data = file.read(RECORD_BYTES_MAX + 1)
    if len(data) > RECORD_BYTES_MAX:
        raise ValueError(f"it has more than {RECORD_BYTES_MAX} bytes")
    return data
