"""The RPC socket: a ROUTER drained on its edge-triggered descriptor.

ZeroMQ signals its descriptor once when messages begin to wait, not again while some still do. So every wake-up drains
until the socket would block, and after a send outside a drain the socket is looked at again, because a send may have
swallowed the signal.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Protocol

import zmq
import zmq.utils.monitor

from kvcached.rpc.codec import decode, refusal
from kvcached_client.errors import RequestError
from kvcached_client.protocol import FRAME_SIZE_BYTES_MAX, Header, Request, encode


class Answer(Protocol):
    """What the service answers with: a header and the frames that follow it."""

    @property
    def header(self) -> Header:
        """The reply."""

    @property
    def frames(self) -> tuple[bytes, ...]:
        """Its frames, in the verb's order."""


class Handler(Protocol):
    """Who serves requests."""

    def submit(self, peer: bytes, request: Request, frames: list[bytes], respond: Callable[[Answer], None]) -> None:
        """Serve one request; call `respond` once if it wants a reply, now or later."""

    def refused(self, error: RequestError) -> RequestError:
        """Take note of a message that was no request."""

    def count(self, what: str) -> None:
        """Take note of something that happened.

        ``dropped_replies``: the peer was gone or did not read. ``disconnects``: a connection ended, for any reason; a
        peer that breaks ZeroMQ's message limit is cut off, too.
        """


log = logging.getLogger(__name__)

#: Messages served before other descriptors (deaths, workers) get a turn.
DRAIN_BATCH_MAX = 256
#: Replies queued for one peer that does not read; beyond it they are dropped and counted.
SEND_QUEUE_LENGTH_MAX = 1024
#: Messages of one peer that wait in the socket; beyond it the peer's own sends block.
RECEIVE_QUEUE_LENGTH_MAX = 1024
#: For the last replies, which wait for nobody but this machine. A peer that does not read loses its own.
CLOSE_LINGER_MS = 200
#: A peer that opens a connection and says nothing.
HANDSHAKE_TIMEOUT_MS = 2000


class RpcServer:
    """Receives messages, decodes them, hands requests to the handler, encodes and sends what it answers.

    Attributes:
        endpoint: the ``ipc://`` address it is bound to.
    """

    def __init__(self, path: Path, handler: Handler) -> None:
        self.endpoint = f"ipc://{path}"
        self._path = path
        self._handler = handler
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        self._socket = self._context.socket(zmq.ROUTER)
        self._monitor: zmq.Socket[bytes] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind, owner-only, and serve from now on.

        Raises:
            OSError: the path cannot be bound.
        """
        socket = self._socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, FRAME_SIZE_BYTES_MAX)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE_LENGTH_MAX)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE_LENGTH_MAX)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_TIMEOUT_MS)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a reply to a peer that is gone is counted, not lost in silence
        socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())
        self._monitor = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._path.unlink(missing_ok=True)
        before = os.umask(0o077)
        try:
            socket.bind(self.endpoint)
        finally:
            os.umask(before)
        self._loop = loop
        loop.add_reader(_descriptor(socket), self._drain)
        loop.add_reader(_descriptor(self._monitor), self._drain_monitor)
        loop.call_soon(self._drain)
        loop.call_soon(self._drain_monitor)

    def serve_rest(self) -> None:
        """Serve what has been received, for there will be nobody to do it later."""
        for _ in range(RECEIVE_QUEUE_LENGTH_MAX // DRAIN_BATCH_MAX):
            self._drain()

    def close(self) -> None:
        """Stop serving and remove the socket. Replies that are on their way have a moment to leave."""
        if self._loop is not None and self._monitor is not None:
            self._loop.remove_reader(_descriptor(self._socket))
            self._loop.remove_reader(_descriptor(self._monitor))
            self._loop = None
            self._socket.disable_monitor()
        self._context.destroy(linger=CLOSE_LINGER_MS)
        self._path.unlink(missing_ok=True)

    def _drain(self) -> None:
        if self._loop is None:
            return
        receive = self._socket.recv_multipart
        self._draining = True
        try:
            for _ in range(DRAIN_BATCH_MAX):
                try:
                    peer, *parts = receive(zmq.NOBLOCK)
                except zmq.Again:
                    return
                self._serve_guarded(peer, parts)
        finally:
            self._draining = False
        self._loop.call_soon(self._drain)

    def _serve_guarded(self, peer: bytes, parts: list[bytes]) -> None:
        """Serve one message; a bug met on the way must not leave the messages behind it waiting for a signal."""
        try:
            self._serve(peer, parts)
        except Exception:
            log.exception("internal error around a message")
            self._handler.count("errors_internal")

    def _serve(self, peer: bytes, parts: list[bytes]) -> None:
        try:
            request, frames = decode(parts)
        except RequestError as error:
            self._handler.refused(error)
            self._send(peer, [encode(refusal(parts, error))])
            return
        self._handler.submit(peer, request, frames, partial(self._answer, peer))

    def _answer(self, peer: bytes, answer: Answer) -> None:
        self._send(peer, [encode(answer.header), *answer.frames])

    def _send(self, peer: bytes, parts: list[bytes]) -> None:
        if self._loop is None:
            return
        try:
            self._socket.send_multipart([peer, *parts], zmq.NOBLOCK)
        except zmq.Again:
            self._handler.count("dropped_replies")
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._handler.count("dropped_replies")
        if not self._draining:
            self._loop.call_soon(self._drain)

    def _drain_monitor(self) -> None:
        while self._loop is not None and self._monitor is not None:
            try:
                zmq.utils.monitor.recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._handler.count("disconnects")


def _descriptor(socket: zmq.Socket[bytes]) -> int:
    return int(socket.getsockopt(zmq.FD))
