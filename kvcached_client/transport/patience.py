"""How long an engine that connects waits for a daemon that is not there yet, or is not ready."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from itertools import starmap
from typing import Final, Protocol, TypeVar

from kvcached_client.errors import ErrorCode, KvcachedError, RequestError, TransportError

#: Between two attempts. The first pauses are short, for a daemon that is about to listen. An attempt that fails takes
#: some 50 microseconds, so even thousands of engines that wait cost the machine nothing.
_FIRST_PAUSE_S: Final = 0.01
_LONGEST_PAUSE_S: Final = 0.25
#: What a daemon answers whose workers are being started again, that is about to end, that is clearing a replica, or
#: whose pool has an engine: this one may have ended, or be about to.
_MENDED_BY_WAITING: Final = frozenset(
    {ErrorCode.WORKER_LOST, ErrorCode.DRAINING, ErrorCode.CLEARING, ErrorCode.POOL_BUSY}
)


class Closable(Protocol):
    """What an attempt opens."""

    def close(self) -> None:
        """End it."""


T = TypeVar("T", bound=Closable)

_log: Final = logging.getLogger("kvcached_client")


class Patience:
    """Says after each attempt that failed how long to pause before the next one, for `wait_s` seconds in all.

    There is nothing to wait on instead. A daemon that starts says so to its service manager alone; inotify tells that
    the socket's file is made, but not that the daemon listens there, nor that it has ended its drain; and the folder
    in which to look may itself not be there yet.
    """

    def __init__(self, wait_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin now. Raises ValueError if `wait_s` is negative."""
        if not wait_s >= 0:
            raise ValueError(f"wait_s is {wait_s}, at least 0 is needed")
        self._wait_s = wait_s
        self._clock = clock
        self._end_s = clock() + wait_s
        self._next_s = 0.0

    def pause_s(self, error: KvcachedError) -> float | None:
        """The pause after `error`; None if waiting does not mend it, or the time is over."""
        remaining_s = self._end_s - self._clock()
        if remaining_s <= 0 or not _is_mended_by_waiting(error):
            return None
        if not self._next_s:
            _log.info("kvcached: the daemon is waited for, up to %g s: %s", self._wait_s, error)
        self._next_s = min(max(2 * self._next_s, _FIRST_PAUSE_S), _LONGEST_PAUSE_S)
        return min(self._next_s, remaining_s)  # the last attempt is made at the end


def with_patience(attempt: Callable[[], T], wait_s: float) -> T:
    """The result of the first attempt that succeeds, or the error that ends the waiting.

    An exception of a signal handler, as of Ctrl-C, may come behind any instruction, also once an attempt has succeeded.
    Its result is noted before that, within one instruction, and is closed: it would be nobody's.
    """
    patience, nobody_calls, opened = Patience(wait_s), threading.Event(), list[T]()
    try:
        while True:
            try:
                opened.extend(starmap(attempt, ((),)))
                return opened[0]
            except KvcachedError as error:
                pause_s = patience.pause_s(error)
                if pause_s is None:
                    raise
            nobody_calls.wait(pause_s)
    except BaseException:
        for each in opened:
            each.close()
        raise


def _is_mended_by_waiting(error: KvcachedError) -> bool:
    if isinstance(error, RequestError):
        return error.code in _MENDED_BY_WAITING
    return isinstance(error, TransportError)
