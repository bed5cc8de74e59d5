"""What an engine's process and its copy process tell each other, over a stream of messages with their lengths."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Final, TypeVar

import msgspec

from kvcached_client.blocks.jobs import PackedJob
from kvcached_client.errors import DaemonUnreachable, DeviceError, ErrorCode, KvcachedError, request_error
from kvcached_client.protocol.attach import ClaimPool

M = TypeVar("M")

#: Exit status of a copy process whose device has failed.
DEVICE_FAILED: Final = 5

_LENGTH_BYTES: Final = 4
_READ_BYTES: Final = 1 << 18


class PackedLayer(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where the pages of a layer lie: in which part of the memory, and there; see `LayerPages`."""

    part: int
    offset: int
    page_bytes: int
    stride_bytes: int


class PoolClaim(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """How the process asks for memory of a CUDA device that the daemon keeps for its engine.

    Attributes:
        run_dir: the daemon's.
        question: for a process that copies.
    """

    run_dir: str
    question: ClaimPool


class OnDevice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """What an engine with memory on a CUDA device shares.

    Attributes:
        uuid: of the device.
        marks: descriptor of the page of marks, inherited.
        handles: CUDA IPC handles of allocations; each is a part of the memory.
        claim: of memory that the daemon keeps; it is the only part then.
    """

    uuid: str
    marks: int
    handles: tuple[bytes, ...]
    claim: PoolClaim | None = None


class Begin(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The first message to the process: whose pages it copies, and where they lie in the memory.

    Attributes:
        shard: index of the shard.
        descriptor: of the memory, inherited; -1 if all of it is shared by handles, or the daemon is asked for it.
        memory_bytes: size of the memory that the descriptor is of.
        device: None for memory of this machine.
        layers: of each layer.
        blocks: number of the engine's blocks.
        fingerprint: of the engine's pages.
        deadline_ms: as in `OffloadShard.join`.
    """

    shard: int
    descriptor: int
    memory_bytes: int
    device: OnDevice | None
    layers: tuple[PackedLayer, ...]
    blocks: int
    fingerprint: bytes
    deadline_ms: int


class Join(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The second message: the session to join, `SessionGrant.to_bytes()`, a secret."""

    grant: bytes


class Store(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the process: carry out stores, together, behind a mark; 0 for memory of this machine."""

    number: int
    jobs: tuple[PackedJob, ...]
    after: int


class Load(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """To the process: carry out a load. Else as `Store`."""

    number: int
    job: PackedJob
    after: int


class Ready(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the process: it has joined."""

    epoch: int


class NotReady(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """From the process: it could not join, and ends. A code comes from a `RequestError`.

    Attributes:
        is_of_device: it comes from a `DeviceError`.
    """

    code: ErrorCode | None
    message: str
    fix: str = ""
    is_of_device: bool = False

    def refusal(self) -> KvcachedError:
        """The error that it comes from."""
        if self.is_of_device:
            return DeviceError(self.message)
        if self.code is None:
            return DaemonUnreachable(self.message)
        return request_error(self.code, self.message, self.fix)


class Outcome(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """How an order has ended. The daemon was told; where that failed, `error` says so.

    Attributes:
        number: of the order, as `CopyProcess.store` and `load` returned it.
        bad: as `OffloadShard.load` returns them; empty for stores.
        error: why no block counts as copied; "" = the order was carried out.
        code, fix: of the error, if the daemon or the copy process has refused the order.
        is_of_device: the device has refused a part of the copy, and does others.
    """

    number: int
    bad: tuple[int, ...] = ()
    error: str = ""
    code: ErrorCode | None = None
    fix: str = ""
    is_of_device: bool = False


Order = Store | Load
Answer = Ready | NotReady | Outcome

encode: Final = msgspec.msgpack.Encoder().encode
decode_begin: Final = msgspec.msgpack.Decoder(Begin).decode
decode_join: Final = msgspec.msgpack.Decoder(Join).decode
decode_order: Final[msgspec.msgpack.Decoder[Order]] = msgspec.msgpack.Decoder(Order)
decode_answer: Final[msgspec.msgpack.Decoder[Answer]] = msgspec.msgpack.Decoder(Answer)


class MessageStream:
    """Messages over a connected stream socket, which it takes over."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._received = bytearray()

    def fileno(self) -> int:
        """The descriptor; readable when something has come, or the other process is gone."""
        return self._socket.fileno()

    def send(self, message: msgspec.Struct, timeout_s: float | None) -> None:
        """Send a message.

        Raises:
            OSError: the other process is gone, or has not taken the message in time (TimeoutError).
        """
        data = encode(message)
        self._socket.settimeout(timeout_s)
        # No SIGPIPE comes, which would kill a process that does not ignore it.
        self._socket.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data, socket.MSG_NOSIGNAL)

    def receive(self, timeout_s: float | None) -> Iterator[bytes]:
        """Read once; the messages that are whole now, perhaps none.

        Raises:
            EOFError: the other process is gone.
            BlockingIOError, TimeoutError: nothing has come in time.
        """
        self._socket.settimeout(timeout_s)
        try:
            data = self._socket.recv(_READ_BYTES)
        except ConnectionError:
            data = b""
        if not data:
            raise EOFError
        self._received += data
        return self._whole()

    def shut_down(self) -> None:
        """End the connection in both directions, though a forked child may have it, too. `receive` ends as well."""
        self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the descriptor of the connection."""
        self._socket.close()

    def _whole(self) -> Iterator[bytes]:
        at, received = 0, self._received
        messages: list[bytes] = []
        while len(received) - at >= _LENGTH_BYTES:
            start = at + _LENGTH_BYTES
            end = start + int.from_bytes(received[at:start], "little")
            if end > len(received):
                break
            messages.append(bytes(received[start:end]))
            at = end
        del received[:at]
        return iter(messages)
