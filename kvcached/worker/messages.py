"""What a worker and the daemon say to each other, over a connection of SOCK_SEQPACKET that the worker inherits.

::

    daemon → WorkerConfig + the memory of the shard's pool, its progress page, the eventfds of the page's entries, and
             the host pool's memory, if there is one
                                             worker → WorkerReady
    daemon → Command …                       worker → one Ack for each, as each is over

Sequence numbers of commands grow by one, from one; acks come in another order where one command overtakes another.
Failing is an answer, too: the ack then says why. Only a command that cannot be decoded has no ack: the worker ends, and
the daemon sees that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import PoolGeometry
from kvcached_client.types import PROGRESS_SLOTS

#: Configurations are a few KiB (a strip per layer), and copies at most 32 bytes a block. The kernel's default buffer of
#: 208 KiB takes one message of this size at a time.
MESSAGE_SIZE_BYTES_MAX: Final = 128 * 1024
#: Enough to keep a worker busy while the daemon thinks; more would only be a longer queue.
COMMANDS_IN_FLIGHT_MAX: Final = 64
#: An error text beyond this is cut.
ERROR_SIZE_CHARS_MAX: Final = 1000
#: Corrupt blocks beyond these are not named: from the first on none was copied anyway.
CORRUPT_BLOCKS_MAX: Final = 1024
#: An ack with the longest text, four bytes a character, or with the most corrupt blocks, five bytes each.
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
        device: where the pool is.
        geometry: where a slot's bytes are.
        pretouch_bytes: how much of the pool to make resident before it is ready.
        host: where a host slot's bytes are in the memory that comes along; None where there is no host pool.
        namespace: first 16 bytes of the namespace, for the headers of stored blocks.
        fingerprint: the layout's, 16 bytes, for the same.
    """

    replica: str
    shard: _Count
    device: Literal["cpu"]
    geometry: PoolGeometry
    pretouch_bytes: _Count
    host: HostGeometry | None
    namespace: _Name
    fingerprint: _Name


class WorkerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op"):
    """Root of what a worker sends."""


class WorkerReady(WorkerMessage, frozen=True, tag="ready"):
    """Everything is mapped, and commands may come."""


class Ack(WorkerMessage, frozen=True, tag="ack"):
    """A command is over: done, or failed with an error text. Nothing of it goes on after this."""

    sequence: _Count
    error: str = ""
    corrupt: tuple[_Count, ...] = ()  #: of a load: blocks, counted through its spans, that are not what was stored


class BlockSpan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Consecutive blocks of one chain. Ranges are packed int32 pairs (first, count) with as many slots as keys."""

    depth: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]  #: of the first block
    parent: bytes  #: key of the block before it; empty for the first of a chain
    keys: bytes  #: 16 bytes a block
    device: bytes
    host: bytes


class Store(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="store"):
    """Copy blocks from the device pool into the host pool: invalidate the headers, copy, write checksum and header."""

    transfer: _Count
    epoch: _Count  #: of the daemon; with `transfer` it orders headers by age
    generation: _Count
    spans: tuple[BlockSpan, ...]
    urgent: bool


class Load(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="load"):
    """Copy blocks from the host pool into the device pool, layer by layer, after their headers were checked.

    Progress goes to entry `progress` of the progress page. Blocks from the first on that is not what it should be are
    not copied, and the ack names those that are not.
    """

    transfer: _Count
    generation: _Count
    spans: tuple[BlockSpan, ...]
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
    """End after the commands before this one."""


Work = Store | Load | Hurry | Probe | Shutdown


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One order. Its ack carries the same sequence number."""

    sequence: _Count
    work: Work


encode = msgspec.msgpack.Encoder().encode
#: Each raises msgspec.DecodeError (msgspec.ValidationError is one) on anything else.
decode_config: Callable[[bytes], WorkerConfig] = msgspec.msgpack.Decoder(WorkerConfig).decode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_worker_message: Callable[[bytes], WorkerMessage] = msgspec.msgpack.Decoder(WorkerReady | Ack).decode


def unpack_slot_ranges(packed: bytes) -> list[tuple[int, int]]:
    """Packed ranges as (first, count).

    Raises:
        ValueError: the bytes are no whole pairs.
    """
    numbers = array("i")
    try:
        numbers.frombytes(packed)
        return list(zip(numbers[::2], numbers[1::2], strict=True))
    except ValueError:
        raise ValueError(f"slot ranges of {len(packed)} bytes are no pairs of int32") from None
