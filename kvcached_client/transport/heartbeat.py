"""Sends heartbeats from a thread, so that a long step of the engine does not end its session."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from typing import Final

from kvcached_client.errors import KvcachedError, Stale
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol.engine import Alive, decode_reply, encode, raise_for_error
from kvcached_client.protocol.engine import Heartbeat as HeartbeatRequest
from kvcached_client.protocol.zmtp import Message
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.connection import Connection
from kvcached_client.types import FenceSequence

#: Lower bound of the interval that the daemon sets, so that this thread never spins.
_INTERVAL_MS_MIN: Final = 10
#: A full listener has a place before that, or never.
_CONNECT_MS_MAX: Final = 1000

_log: Final = logging.getLogger("kvcached_client")


class Heartbeat:
    """A thread that sends the session's heartbeats over its own connection, from `start` until `stop` or `close`."""

    def __init__(
        self,
        path: str,
        grant: SessionGrant,
        *,
        epoch: int,
        generation: int | None,
        interval_ms: int,
        on_stale: Callable[[], None] | None = None,
    ) -> None:
        """Prepare the thread. A reply with another epoch or generation means that the session is over.

        With `generation` None, any generation is accepted. When the session is over, the thread calls `on_stale` once.
        """
        #: A reply said that the session is over or that the pool was replaced. Replies are read before each heartbeat.
        self.is_stale = False
        self.signalled = FenceSequence(0)  #: the highest fence that has signalled
        self._grant = grant
        self._expected = (epoch, generation)
        self._on_stale = on_stale
        self._interval_s = max(interval_ms, _INTERVAL_MS_MIN) / 1000
        self._stopped = threading.Event()
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._run, args=(path,), name="kvcached-heartbeat", daemon=True)

    def start(self) -> None:
        """Start the thread; if that is interrupted, `close` ends it."""
        self._thread.start()

    def stop(self) -> None:
        """Let the thread end soon. Any thread may call this, even the heartbeat's own."""
        # A fork copies the event with its lock, which may be held, but not the thread.
        if os.getpid() == self._process_id:
            self._stopped.set()

    def close(self) -> None:
        """Stop, and wait until the thread has ended and closed its socket. Does nothing the second time."""
        self.stop()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self, path: str) -> None:
        beat_count = 0
        connection = _connection(path)
        while not self._stopped.wait(self._interval_s):
            beat_count += 1
            failpoint("client.heartbeat")
            if connection is not None:
                connection.receive(self._read_reply)
                self._send(connection, beat_count)
                if not connection.is_over:
                    continue
                connection.close()
            connection = _connection(path)  # of the next daemon, if there is one; it hears the next heartbeat
        if connection is not None:
            connection.close()

    def _send(self, connection: Connection, request_id: int) -> None:
        request = HeartbeatRequest(id=request_id, session=self._grant.id, token=self._grant.token, fence=self.signalled)
        if not connection.send([encode(request)]):
            _log.debug("heartbeat %d was not sent: the daemon is gone or accepts nothing", request_id)

    def _read_reply(self, message: Message) -> None:
        try:
            reply = raise_for_error(decode_reply(message.parts[0]))
        except Stale as error:
            self._note_stale(str(error))
        except KvcachedError as error:
            _log.warning("a heartbeat was refused: %s", error)
        else:
            if isinstance(reply, Alive) and not self._is_expected(reply):
                self._note_stale(f"the pool is at epoch {reply.epoch}, generation {reply.generation}")

    def _is_expected(self, reply: Alive) -> bool:
        epoch, generation = self._expected
        return reply.epoch == epoch and generation in {None, reply.generation}

    def _note_stale(self, reason: str) -> None:
        if self.is_stale:
            return
        self.is_stale = True
        level = logging.WARNING if self._on_stale is None else logging.INFO  # the callee of on_stale logs what it means
        _log.log(level, "kvcached session %d is over: %s", self._grant.id, reason)
        if self._on_stale is not None:
            self._on_stale()


def _connection(path: str) -> Connection | None:
    try:
        return Connection(path, deadline_ms=_CONNECT_MS_MAX)
    except KvcachedError as error:
        _log.debug("no heartbeats: %s", error)
        return None
