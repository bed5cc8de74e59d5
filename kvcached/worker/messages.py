"""What a worker and the daemon say to each other, over a connection of SOCK_SEQPACKET that the worker inherits.

::

    daemon → WorkerConfig + the memory of the shard's pool, its progress page, the eventfds of the page's entries, and
             the host pool's memory, if there is one
                                             worker → Ready
    daemon → Request …                       worker → one Done for each, as each is over

Sequence numbers of requests grow by one, from one; reports come in another order where one request overtakes another.
A request that failed is done, too: its report says why. Only a request that cannot be decoded has no report: the worker
ends, and the daemon sees that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Final

import msgspec

from kvcached.core.messages import Span
from kvcached.core.slots.ranges import decode_ranges, encode_ranges
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import PoolGeometry
from kvcached_client.types import PROGRESS_SLOTS

#: Configurations are a few KiB (a strip per layer), and copies at most 32 bytes a block. The kernel's default buffer of
#: 208 KiB takes one message of this size at a time.
MESSAGE_SIZE_BYTES_MAX: Final = 128 * 1024
#: Enough to keep a worker busy while the daemon thinks; more would only be a longer queue.
REQUESTS_IN_FLIGHT_MAX: Final = 64
#: An error text beyond this is cut.
ERROR_SIZE_CHARS_MAX: Final = 1000
#: Corrupt blocks beyond these are not named: from the first on none was copied anyway.
CORRUPT_BLOCKS_MAX: Final = 1024
#: A report with the longest text, four bytes a character, or with the most corrupt blocks, five bytes each.
REPLY_SIZE_BYTES_MAX: Final = 8 * 1024

#: The pool's memory, the progress page, an eventfd for each of its entries, the host pool's memory.
DESCRIPTORS_MAX: Final = 3 + PROGRESS_SLOTS

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
_Entry = Annotated[int, msgspec.Meta(ge=0, lt=PROGRESS_SLOTS)]
_Name = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a worker is told at its start.

    Attributes:
        replica, shard: whose pool it maps; for its log and its errors.
        device: UUID of the CUDA device that has the pool; empty where it is memory of this machine.
        geometry: where a slot's bytes are.
        pretouch_bytes: how much of the pool to make resident before it is ready.
        host: where a host slot's bytes are in the memory that comes along; None where there is no host pool.
        namespace: first 16 bytes of the namespace, for the headers of stored blocks.
        fingerprint: the layout's, 16 bytes, for the same.
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
    """Everything is mapped, and requests may come."""


class Done(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="done"):
    """A request is over: carried out, or failed with an error text. Nothing of it goes on after this."""

    sequence: _Count
    error: str = ""
    corrupt: tuple[_Count, ...] = ()  #: of a load: blocks, counted through its spans, that are not what was stored


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="store"):
    """Copy blocks from the device pool into the host pool: invalidate the headers, copy, write checksum and header."""

    transfer: _Count
    epoch: _Count  #: of the daemon; with `transfer` it orders headers by age
    generation: _Count
    spans: tuple[Span, ...]
    urgent: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="load"):
    """Copy blocks from the host pool into the device pool, layer by layer, after their headers were checked.

    Progress goes to entry `progress` of the progress page. Blocks from the first on that is not what it should be are
    not copied, and the report names those that are not.
    """

    transfer: _Count
    generation: _Count
    spans: tuple[Span, ...]
    progress: _Entry
    verify: bool  #: compare checksums; keys are compared always


class Hurry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="hurry"):
    """Somebody waits for that transfer now: before other stores with it. Carried out at once, not in its turn."""

    transfer: _Count


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="probe"):
    """Prove that copies arrive: write a pattern into a slot, copy it to another, compare. Both are zero afterwards."""

    source: _Count
    target: _Count
    seed: _Count


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="shutdown"):
    """End after the requests before this one."""


Work = Store | Load | Hurry | Probe | Shutdown


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One piece of work. Its report carries the same sequence number."""

    sequence: _Count
    work: Work


Report = Ready | Done

encode = msgspec.msgpack.Encoder(enc_hook=encode_ranges).encode
#: Each raises msgspec.DecodeError (msgspec.ValidationError is one) on anything else.
decode_config: Callable[[bytes], WorkerConfig] = msgspec.msgpack.Decoder(WorkerConfig).decode
decode_request: Callable[[bytes], Request] = msgspec.msgpack.Decoder(Request, dec_hook=decode_ranges).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode
