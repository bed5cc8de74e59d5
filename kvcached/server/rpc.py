"""The RPC socket: a ROUTER without libzmq, so that every limit is applied before anything is kept.

One turn of a connection is one `recv` and a few messages; what else it has sent waits for its next turn, and processes
take turns. A connection whose peer does not read its replies is not read from.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import time
from collections import deque
from collections.abc import Hashable
from functools import partial
from pathlib import Path
from typing import Final

from kvcached.server.connection import Connection, Door
from kvcached.server.connections import Connections
from kvcached.server.decoding import decode, refusal
from kvcached.server.handler import Answer, Handler
from kvcached.server.held import HeldBytes
from kvcached.server.listener import Listener
from kvcached.server.pauses import CUT_OFF_BYTES, REFUSED_REQUEST_BYTES, Pauses, is_for_nothing
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol.engine import ErrorReply, encode
from kvcached_client.protocol.zmtp import Message

log = logging.getLogger(__name__)

#: Messages of one connection served before others get a turn.
MESSAGES_PER_TURN_MAX: Final = 16
#: No further one is begun in a turn after this time if somebody else has something to be served.
TURN_NS_MAX: Final = 50_000
#: Replies of a turn beyond this leave before its end.
REPLIES_BYTES_MAX: Final = 64 * 1024
#: Of one `recv`: most requests are whole in it.
RECEIVE_BYTES_MAX: Final = 64 * 1024
#: Connections of one user other than the daemon's own that get a turn at a time.
USER_TURNS_MAX: Final = 16
#: For the last replies, which wait for nobody but this machine. A peer that does not read loses its own.
CLOSE_LINGER_MS: Final = 200
#: Turns of each connection at the end; what a peer sends on and on is not waited for.
LAST_TURNS_MAX: Final = 64


class RpcServer:
    """Receives messages, decodes them, hands requests to the handler, encodes and sends what it answers.

    Lives in one event loop's thread and never waits, except at its `close`.

    Args:
        door: where peers connect.
        handler: who serves requests.

    Attributes:
        endpoint: the address it is bound to.
    """

    def __init__(self, door: Door, handler: Handler) -> None:
        self.endpoint = door.endpoint
        self._door = door
        self._handler = handler
        self._connections: Connections[Connection] = Connections(door.name, door.limits, self._close, door.access)
        self._listener: Listener[Connection] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        # Of all connections. A socket has an error once its peer has gone with replies unread. libuv, below the loop,
        # tells of such a socket once and then stops watching it: what is read then may not be its end yet.
        self._ready = select.epoll()
        self._watched: dict[int, Connection] = {}
        self._received = memoryview(bytearray(RECEIVE_BYTES_MAX))
        self._queues: dict[Hashable, deque[Connection]] = {}  #: that wait for their next turn, by owner
        self._rotation = 0  #: who is first of those that are ready
        self._held = HeldBytes()
        self._pauses = Pauses(self._on_pause)
        self._last_peer = 0
        self._in_turn: Connection | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Bind, for those who may connect, and serve from now on.

        Raises:
            OSError: the place cannot be bound.
        """
        door = self._door
        if isinstance(door.place, str):
            Path(door.place).unlink(missing_ok=True)
        self._listener = Listener(door.name, door.place, socket.SOCK_STREAM, self._connections, self._accept)
        self._loop = loop
        loop.add_reader(self._ready.fileno(), self._on_ready)

    def serve_rest(self) -> None:
        """Serve what has been received, for there will be nobody to do it later."""
        for connection in list(self._connections):
            for _ in range(LAST_TURNS_MAX):
                if not connection.is_open or connection.unsent or not self._take_turn(connection):
                    break

    def close(self) -> None:
        """Stop serving and remove the socket. Replies that are on their way have a moment to leave."""
        if self._loop is None or self._listener is None:
            self._ready.close()  # of a place that could not be bound
            return
        self._loop.remove_reader(self._ready.fileno())
        self._listener.close()
        self._pauses.close()
        self._linger()
        for connection in list(self._connections):
            self._close(connection)
        self._ready.close()
        self._loop = self._listener = None

    # --- connections come and go ------------------------------------------------------------------------------------

    def _accept(self, accepted: socket.socket) -> None:
        self._last_peer += 1
        connection = self._door.take_in(accepted, self._last_peer)
        self._connections.open(connection, connection.origin, connection.grants, connection.descriptor)
        self._send(connection, self._door.greeting)
        self._arrange(connection)

    def _admit(self, connection: Connection) -> None:
        if (identity := connection.introduced()) is not None:
            self._held.count(connection, 0)  # of its address
            connection.origin, connection.grants, connection.owner = identity
            self._connections.introduce(connection, identity.origin, identity.grants)
        try:
            self._connections.admit(connection)
        except RequestError as error:
            connection.refusal = error.with_traceback(None)  # which names frames that name the connection: a cycle

    def _close(self, connection: Connection) -> None:
        if not connection.is_open or self._loop is None:
            return
        if connection.replies:
            self._send_replies(connection)
            if not connection.is_open:  # too much was unsent
                return
        if connection.watched_events:
            self._watch(connection, 0)
        if connection.unsent:
            self._handler.count("dropped_replies")
        self._held.count(connection, 0)
        connection.close()
        self._connections.close(connection)
        if connection.reader.is_ready:
            self._handler.count("disconnects")

    # --- what comes in ----------------------------------------------------------------------------------------------

    def _take_turn(self, connection: Connection) -> int:
        """Receive once, or serve what was received before; a number of bytes, 0 where there was nothing."""
        if connection.reader.has_more:
            self._take(connection, b"")
            return 1
        try:
            size = connection.socket.recv_into(self._received)
        except BlockingIOError:
            return 0
        except OSError:
            size = 0
        if not size:
            self._close(connection)
            return 0
        self._take(connection, self._received[:size])
        return size

    def _take(self, connection: Connection, data: memoryview | bytes) -> None:
        reader, size, was_skipping = connection.reader, len(data), connection.reader.is_skipping
        end_ns = time.perf_counter_ns() + TURN_NS_MAX
        try:
            for _ in range(MESSAGES_PER_TURN_MAX):
                self._take_one(connection, data)
                self._in_turn, data = connection, b""  # the first reply has left: its peer works on it meanwhile
                is_over = not reader.has_more or connection.unsent or connection in self._pauses
                if is_over or (time.perf_counter_ns() >= end_ns and self._is_awaited(connection)):
                    break
        finally:
            self._in_turn = None
            if connection.replies:
                self._send_replies(connection)
        if was_skipping or reader.is_skipping:
            self._pauses.refuse(connection, size)
        if reader.violation is not None:
            self._cut_off(connection)
        self._arrange(connection)

    def _is_awaited(self, connection: Connection) -> bool:
        return bool(self._queues) or any(each != connection.descriptor for each, _ in self._ready.poll(0, 2))

    def _take_one(self, connection: Connection, data: memoryview | bytes) -> None:
        reader = connection.reader
        was_ready = reader.is_ready
        messages = reader.read(data, 1)
        if reader.commands:
            if reader.is_ready and not was_ready:
                self._admit(connection)
            self._reply(connection, b"".join(reader.commands))
            reader.commands.clear()
        for message in messages:
            self._serve_guarded(connection, message)

    def _cut_off(self, connection: Connection) -> None:
        fields = {"socket": self._door.name, "who": connection.origin.words, "reason": connection.reader.violation}
        self._connections.note_fault("violation", "%(socket)s: %(who)s is cut off: %(reason)s", fields)
        if counter := connection.violation_counter():
            self._handler.count(counter)
        self._pauses.refuse(connection, CUT_OFF_BYTES)
        self._close(connection)

    def _serve_guarded(self, connection: Connection, message: Message) -> None:
        """Serve one message; a bug met on the way must not take those behind it along."""
        if not connection.is_open:
            return
        try:
            self._serve(connection, message)
        except Exception:
            log.exception("internal error around a message")
            self._handler.count("errors_internal")

    def _serve(self, connection: Connection, message: Message) -> None:
        parts, known = message.parts, connection.refusal or message.error
        if known is not None:
            self._refuse(connection, parts, known)
            return
        try:
            request, frames = decode(parts)
            connection.grants.check(request)
        except RequestError as error:  # not kept in this frame, which its traceback names: that would be a cycle
            if error.code is ErrorCode.FORBIDDEN:
                fields = {"socket": self._door.name, "who": connection.origin.words, "reason": error.message}
                self._connections.sampled.note("forbidden", "%(socket)s: refused %(who)s: %(reason)s", fields)
            self._refuse(connection, parts, error)
        else:
            self._handler.submit(connection.peer, request, frames, partial(self._answer, connection))

    def _refuse(self, connection: Connection, parts: list[bytes], error: RequestError) -> None:
        self._handler.refused(error)
        self._pauses.refuse(connection, max(REFUSED_REQUEST_BYTES, sum(map(len, parts))))
        self._reply(connection, connection.encode([encode(refusal(parts, error))]))
        if connection.refusal is not None:
            self._close(connection)

    # --- whose turn it is -------------------------------------------------------------------------------------------

    def _arrange(self, connection: Connection) -> None:
        """Watch a connection, queue it for its next turn, or leave it until its peer has read."""
        if not connection.is_open or (loop := self._loop) is None:
            return
        is_paused = connection in self._pauses
        is_read = not (connection.unsent or is_paused)
        has_more = connection.reader.has_more
        events = select.EPOLLIN * (is_read and not has_more) | select.EPOLLOUT * bool(connection.unsent)
        events = events or select.EPOLLERR * is_paused  # the end is always told
        if events != connection.watched_events:
            self._watch(connection, events)
        if is_read and has_more and not connection.is_queued:
            connection.is_queued = True
            if not self._queues:
                loop.call_soon(self._serve_queues)
            self._queues.setdefault(connection.owner, deque()).append(connection)
        held_bytes = connection.held_bytes
        if held_bytes != connection.counted_bytes:
            self._held.count(connection, held_bytes)
            while self._held.is_beyond(connection):
                self._drop_largest()

    def _watch(self, connection: Connection, events: int) -> None:
        """Hear of other events of a connection from now on; of its end, too, where there are any."""
        if not events:
            self._ready.unregister(connection.descriptor)
            del self._watched[connection.descriptor]
        elif connection.watched_events:
            self._ready.modify(connection.descriptor, events)
        else:
            self._ready.register(connection.descriptor, events)
            self._watched[connection.descriptor] = connection
        connection.watched_events = events

    def _on_ready(self) -> None:
        """A turn for each connection that has something, or has ended.

        Others of a process wait for one that fills a `recv` or has more; of other users, all beyond a few wait.
        """
        ready = self._ready.poll(0)
        if len(ready) > 1:
            self._rotation += 1
            ready = [*ready[(start := self._rotation % len(ready)) :], *ready[:start]]
        waiting: set[Hashable] = set()
        turns: dict[Hashable, int] = {}
        for descriptor, events in ready:
            connection = self._watched.get(descriptor)
            if connection is None or connection.owner in waiting:  # closed on behalf of another one
                continue
            if events & select.EPOLLHUP and connection in self._pauses:
                self._close(connection)  # what its peer has left would be read for nothing, and keep its place
            elif connection.unsent:
                self._on_writable(connection)
            elif self._take_turn(connection) == RECEIVE_BYTES_MAX or connection.reader.has_more:
                waiting.add(connection.owner)
            if not connection.grants.is_own:
                turns[connection.owner] = turns.get(connection.owner, 0) + 1
                if turns[connection.owner] == USER_TURNS_MAX:
                    waiting.add(connection.owner)

    def _serve_queues(self) -> None:
        """A turn for one connection of each owner that has more to be served."""
        for owner, queue in list(self._queues.items()):
            connection = queue.popleft()
            connection.is_queued = False
            if not queue:
                del self._queues[owner]
            if connection.is_open and not connection.unsent and connection not in self._pauses:
                self._take(connection, b"")
        if self._queues and self._loop is not None:
            self._loop.call_soon(self._serve_queues)

    def _drop_largest(self) -> None:
        largest = self._held.largest(self._connections)
        size, who = largest.counted_bytes, largest.origin.words
        words = "%(socket)s: messages take %(total)d bytes: the connection of %(who)s with %(size)d of them is dropped"
        fields = {"socket": self._door.name, "total": self._held.total, "who": who, "size": size}
        self._connections.note_fault("held", words, fields)
        self._close(largest)
        self._pauses.refuse(largest, size)

    def _on_pause(self, owner: Hashable) -> None:
        """A pause begins or is over."""
        for connection in [each for each in self._connections if each.owner == owner]:
            self._arrange(connection)

    # --- what goes out ----------------------------------------------------------------------------------------------

    def _answer(self, connection: Connection, answer: Answer) -> None:
        if isinstance(answer.header, ErrorReply) and connection.is_open and is_for_nothing(answer.header):
            self._pauses.refuse(connection, REFUSED_REQUEST_BYTES)
        self._reply(connection, connection.encode([encode(answer.header), *answer.frames]))

    def _reply(self, connection: Connection, data: bytes) -> None:
        """Send something, at the end of the connection's turn where more is to be served in it."""
        if connection is not self._in_turn or not (connection.reader.has_more or connection.replies):
            self._send(connection, data)
            return
        connection.replies += data
        if len(connection.replies) >= REPLIES_BYTES_MAX:
            self._send_replies(connection)

    def _send_replies(self, connection: Connection) -> None:
        data = bytes(connection.replies)
        connection.replies.clear()
        self._send(connection, data)

    def _send(self, connection: Connection, data: bytes) -> None:
        if not connection.is_open or connection.is_deaf:
            self._handler.count("dropped_replies")
            return
        if connection.unsent:
            connection.unsent += data
        else:
            try:
                sent = connection.send(data)
            except OSError:
                connection.is_deaf = True
                self._handler.count("dropped_replies")
                return
            if sent == len(data) or self._loop is None:
                return
            connection.unsent += memoryview(data)[sent:]
        self._arrange(connection)

    def _on_writable(self, connection: Connection) -> None:
        if self._flush(connection):
            self._arrange(connection)

    def _flush(self, connection: Connection) -> bool:
        """Send what waits; whether nothing does any more."""
        try:
            with memoryview(connection.unsent) as unsent:
                sent = connection.send(unsent)
        except OSError:
            connection.is_deaf = True
            self._handler.count("dropped_replies")
            sent = len(connection.unsent)
        del connection.unsent[:sent]
        return not connection.unsent

    def _linger(self) -> None:
        """Wait until the last replies have left, or the time for it is over."""
        waiting = {each.descriptor: each for each in self._connections if each.unsent}
        poll = select.poll()
        for descriptor in waiting:
            poll.register(descriptor, select.POLLOUT)
        end_ns = time.monotonic_ns() + CLOSE_LINGER_MS * 1_000_000
        while waiting and (left_ms := (end_ns - time.monotonic_ns()) // 1_000_000) > 0:
            for descriptor, _ in poll.poll(left_ms):
                if self._flush(waiting[descriptor]):
                    poll.unregister(descriptor)
                    del waiting[descriptor]
