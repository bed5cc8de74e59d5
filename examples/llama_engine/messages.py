"""What scheduler and shards say to each other, and the pipe they say it through.

A socket pair carries length-prefixed MessagePack. The scheduler sends `Setup`, the shard answers `Ready`; then every
`Step` is answered by one `StepDone`, every `Remap` by another `Ready`. End of file is the only goodbye: whichever side
sees it, the other is gone.

In offload mode a shard has a second pipe, to its copy thread: `JoinSession` is not answered, and every `CopyOrder` by
one `CopyDone`.
"""

from __future__ import annotations

import socket
import struct
from typing import Final

import msgspec

from kvcached_client.blocks.layout import Layout
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant

#: One step's logits of 16 requests over a vocabulary of 128k take 8 MiB.
MESSAGE_SIZE_BYTES_MAX: Final = 64 << 20
_LENGTH: Final = struct.Struct("<I")


class OwnBlocks(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Memory that the shard makes itself."""

    layout: Layout
    blocks: int


class Setup(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="setup"):
    """Everything a shard process needs; its first message."""

    model_dir: str
    seed: int
    shard: int
    shards: int
    session: SessionGrant | None = None  #: lets it map its part of the daemon's pool …
    own: OwnBlocks | None = None  #: … or, in attached mode, blocks of its own
    device: str = "cpu"  #: where it computes: "cpu" or "cuda"
    cuda_graphs: bool = False  #: decode steps are replayed as graphs
    rendezvous: str  #: a file that the shards find each other by


class StepItem(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One request's rows in a step. A shard keeps nothing of a request between steps."""

    tokens: bytes  #: int32: the rows to compute, at positions [start, start + rows)
    start: int
    block_table: bytes  #: int32: the slot of each block; covers [0, start + rows)
    sample: bool  #: choose the token that follows the last row
    logits: bool  #: return the logits it was chosen by
    loads: tuple[LoadTicket, ...] = ()  #: copies that still fill blocks before `start`; waited for layer by layer


class Step(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """Compute these rows together."""

    items: list[StepItem]


class Remap(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="remap"):
    """Map the same memory in this session, which goes on for an earlier one; answered by `Ready`."""

    session: SessionGrant


class Ready(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ready"):
    """The shard has its weights and its memory."""

    block_bytes: int = 0  #: of one block of its own; all shards say the same
    fingerprint: bytes = b""  #: of the order of bytes in it


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The greedy choice of one item with `sample`."""

    token: int
    logits: bytes = b""  #: float32 [vocab], if asked for


class StepDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step_done"):
    """K and V of all the step's rows are in this shard's memory."""

    samples: list[Sample] = []  #: from shard 0: one per item with `sample`, in their order
    unread: list[int] = []  #: items, by index, that had to go on without a load; their rows mean nothing


class JoinSession(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="join"):
    """What is copied from here on belongs to this session; an earlier one is over."""

    session: SessionGrant
    deadline_ms: int  #: of each word to the daemon


class CopyOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag="copy"):
    """Copy blocks into the daemon's host pool, or out of it."""

    id: int  #: the engine's; transfers are counted anew by a daemon that was started again
    is_store: bool
    job: bytes  #: a `BlockJob`


class CopyDone(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="copied"):
    """This shard is through with an order."""

    id: int
    bad: list[int]  #: of a load: its blocks, by index, that are not what was stored


Message = Setup | Step | Remap | Ready | StepDone | JoinSession | CopyOrder | CopyDone

_to_shard = msgspec.msgpack.Decoder(Setup | Step | Remap)
_from_shard = msgspec.msgpack.Decoder(Ready | StepDone)
_to_copier = msgspec.msgpack.Decoder(JoinSession | CopyOrder)
_from_copier = msgspec.msgpack.Decoder(CopyDone)


class ChannelClosed(Exception):
    """The process at the other end is gone."""


class Channel:
    """One end of the pipe. Blocking."""

    def __init__(self, endpoint: socket.socket) -> None:
        self._socket = endpoint

    def fileno(self) -> int:
        """For selectors."""
        return self._socket.fileno()

    def send(self, message: Message) -> None:
        """Send one message.

        Raises:
            ChannelClosed: the other end is gone.
        """
        data = msgspec.msgpack.encode(message)
        try:
            self._socket.sendall(_LENGTH.pack(len(data)) + data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ChannelClosed from error

    def receive_order(self) -> Setup | Step | Remap:
        """The scheduler's next message. Raises ChannelClosed."""
        order: Setup | Step | Remap = _to_shard.decode(self._receive())
        return order

    def receive_answer(self) -> Ready | StepDone:
        """The shard's next message. Raises ChannelClosed."""
        answer: Ready | StepDone = _from_shard.decode(self._receive())
        return answer

    def receive_copy_order(self) -> JoinSession | CopyOrder:
        """What the scheduler wants of the copy thread next. Raises ChannelClosed."""
        order: JoinSession | CopyOrder = _to_copier.decode(self._receive())
        return order

    def receive_copy_done(self) -> CopyDone:
        """The copy thread's next message. Raises ChannelClosed."""
        done: CopyDone = _from_copier.decode(self._receive())
        return done

    def close(self) -> None:
        """Tell the other end to stop, by end of file."""
        self._socket.close()

    def _receive(self) -> bytes:
        (length,) = _LENGTH.unpack(self._receive_exactly(_LENGTH.size))
        if length > MESSAGE_SIZE_BYTES_MAX:
            raise ValueError(f"message of {length} bytes, at most {MESSAGE_SIZE_BYTES_MAX}")
        return self._receive_exactly(length)

    def _receive_exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            try:
                part = self._socket.recv(size - len(data))
            except ConnectionResetError as error:
                raise ChannelClosed from error
            if not part:
                raise ChannelClosed
            data += part
        return bytes(data)
