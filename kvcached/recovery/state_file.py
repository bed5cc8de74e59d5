"""The ledger that a daemon writes for the next one: a small JSON file in the run directory, which changes rarely.

The ledger is written before the reply or request whose effect it describes. A daemon that is killed at any moment thus
leaves a ledger that is not behind what engines and workers have received. The ledger has to survive processes, not a
reboot: a ledger of another boot is ignored. It does not list blocks; headers do that (`kvcached.recovery.scan`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import stat
import struct
import weakref
from itertools import chain
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec

from kvcached.memory.host_pool import MemoryIdentity
from kvcached.process.identity import ProcessIdentity
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.failpoints import failpoint
from kvcached_client.types import WritePolicy

FORMAT: Final = 3
#: The ledger's name in the run directory.
LEDGER_NAME: Final = "ledger.json"
#: Of the file that says which daemon has stopped in order. It is no field of the ledger, which older daemons read, too.
STOPPED_NAME: Final = "stopped"
#: The largest file. A ledger has a few hundred bytes for each session and about six for each slab.
LEDGER_BYTES_MAX: Final = 64 << 20

_BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")
_MODE: Final = 0o600
#: The beginning of a ledger: its checksum in hex digits is the first member.
_SEAL_START, _SEAL_END = b'{"checksum":"', b'",'
_SEAL: Final = struct.Struct(f"{len(_SEAL_START)}s32s{len(_SEAL_END)}s")

_log: Final = logging.getLogger(__name__)

#: Bytes as hex digits: ``value.hex()``, and back with ``bytes.fromhex``.
Hex: TypeAlias = Annotated[str, msgspec.Meta(pattern="^([0-9a-f]{2})*$", max_length=1024)]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Positive: TypeAlias = Annotated[int, msgspec.Meta(gt=0, le=(1 << 63) - 1)]
#: A replica's name, which is part of file names. No configured name is as long.
ReplicaName: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class HostPoolRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The host pool's memory: which memfd it is, and which slabs it has.

    Attributes:
        allocated: the slabs of each namespace, by its root in hex. A slab is in at most one list; others are free.
    """

    device: Count
    inode: Count
    slabs: Positive
    slab_bytes: Positive
    allocated: dict[Hex, tuple[Count, ...]]

    def __post_init__(self) -> None:
        """Refuse slabs that do not exist or are allocated twice: that is a bug when writing and damage when reading."""
        slabs = [slab for each in self.allocated.values() for slab in each]
        if len(set(slabs)) < len(slabs) or any(slab >= self.slabs for slab in slabs):
            raise ValueError(f"a slab is allocated twice, or is not one of {self.slabs}")


class NamespaceRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """A namespace that engines in offload mode have declared.

    Attributes:
        root: 32 bytes as hex; `HostPoolRecord.allocated` names it so.
        fingerprint: the layout's, as in headers.
        block_bytes: size of a block on one shard.
        replicated: every shard holds the same bytes.
        canonical, canonical_root: the layout in which storage may hold the blocks, and the root under which it then has
            them; None and empty if the engines have declared none.
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
    canonical: CanonicalLayout | None = None
    canonical_root: Hex = ""
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    configured_policy: WritePolicy = WritePolicy.WRITE_THROUGH


class ReplicaRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A replica as it was configured.

    Attributes:
        fingerprint: its layout's.
        namespace: the root of its keys in its present generation.
        memory: the memory of each shard; empty if it cannot be taken over. Memory of a CUDA device is identified by
            the headers that were made with it.
        headers: those of its slots; None if they cannot be taken over.
        cuda_ordinals: the configured CUDA device of each shard; empty on a CPU.
        cuda_devices: their UUIDs.
        write_policy, configured_policy: as of `NamespaceRecord`.
        asleep: its device pool has given its memory back, and gets none until it is woken.
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
    asleep: bool = False

    def difference(self, fingerprint: str, slots: int, shards: int, cuda_ordinals: tuple[int, ...]) -> str:
        """The first reason why its memory is not that of a configured replica, in words; "" where it is."""
        if len(self.memory) != shards:
            return f"it is of {len(self.memory)} shards, and the configuration asks for {shards}"
        if self.cuda_ordinals != cuda_ordinals:
            found, wanted = _place(self.cuda_ordinals), _place(cuda_ordinals)
            return f"it is on {found}, and the configuration asks for {wanted}"
        if self.slots != slots:
            return f"it has {self.slots} slots, and the configuration asks for {slots}"
        return "" if self.fingerprint == fingerprint else "its blocks have another layout than the configured one"


class MemberRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A process of a session, which may write the session's slots as long as it lives.

    Attributes:
        process: None if it is in another pid namespace, where the daemon cannot see its death.
        shard: its shard; None for the scheduler.
        instance: the id of its engine; written in a session of several engines only, so that at other times daemons
            that do not know this field read the ledger.
    """

    process: ProcessIdentity | None
    shard: Count | None = None
    instance: Hex | msgspec.UnsetType = msgspec.UNSET


class EarlierRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """By which a session's engine may know it instead.

    Attributes:
        id, epoch, token_digest: as of `SessionRecord`.
    """

    id: Count
    epoch: Count
    token_digest: Hex


class SessionRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The session of an engine group.

    Attributes:
        epoch: that of the daemon that opened it; each daemon numbers its sessions anew.
        mode: on a replica's device pool, or in offload mode.
        place: the replica's name, or the root of the namespace in hex.
        instance: in offload mode, the engine's id in every hello.
        token_digest: sha256 of the session's token. A process that presents the token after a restart is its engine.
        is_over: it has expired, or has lost a member; its processes may still write.
        resumed_as: by which name its engine has resumed it; written until the engine is known to have heard of the
            name above, so that at other times daemons that do not know this field read the ledger.
    """

    id: Count
    epoch: Count
    mode: Literal["device", "offload"]
    place: str
    instance: Hex = ""
    token_digest: Hex = ""
    members: tuple[MemberRecord, ...] = ()
    is_over: bool = False
    resumed_as: EarlierRecord | msgspec.UnsetType = msgspec.UNSET


class Ledger(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The content of the ledger.

    Attributes:
        format: the file's.
        boot: the boot of the machine in which it was written.
        epoch: that of the daemon that wrote it.
        pid_namespace: the inode of the namespace that its process ids belong to; 0 if it is unknown.
        layout: of storage, as it was configured; written if a namespace has a canonical root, so that daemons that know
            no such root read the ledger.
        shared: storage was one that daemons of several machines share; written if it was.
        host: the host pool; None without one.
    """

    format: Literal[3] = FORMAT
    boot: str
    epoch: Count
    pid_namespace: Count = 0
    layout: Literal["engine", "canonical"] | msgspec.UnsetType = msgspec.UNSET
    shared: Literal[1] | msgspec.UnsetType = msgspec.UNSET
    host: HostPoolRecord | None = None
    namespaces: tuple[NamespaceRecord, ...] = ()
    replicas: tuple[ReplicaRecord, ...] = ()
    sessions: tuple[SessionRecord, ...] = ()

    @property
    def cuda_numbers(self) -> dict[str, int]:
        """The number of each CUDA device that a replica has had, by UUID."""
        pairs = (zip(each.cuda_devices, each.cuda_ordinals, strict=False) for each in self.replicas)
        return dict(chain.from_iterable(pairs))


class _Head(msgspec.Struct):
    """The members that decide whether the rest is read."""

    format: int
    boot: str


class LedgerFile:
    """The ledger file of one daemon. The lock of the run directory keeps other daemons from writing it.

    The file stays in the directory that was opened at the start. If that directory is removed and made again, the new
    one may be another daemon's.
    """

    def __init__(self, path: Path) -> None:
        self._name, self._new = path.name, f"{path.name}.new"
        self._directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self._directory)

    def write(self, ledger: Ledger) -> None:
        """Replace the ledger. If the daemon is killed meanwhile, the file is the old ledger or the new one, and whole.

        Raises:
            OSError: it could not be written; the old ledger is unchanged.
        """
        data = sealed(msgspec.json.encode(ledger))
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(self._new, flags, _MODE, dir_fd=self._directory), "wb") as file:
            file.write(data)
        failpoint("daemon.ledger.write")
        os.rename(self._new, self._name, src_dir_fd=self._directory, dst_dir_fd=self._directory)
        failpoint("daemon.ledger.written")

    def note_stop(self, epoch: int) -> None:
        """Say that the daemon of an epoch stops in order, and misses no device.

        Raises:
            OSError: it could not be written.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with os.fdopen(os.open(STOPPED_NAME, flags, _MODE, dir_fd=self._directory), "wb") as file:
            file.write(f"{epoch}\n".encode())

    def remove(self) -> None:
        """Remove the ledger, or what is in it, because there is nothing to take over any more.

        Raises:
            OSError: neither was possible, as on a file system that may only be read by now.
        """
        try:
            os.unlink(self._name, dir_fd=self._directory)
        except FileNotFoundError:
            return
        except OSError:  # as in a directory that this user may not write any more: an empty ledger is none, too
            flags = os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
            os.close(os.open(self._name, flags, dir_fd=self._directory))


def read_ledger(path: Path) -> Ledger | None:
    """The ledger of the daemon before this one. None means a cold start, with the reason in the log."""
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


def _place(cuda_ordinals: tuple[int, ...]) -> str:
    return f"CUDA devices {', '.join(map(str, cuda_ordinals))}" if cuda_ordinals else "the CPU"


def has_stopped(run_dir: Path, ledger: Ledger) -> bool:
    """Whether the daemon that wrote a ledger has stopped in order, and missed no device."""
    try:
        return _content(run_dir / STOPPED_NAME) == f"{ledger.epoch}\n".encode()
    except FileNotFoundError:
        return False
    except (OSError, ValueError) as error:
        _log.warning("%s is not used: %s", run_dir / STOPPED_NAME, error)
        return False


def sealed(data: bytes) -> bytes:
    """A JSON object whose first member is a checksum of all other members."""
    return _SEAL.pack(_SEAL_START, _checksum(data), _SEAL_END) + data[1:]


def _unsealed(data: bytes) -> bytes:
    """The object without its checksum.

    Raises:
        ValueError: it has no checksum, or another one: damage may change a field's value without changing its type.
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
    # If a pipe has the ledger's name, the start must not wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise ValueError("it is no file of this user's")
        data = file.read(LEDGER_BYTES_MAX + 1)
    if len(data) > LEDGER_BYTES_MAX:
        raise ValueError(f"more than {LEDGER_BYTES_MAX} bytes")
    return data


def boot_id() -> str:
    """The id of this boot of the machine."""
    return _BOOT_ID.read_text("ascii").strip()
