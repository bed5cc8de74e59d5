"""The daemon's end of a worker's socket."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack
from typing import Final

from kvcached.packet_connection import PacketConnection
from kvcached.seqpacket import Packet, receive
from kvcached.worker.messages import REPLY_SIZE_BYTES_MAX, WorkerMessage, decode_worker_message
from kvcached_client.protocol import PROGRESS_SLOTS

#: What `WorkerReady` brings: the pool's memory, the progress page, and an eventfd for each entry of it.
READY_DESCRIPTORS: Final = 2 + PROGRESS_SLOTS


def worker_connection(connection: socket.socket) -> PacketConnection[WorkerMessage]:
    """The daemon's end of a connected, non-blocking socket of a worker."""
    return PacketConnection(connection, decode_worker_message, REPLY_SIZE_BYTES_MAX)


async def next_message(connection: socket.socket) -> tuple[WorkerMessage, tuple[int, ...]] | None:
    """The next message with the descriptors that came along, now the caller's; None where the worker closed.

    Raises:
        ValueError: it cannot be decoded, or more came than can be meant.
    """
    packet = await _next_packet(connection)
    if packet is None:
        return None
    with ExitStack() as unwanted:
        unwanted.callback(packet.close)
        if packet.cut:
            raise ValueError(f"it sent more than {REPLY_SIZE_BYTES_MAX} bytes or {READY_DESCRIPTORS} descriptors")
        message = decode_worker_message(packet.data)  # msgspec.DecodeError is a ValueError
        unwanted.pop_all()
    return message, tuple(packet.descriptors)


async def _next_packet(connection: socket.socket) -> Packet | None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection.fileno(), _set, readable)
    try:
        await readable
    finally:
        loop.remove_reader(connection.fileno())
    try:
        return receive(connection, REPLY_SIZE_BYTES_MAX, READY_DESCRIPTORS)
    except ConnectionError:
        return None


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
