"""What a worker and the daemon say to each other, over two connections of SOCK_SEQPACKET.

::

    inherited    daemon → WorkerConfig       worker → WorkerListening, then closed
    its socket   worker → WorkerReady + the pool's memfd
                 daemon → Command …          worker → one Ack for each, in order

Sequence numbers of commands grow by one. Failing is an answer, too: the ack then says why. Only a command that cannot
be decoded has no ack: the worker ends, and the daemon sees that.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Final, Literal

import msgspec

from kvcached.worker.geometry import PoolGeometry

#: Configurations are a few KiB (a strip per layer), and copies 16 bytes per pair of ranges. The kernel's default
#: buffer of 208 KiB takes one message of this size at a time.
MESSAGE_SIZE_BYTES_MAX: Final = 128 * 1024
#: Enough to keep a worker busy while the daemon thinks; more would only be a longer queue.
COMMANDS_IN_FLIGHT_MAX: Final = 64
#: An error text beyond this is cut.
ERROR_SIZE_CHARS_MAX: Final = 1000
#: An ack with the longest text, four bytes a character.
REPLY_SIZE_BYTES_MAX: Final = 8 * 1024

_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class WorkerConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """All that a worker is told at its start.

    Attributes:
        replica, shard: whose pool it holds; for its log and its errors.
        device: where the pool is.
        geometry: where a slot's bytes are.
        socket_path: where it listens.
        pretouch_bytes: how much of the pool to make resident before it is ready.
        daemon_pidfd: number of an inherited descriptor that turns readable when the daemon is gone.
    """

    replica: str
    shard: _Count
    device: Literal["cpu"]
    geometry: PoolGeometry
    socket_path: str
    pretouch_bytes: _Count
    daemon_pidfd: _Count


class WorkerMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op"):
    """Root of what a worker sends."""


class WorkerListening(WorkerMessage, frozen=True, tag="listening"):
    """The pool is there, and the daemon may connect."""


class WorkerReady(WorkerMessage, frozen=True, tag="ready"):
    """First message on the worker's socket. Ancillary data: the pool's sealed memory."""


class Ack(WorkerMessage, frozen=True, tag="ack"):
    """A command is over: done, or failed with an error text. Nothing of it goes on after this."""

    sequence: _Count
    error: str = ""


class Copy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="copy"):
    """Copy blocks slot by slot. Ranges are packed int32 pairs (first, count) with equal totals on both sides.

    No target may be a source, or be named twice.
    """

    sources: bytes
    targets: bytes


class Probe(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="probe"):
    """Prove that copies arrive: write a pattern into a slot, copy it to another, compare. Both are zero afterwards."""

    source: _Count
    target: _Count
    seed: _Count


class Shutdown(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="op", tag="shutdown"):
    """End after the commands before this one."""


Work = Copy | Probe | Shutdown


class Command(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One order. Its ack carries the same sequence number."""

    sequence: _Count
    work: Work


encode = msgspec.msgpack.Encoder().encode
#: Each raises msgspec.DecodeError (msgspec.ValidationError is one) on anything else.
decode_config: Callable[[bytes], WorkerConfig] = msgspec.msgpack.Decoder(WorkerConfig).decode
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_worker_message: Callable[[bytes], WorkerMessage] = msgspec.msgpack.Decoder(
    WorkerListening | WorkerReady | Ack
).decode


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
