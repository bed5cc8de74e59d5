"""The messages between a worker and the daemon, over a SOCK_SEQPACKET connection that the worker inherits.

::

    daemon → WorkerConfig + the memory of the shard's pool, its progress page, the eventfds of the page's entries, and
             the host pool's memory, if there is one
                                             worker → Ready
                                             worker → HostRegistered, some times, where the pool is on a CUDA device
    daemon → Request …                       worker → one Done for each, as each is over

Requests are numbered from one. Reports may come in another order, because a request can overtake another. A request
that failed is reported too, with the reason. Only a request that cannot be decoded has no report: the worker ends, and
the daemon sees its end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from kvcached.core.messages import Span, StartTransfer, TransferKind
from kvcached.core.slots.ranges import decode_ranges, encode_ranges
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import PoolGeometry
from kvcached_client.types import PROGRESS_SLOTS, Verify

#: Configurations are a few KiB (a strip per layer), and copies at most 32 bytes a block. The kernel's default buffer of
#: 208 KiB takes one message of this size at a time.
MESSAGE_SIZE_BYTES_MAX: Final = 128 * 1024
#: Enough to keep a worker busy until the daemon sends more; a larger number would only make the queue longer.
REQUESTS_IN_FLIGHT_MAX: Final = 64
#: Longer error texts are cut.
ERROR_SIZE_CHARS_MAX: Final = 1000
#: Further corrupt blocks are not named: no block from the first corrupt one on was copied.
CORRUPT_BLOCKS_MAX: Final = 1024
#: A report with the longest text, four bytes a character, or with the most corrupt blocks, five bytes each.
REPLY_SIZE_BYTES_MAX: Final = 8 * 1024

#: The pool's memory, the progress page, an eventfd for each of its entries, the host pool's memory.
DESCRIPTORS_MAX: Final = 3 + PROGRESS_SLOTS

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Entry = Annotated[int, msgspec.Meta(ge=0, lt=PROGRESS_SLOTS)]
_Name = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The configuration that a worker gets at its start.

    Attributes:
        replica, shard: whose pool it maps; used in its log and its errors.
        device: UUID of the CUDA device that has the pool; empty if the pool is in CPU memory.
        geometry: how slots lie in the pool.
        pretouch_bytes: how much of the pool to make resident before the worker is ready.
        host: how slots lie in the host pool's memory, which comes with the message; None without a host pool.
        namespace: the first 16 bytes of the namespace, for the headers of stored blocks.
        fingerprint: the layout's, 16 bytes, also for these headers.
    """

    replica: str
    shard: _Count
    device: str = ""
    geometry: PoolGeometry
    pretouch_bytes: _Count
    host: HostGeometry | None
    namespace: _Name
    fingerprint: _Name


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="ready"):
    """The worker has mapped all memory and takes requests."""


class HostRegistered(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="host"):
    """How much of the host pool the shard's device reaches by now. Sent as it grows, and when it grows no more."""

    registered_bytes: _Count
    size_bytes: _Count  #: of what the shard copies, which is all that will be registered
    error: str = ""  #: why no more will be


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="done"):
    """A request has ended: it was carried out, or has failed with an error text. The worker no longer works on it."""

    sequence: _Count
    error: str = ""
    corrupt: tuple[_Count, ...] = ()  #: of a load: the corrupt blocks, as positions counted through its spans


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="store"):
    """Copy blocks from the device pool into the host pool: invalidate the headers, copy, write checksum and header."""

    transfer: _Count
    epoch: _Count  #: the daemon's; with `transfer` it orders headers by age
    generation: _Count
    spans: tuple[Span, ...]
    urgent: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="load"):
    """Copy blocks from the host pool into the device pool, layer by layer, after their headers were checked.

    Progress goes to entry `progress` of the progress page. No block from the first corrupt one on is copied, and the
    report names the corrupt blocks.
    """

    transfer: _Count
    generation: _Count
    spans: tuple[Span, ...]
    progress: _Entry
    verify: bool  #: compare checksums; keys are compared always
    trusted_epoch: _Count | None = None  #: blocks that were stored in this epoch are not compared


class Hurry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="hurry"):
    """Carry out a transfer before other stores, because an engine waits for it. Handled at once, not in the queue."""

    transfer: _Count


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="probe"):
    """Prove that copies arrive: write a pattern into a slot, copy it to another, compare. Both are zero afterwards."""

    source: _Count
    target: _Count
    seed: _Count


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="shutdown"):
    """Exit after all earlier requests."""


Work = Store | Load | Hurry | Probe | Shutdown


def copy_of(transfer: StartTransfer, *, epoch: int, generation: int, verify: Verify) -> Store | Load:
    """What the workers of a replica are told of a copy.

    Args:
        transfer: as the core has decided it.
        epoch: of the daemon.
        generation: of the replica's namespace.
        verify: which loaded blocks are compared with their checksums.
    """
    if transfer.kind is TransferKind.STORE:
        return Store(
            transfer=transfer.transfer,
            epoch=epoch,
            generation=generation,
            spans=transfer.spans,
            urgent=transfer.urgent,
        )
    return Load(
        transfer=transfer.transfer,
        generation=generation,
        spans=transfer.spans,
        progress=transfer.progress,
        verify=verify is not Verify.NEVER,
        trusted_epoch=verify.trusted_epoch(epoch),
    )


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request. Its report carries the same sequence number."""

    sequence: _Count
    work: Work


Report = Ready | HostRegistered | Done

encode = msgspec.msgpack.Encoder(enc_hook=encode_ranges).encode
#: Each raises msgspec.DecodeError (msgspec.ValidationError is one) on anything else.
decode_config: Callable[[bytes], WorkerConfig] = msgspec.msgpack.Decoder(WorkerConfig).decode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request, dec_hook=decode_ranges).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
