"""An attached engine's session with the daemon, while there is one."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from kvcached_client.errors import DaemonSilent, DeadlineExceeded, KvcachedError, RequestError
from kvcached_client.offload import OffloadClient

#: Before the next try after one that took its whole deadline: a daemon that hangs must not cost every request one.
RETRY_PAUSE_S = 2.0

T = TypeVar("T")

_log = logging.getLogger("llama_engine")


class DaemonLink:
    """Asks the daemon, and goes without it where it does not answer.

    Args:
        connect: opens a session; raises KvcachedError.
        on_session: told of every new one, before anything is asked in it.

    Attributes:
        session: counts the sessions; 0 before the first. Leases and transfers belong to one of them.
    """

    def __init__(self, connect: Callable[[], OffloadClient], on_session: Callable[[OffloadClient], None]) -> None:
        self.session = 0
        self._connect = connect
        self._on_session = on_session
        self._client: OffloadClient | None = None
        self._next_try_s = 0.0

    def reconnect(self) -> None:
        """Have a session if that is possible. Called between requests: a session is never exchanged under one."""
        if self._client is not None and not self._client.is_alive:
            self._drop()
        if self._client is None and time.monotonic() >= self._next_try_s:
            try:
                self._client = self._connect()
            except KvcachedError as error:
                self._fail(error)
            else:
                self.session += 1
                self._on_session(self._client)

    def ask(self, session: int, call: Callable[[OffloadClient], T]) -> T | None:
        """The answer; None where that session is over or the daemon refuses: nothing is cached then."""
        if self._client is None or session != self.session:
            return None
        try:
            return call(self._client)
        except KvcachedError as error:
            if isinstance(error, RequestError) and self._client.is_alive:
                _log.warning("not cached: %s", error)
            else:
                self._drop()
                self._fail(error)
            return None

    def close(self) -> None:
        """End the session."""
        if self._client is not None:
            self._drop()

    def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def _fail(self, error: KvcachedError) -> None:
        if isinstance(error, (DaemonSilent, DeadlineExceeded)):  # each attempt costs a deadline
            self._next_try_s = time.monotonic() + RETRY_PAUSE_S
        _log.warning("going on without a cache: %s", error)
