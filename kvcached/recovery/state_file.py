"""What a daemon writes down for its successor: a file in the run directory, JSON, small and rarely changed.

It is written before the reply or order whose effect it describes, so that a daemon that is killed at any moment leaves
a ledger that is not behind what others were told. It has to outlive processes, not the machine: a ledger of another
boot is not used. What blocks there are it does not say; their headers do (`kvcached.recovery.scan`).
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import stat
import struct
import weakref
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvcached.memory.host_pool import MemoryIdentity
from kvcached.process.identity import ProcessIdentity
from kvcached_client.failpoints import failpoint
from kvcached_client.types import WritePolicy

FORMAT: Final = 3
#: In the run directory.
LEDGER_NAME: Final = "ledger.json"
#: Of the file. A ledger has a few hundred bytes for each session and about six for each slab.
LEDGER_BYTES_MAX: Final = 64 << 20

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MODE: Final = 0o600
#: How a ledger begins: its checksum in hex digits, as the first member.
_SEAL_START, _SEAL_END = b'{"checksum":"', b'",'
_SEAL: Final = struct.Struct(f"{len(_SEAL_START)}s32s{len(_SEAL_END)}s")

_log: Final = logging.getLogger(__name__)

#: Bytes as hex digits: ``value.hex()``, and back with ``bytes.fromhex``.
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$", max_length=1024)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]
#: It is part of file names; longer than any that a configuration may have.
ReplicaName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class HostPoolRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool's memory: which memfd it is, and how it is cut.

    Attributes:
        allocated: slabs of each namespace, by its root in hex. A slab is in one list at most; a slab in none is free.
    """

    device: Count
    inode: Count
    slabs: Positive
    slab_bytes: Positive
    allocated: dict[Hex, tuple[Count, ...]]

    def __post_init__(self) -> None:
        """Refuse slabs that do not exist or are allocated twice: a bug when written, damage when read."""
        slabs = [slab for each in self.allocated.values() for slab in each]
        if len(set(slabs)) < len(slabs) or any(slab >= self.slabs for slab in slabs):
            raise ValueError(f"a slab is allocated twice, or is not one of {self.slabs}")


class NamespaceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A namespace that engines in offload mode have declared.

    Attributes:
        root: 32 bytes as hex; `HostPoolRecord.allocated` names it so.
        fingerprint: of the layout, as headers have it.
        block_bytes: size of a block on one shard.
        replicated: every shard holds the same bytes.
        write_policy, configured_policy: the present one, and that of the configuration then: one that was set holds as
            long as the configuration does not change.
    """

    root: Hex
    label: str
    fingerprint: Hex
    block_size: Positive
    shards: Positive
    block_bytes: Positive
    slots_per_slab: Count
    generation: Count
    replicated: bool = False
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    configured_policy: WritePolicy = WritePolicy.WRITE_THROUGH


class ReplicaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A configured replica, as it was served.

    Attributes:
        fingerprint: of its layout.
        namespace: root of its blocks' names, in its present generation.
        memory: of its shards, in their order; empty where it cannot be taken over. Memory of a CUDA device is known by
            the headers that were made with it.
        headers: of its slots; None where they cannot.
        cuda_ordinals: CUDA devices that were configured; none on a CPU.
        cuda_devices: their UUIDs.
        write_policy, configured_policy: as of `NamespaceRecord`.
    """

    name: ReplicaName
    fingerprint: Hex
    namespace: Hex
    generation: Count
    weights_version: str
    slots: Positive
    memory: tuple[MemoryIdentity, ...] = ()
    headers: MemoryIdentity | None = None
    cuda_ordinals: tuple[Count, ...] = ()
    cuda_devices: tuple[str, ...] = ()
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    configured_policy: WritePolicy = WritePolicy.WRITE_THROUGH


class MemberRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process of a session, which may write the session's slots as long as it lives.

    Attributes:
        process: None where it is not visible from here, in a pid namespace of its own: nobody can see it die.
        shard: which of them it is; None is the scheduler.
    """

    process: ProcessIdentity | None
    shard: Count | None = None


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One engine group.

    Attributes:
        epoch: of the daemon that opened it; ids count from the start of a daemon.
        mode: on a replica's device pool, or attached.
        place: the replica's name, or the root of the namespace in hex.
        instance: in offload mode, what the engine calls itself in every hello.
        token_digest: sha256 of the session's token; who shows that token after a restart is its engine.
        is_over: it has expired, or has lost a member; its processes may still write.
    """

    id: Count
    epoch: Count
    mode: Literal["device", "offload"]
    place: str
    instance: Hex = ""
    token_digest: Hex = ""
    members: tuple[MemberRecord, ...] = ()
    is_over: bool = False


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All of it.

    Attributes:
        format: of this file.
        boot: which boot of the machine it is of.
        epoch: of the daemon that wrote it.
        host: None without a host tier.
    """

    format: Literal[3] = FORMAT
    boot: str
    epoch: Count
    host: HostPoolRecord | None = None
    namespaces: tuple[NamespaceRecord, ...] = ()
    replicas: tuple[ReplicaRecord, ...] = ()
    sessions: tuple[SessionRecord, ...] = ()


class _Head(msgspec.Struct):
    """What decides whether the rest is read."""

    format: int
    boot: str


class LedgerFile:
    """The file of one daemon, which no other one writes: the run directory's lock sees to that.

    It stays in the directory that was there at first, which somebody may remove: the next one is another daemon's.
    """

    def __init__(self, path: Path) -> None:
        self._name, self._new = path.name, f"{path.name}.new"
        self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)

    def write(self, ledger: Ledger) -> None:
        """Replace the ledger. Whoever is killed in between leaves the old one or the new one, whole.

        Raises:
            OSError: it could not be written; the old one is as it was.
        """
        data = sealed(msgspec.json.encode(ledger))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._new, flags, _MODE, dir_fd=self._directory), "wb") as file:
            file.write(data)
        failpoint("daemon.ledger.write")
        os.rename(self._new, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        failpoint("daemon.ledger.written")

    def remove(self) -> None:
        """There is nothing to hand on any more. Does nothing where there is no ledger."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self._name, dir_fd=self._directory)


def read_ledger(path: Path) -> Ledger | None:
    """The ledger of the daemon before this one, or None, with a log line that says why: then the start is cold."""
    try:
        data = _content(path)
        head = msgspec.json.decode(data, type=_Head)
        if head.format != FORMAT:
            _log.warning("%s not used: its format is %d, this daemon's is %d", path, head.format, FORMAT)
            return None
        if head.boot != boot_id():
            _log.info("%s not used: the machine has been booted since it was written", path)
            return None
        return msgspec.json.decode(_unsealed(data), type=Ledger)
    except FileNotFoundError:
        _log.info("no %s: nothing is taken over from an earlier daemon", path)
    except OSError as error:
        _log.warning("%s cannot be read and is not used: %s", path, error.strerror)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        _log.warning("%s is damaged and not used: %s", path, error)
    return None


def sealed(data: bytes) -> bytes:
    """A JSON object with a checksum of all the rest as its first member."""
    return _SEAL.pack(_SEAL_START, _checksum(data), _SEAL_END) + data[1:]


def _unsealed(data: bytes) -> bytes:
    """The object without its checksum.

    Raises:
        ValueError: it has none, or is not what was written: a field that still has its type says something else.
    """
    if len(data) < _SEAL.size:
        raise ValueError("it is too short")
    start, checksum, end = _SEAL.unpack_from(data)
    rest = b"{" + data[_SEAL.size :]
    if (start, end) != (_SEAL_START, _SEAL_END) or checksum != _checksum(rest):
        raise ValueError("it is not what its checksum says")
    return rest


def _checksum(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=16).hexdigest().encode()


def _content(path: Path) -> bytes:
    # A pipe in its place must not make the start wait.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is no file of this user's")
        data = file.read(LEDGER_BYTES_MAX + 1)
    if len(data) > LEDGER_BYTES_MAX:
        raise ValueError(f"more than {LEDGER_BYTES_MAX} bytes")
    return data


def boot_id() -> str:
    """What this boot of the machine is called."""
    return _BOOT_ID.read_text("ascii").strip()
