"""What the daemon and the storage process say to each other, over an inherited connection of SOCK_SEQPACKET.

::

    daemon → StorageConfig + the host pool's memfd + memory for the record of generations
                                            storage process → Opened, or NotOpened, and it ends
    daemon → Query, Fetch, Backup, Delete, Ping …    storage process → one Done for each, in any order,
                                                     and Progress before that of a long one
    daemon → ReadRecord, WriteRecord                 the same; one at a time, for they share the memory

Sequence numbers pair them. The storage process touches the slots of a request until it has sent its `Done`, and no
longer. When the connection closes it ends at once.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

import msgspec

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import decode_ranges, encode_ranges
from kvcached.storage.backend import UNKNOWN_USAGE, Usage
from kvcached.storage.frame import StoredKind
from kvcached_client.blocks.host_layout import CanonicalLayout, HostGeometry

#: A question has at most 1024 keys of 16 bytes; everything else is smaller.
MESSAGE_SIZE_BYTES_MAX: Final = 64 * 1024
REPLY_SIZE_BYTES_MAX: Final = 8 * 1024
#: An error text beyond this is cut.
ERROR_SIZE_CHARS_MAX: Final = 500

#: How often a long request reports progress at most, in the time that one call of the backend may take.
PROGRESS_PER_TIMEOUT: Final = 8

_Name = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class StorageConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that the storage process is told at its start.

    Attributes:
        backend: name of the backend.
        settings: its own, as the configuration has them.
        local_disk: settings of the disk in front of it; None = there is none.
        key_file: path of the key that encrypts; empty = none.
        timeout_s: when a call of the backend has taken too long.
        host_bytes: size of the host pool, whose file is longer.
    """

    backend: str
    settings: dict[str, Any]
    local_disk: dict[str, Any] | None = None
    key_file: str
    timeout_s: float
    host_bytes: int


class BlockFormat(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Whose blocks a message is about, and where they lie in the host pool.

    Attributes:
        namespace: the first bytes of the keys' root, under which storage has them.
        header_namespace, header_generation: what the headers in the host pool say instead.
        fingerprint: of the layout.
        generation: of the namespace.
        geometry: of the host pool.
        canonical: the layout in which storage has them; None = as they are.
    """

    namespace: _Name
    header_namespace: _Name
    header_generation: _Count
    fingerprint: _Name
    generation: _Count
    geometry: HostGeometry
    canonical: CanonicalLayout | None = None

    def stored(self) -> StoredKind:
        """The same as storage tells it."""
        geometry, canonical = self.geometry, self.canonical
        if canonical is None:
            return StoredKind(self.namespace, self.fingerprint, self.generation, geometry.parts, geometry.block_bytes)
        part_bytes = geometry.parts * geometry.block_bytes // canonical.parts
        return StoredKind(self.namespace, canonical.fingerprint, self.generation, canonical.parts, part_bytes)


class Query(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="query"):
    """How many of the first of these blocks there are."""

    sequence: _Count
    format: BlockFormat
    keys: bytes


class Fetch(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="fetch"):
    """Read blocks into host slots; `epoch` and `transfer` go into their headers."""

    sequence: _Count
    format: BlockFormat
    span: Span
    epoch: _Count
    transfer: _Count


class Backup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="backup"):
    """Write the blocks in host slots, as far as storage lacks them."""

    sequence: _Count
    format: BlockFormat
    spans: tuple[Span, ...]


class Forget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="forget"):
    """Forget all blocks whose keys begin so; nothing = all there are."""

    sequence: _Count
    prefix: bytes


class Delete(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="delete"):
    """Delete the blocks with these keys, all of which begin with a prefix that is not among their bytes here."""

    sequence: _Count
    prefix: _Name
    keys: bytes


class Ping(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="ping"):
    """Ask the backend something small, to see whether it answers."""

    sequence: _Count


class ReadRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="read_record"):
    """Read the record of generations of a shared backend into its memory, if it is not of the version `known`."""

    sequence: _Count
    known: bytes


class WriteRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="write_record"):
    """Replace the record of version `after`, b"" for none, by the first bytes of the memory; read any other one."""

    sequence: _Count
    size_bytes: _Count
    after: bytes


class Opened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="opened"):
    """The backend is open.

    Attributes:
        is_shared: daemons of several machines use it, and it keeps their record of generations.
        usage: how full it is.
    """

    persistent: bool
    threads: int
    is_shared: bool = False
    usage: Usage = UNKNOWN_USAGE


class NotOpened(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="not_opened"):
    """The backend could not be opened, and the process ends.

    Attributes:
        reason: what it is, and what to do.
        is_misconfigured: its settings are wrong, or the service refuses them.
    """

    reason: str
    is_misconfigured: bool


class Progress(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="progress"):
    """A request of several calls of the backend gets on: a call has ended, and another one follows."""

    sequence: _Count


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="done"):
    """A request has been carried out as far as was possible.

    Attributes:
        count: of a query, blocks found; of a fetch, leading good blocks; of a backup, leading blocks that storage has;
            of `Forget` and `Delete`, blocks that were there, -1 if the backend deletes none; of a record, its bytes in
            the memory, 0 where it is of the known version, was written, or is not there.
        written: of a backup: blocks that were not there before; of `WriteRecord`, 1 if the record was replaced.
        version: of the record that is there now; empty if there is none. The error says if it is none of ours.
        wrong: of a fetch: blocks whose bytes were not those that were stored.
        failed: the backend failed, as opposed to not having something; the error says how. Of
            `Delete`, an error without a failure says why blocks may be there again later.
        trouble: what is wrong with the backend although it works; empty if nothing is.
        took_us: how long it took, from when it was begun.
        usage: how full the backend is.
    """

    sequence: _Count
    count: int = 0
    written: int = 0
    wrong: int = 0
    version: bytes = b""
    failed: bool = False
    error: str = ""
    trouble: str = ""
    took_us: int = 0
    usage: Usage = UNKNOWN_USAGE


RecordRequest = ReadRecord | WriteRecord
#: What others than the core ask for.
AskedRequest = Delete | RecordRequest
Request = Query | Fetch | Backup | Forget | Ping | AskedRequest
Report = Opened | NotOpened | Progress | Done

_encoder: Final = msgspec.msgpack.Encoder(enc_hook=encode_ranges)
_request_decoder: Final[msgspec.msgpack.Decoder[Request]] = msgspec.msgpack.Decoder(Request, dec_hook=decode_ranges)
_report_decoder: Final[msgspec.msgpack.Decoder[Report]] = msgspec.msgpack.Decoder(Report)
_config_decoder: Final = msgspec.msgpack.Decoder(StorageConfig)


def encode(message: Request | Report | StorageConfig) -> bytes:
    """A message as it is sent."""
    return _encoder.encode(message)


def decode_request(data: bytes) -> Request:
    """What the daemon says. Raises `msgspec.DecodeError`."""
    return _request_decoder.decode(data)


def decode_report(data: bytes) -> Report:
    """What the storage process says. Raises `msgspec.DecodeError`."""
    return _report_decoder.decode(data)


def decode_config(data: bytes) -> StorageConfig:
    """The first message. Raises `msgspec.DecodeError`."""
    return _config_decoder.decode(data)
