"""In which generation each namespace is: the record of it that outlives the machine, and what a start makes of it.

Storage finds blocks by namespace and generation, after the machine's restart, too. So the record, a file beside the
blocks that lasts as long as storage does, says which generation of each namespace is the present one, with which
weights, and which earlier ones storage has still to forget. Without it, or where it is damaged, namespaces begin
generations under which nothing was ever stored: what storage has is not found then, and nothing that was cleared comes
back.

Its device may hang. So it is written by a thread, and whoever waits for that does not stop the daemon.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol

import msgspec

from kvcached.config.replica import ReplicaConfig
from kvcached.core.namespaces import Edition
from kvcached.recovery.state_file import Count, Hex, Ledger, NamespaceRecord, ReplicaRecord
from kvcached_client.types import WritePolicy

#: In which headers in the host pool name a replica's namespace: that does not change with its generation.
FIRST_GENERATION: Final = 0
#: The generations of one life of the daemon begin with its epoch, a time in milliseconds, and so many random bits: two
#: lives do not share one even where the clock was set back. Together 53 bits until the year 2039: every JSON reader
#: takes such a number for what it is.
RANDOM_BITS: Final = 12
_EPOCH_MASK: Final = (1 << 50) - 1

FORMAT: Final = 1
#: Of the file: 1024 editions with the longest version of weights, and as many generations to forget.
RECORD_BYTES_MAX: Final = 4 << 20
#: A start that cannot read the record by then goes on without it.
READ_DEADLINE_S: Final = 10.0

_MODE: Final = 0o600

_log: Final = logging.getLogger(__name__)


class Generation(NamedTuple):
    """Of a replica's namespace.

    Attributes:
        number: another one after each clear.
        weights_version: as it was set; "" = what the configuration says.
        namespace: root of its keys, 32 bytes.
    """

    number: int
    weights_version: str
    namespace: bytes


def first_of(epoch: int, chance: int) -> int:
    """The first generation that may begin in the life of the daemon of this epoch: no earlier life has used it.

    Args:
        epoch: of its start.
        chance: `RANDOM_BITS` random bits.
    """
    return (epoch & _EPOCH_MASK) << RANDOM_BITS | chance


def editions_of(record: Record | None, ledger: Ledger | None) -> dict[bytes, Edition]:
    """What was written down of namespaces, by root.

    Of two that contradict each other the later one holds, which is the larger one: a clear may have reached only one of
    the two files.
    """
    found: dict[bytes, Edition] = {}
    for each in () if record is None else record.editions:
        found[bytes.fromhex(each.namespace)] = Edition(each.generation, each.weights_version)
    if ledger is not None:
        told = {bytes.fromhex(each.root): Edition(each.generation) for each in ledger.namespaces}
        for replica in ledger.replicas:
            told[bytes.fromhex(replica.namespace)] = Edition(replica.generation, replica.weights_version)
        for root, edition in told.items():
            if root not in found or found[root].generation < edition.generation:
                found[root] = edition
    return found


def generation_of(replica: ReplicaConfig, editions: Mapping[bytes, Edition], first: int) -> Generation:
    """The latest one that was written down of what is configured; `first` where there is none.

    It may have been written down for another replica that shares the namespace. Where model, revision or layout are
    others now, the namespace is another one, too.
    """
    latest: Generation | None = None
    for root, (number, weights_version) in editions.items():
        namespace = replica.namespace(number, weights_version)
        if namespace == root and (latest is None or number > latest.number):
            latest = Generation(number, weights_version, namespace)
    return latest or Generation(first, "", replica.namespace(first))


def write_policy_of(replica: ReplicaConfig, generation: Generation, ledger: Ledger | None) -> WritePolicy:
    """The one that was set for a replica's namespace; where none was, or the configuration changed, the latter's."""
    configured = WritePolicy(replica.write_policy)
    for record in () if ledger is None else ledger.replicas:
        if record.namespace == generation.namespace.hex():
            return recorded_policy(record, configured)
    return configured


def recorded_policy(record: ReplicaRecord | NamespaceRecord, configured: WritePolicy) -> WritePolicy:
    """The write policy of a record, unless another one is configured now than was then."""
    return record.write_policy if record.configured_policy is configured else configured


class EditionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A namespace, by the root of its keys in hex, and what it holds at present."""

    namespace: Hex
    generation: Count
    weights_version: str = ""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it.

    Attributes:
        format: of this file.
        editions: of namespaces, those that were not used for longest first.
        forgets: how the keys in storage begin that are to be forgotten, in hex.
    """

    format: Literal[1] = FORMAT
    editions: tuple[EditionRecord, ...] = ()
    forgets: tuple[Hex, ...] = ()


class RecordWriter(Protocol):
    """Where the record is kept."""

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """Replace the record, and say later, in the caller's thread, why that failed; "" = it is on the device."""


class RecordFile:
    """The record as a file. Nobody else writes it: the storage process has locked the directory."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """Replace it. Whoever dies in between leaves the old one or the new one, whole."""
        data = msgspec.json.encode(record)
        _in_thread(lambda: _replace(self._path, data), lambda _, why: done(why))


async def read_record(path: Path) -> Record | None:
    """The record of earlier lives, or None, with a log line that says why."""
    read: asyncio.Future[tuple[bytes | None, str]] = asyncio.get_running_loop().create_future()

    def tell(data: bytes | None, why: str) -> None:
        if not read.done():
            read.set_result((data, why))

    _in_thread(lambda: _content(path), tell)
    try:
        async with asyncio.timeout(READ_DEADLINE_S):
            data, why = await read
    except TimeoutError:
        data, why = None, f"its device has not answered for {READ_DEADLINE_S:g} s"
    if data is not None:
        try:
            return msgspec.json.decode(data, type=Record)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            why = f"it is damaged: {error}"
    if why:
        _log.warning("%s not used, so that nothing is found that was stored before: %s", path, why)
    return None


def _in_thread(work: Callable[[], bytes | None], tell: Callable[[bytes | None, str], None]) -> None:
    """Do what may wait for a device for ever, and tell the loop what came of it: the result, or why there is none."""
    loop = asyncio.get_running_loop()

    def act() -> None:
        result, why = None, ""
        try:
            result = work()
        except (OSError, ValueError) as error:
            why = str(error)
        try:
            loop.call_soon_threadsafe(tell, result, why)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=act, name="record of generations", daemon=True).start()


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
    """What the file holds; None where there is none."""
    try:
        # A pipe in its place must not make the thread wait for a writer.
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
