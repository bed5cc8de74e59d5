"""Both ends of systemd's watchdog: a daemon whose event loop hangs sends no more pings, and is killed for that."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Final

from kvcached.process.notify import NOTIFY_VARIABLE, READY, notify, notify_now, send_unsent, unsent

#: Set by the manager: after how many microseconds of silence it kills the process, and which process.
USEC_VARIABLE: Final = "WATCHDOG_USEC"
PID_VARIABLE: Final = "WATCHDOG_PID"
VARIABLES: Final = (USEC_VARIABLE, PID_VARIABLE)
ALIVE: Final = "WATCHDOG=1"
#: Sent during a start: the manager shall wait this long from now.
MORE_TIME: Final = "EXTEND_TIMEOUT_USEC"
#: A start whose event loop runs gets this much more time, ...
EXTENSION_S: Final = 60.0
#: ... for which it asks at this interval. Reading a large host pool's headers may take a minute.
EXTENSION_INTERVAL_S: Final = 20.0
#: The interval between pings at most, while the manager has not taken everything.
UNSENT_INTERVAL_S: Final = 1.0
#: A shorter interval between pings is a mistake of the manager, and would keep the event loop busy.
_INTERVAL_S_MIN: Final = 0.05
#: How often a watch looks within the shortest silence that it has to notice.
_LOOKS: Final = 8


def silence_allowed_s(environment: Mapping[str, str]) -> float | None:
    """How long the manager lets this process be silent; None if no manager watches it."""
    microseconds, pid = environment.get(USEC_VARIABLE, ""), environment.get(PID_VARIABLE, "")
    is_number = microseconds.isascii() and microseconds.isdecimal() and len(microseconds) <= len(str(2**63))
    if not is_number or not int(microseconds) or pid not in {"", str(os.getpid())}:
        return None
    return int(microseconds) / 1e6


class Pings:
    """Pings the manager from the event loop, so that a loop that hangs is silent.

    During the start a ping is a request for more time. From `ready` to the end of the process it is ``WATCHDOG=1``,
    sent twice in the time after which the manager would kill the process, where it watches. With each ping goes what
    the manager has not taken before; while something is left of that, pings come more often.
    """

    def __init__(self) -> None:
        """Start to ping."""
        self._loop = asyncio.get_running_loop()
        self._allowed_s = silence_allowed_s(os.environ)
        self._state, self._interval_s = f"{MORE_TIME}={EXTENSION_S * 1e6:.0f}", EXTENSION_INTERVAL_S
        self._timer = self._loop.call_later(self._interval_s, self._ping)

    def ready(self) -> None:
        """Tell the manager that the process is ready."""
        self._timer.cancel()
        notify(READY)
        self._state = ""
        if self._allowed_s is not None:
            self._state, self._interval_s = ALIVE, max(self._allowed_s / 2, _INTERVAL_S_MIN)
        if os.environ.get(NOTIFY_VARIABLE):
            self._ping()

    def close(self) -> None:
        """Stop to ping."""
        self._timer.cancel()

    def _ping(self) -> None:
        send_unsent()
        if self._state:
            notify_now(self._state)  # does not wait for a manager that does not read: the next ping says the same
        pause_s = min(self._interval_s, UNSENT_INTERVAL_S) if unsent() else self._interval_s
        self._timer = self._loop.call_later(pause_s, self._ping)


class Watch:
    """Notices that a process has stopped to ping. Used in the thread of one event loop.

    If this process itself did not run, because it was stopped or the machine was asleep, that time does not count as
    silence: the watched process gets its whole time again.

    Args:
        start_s: how long a process may take until it is ready or asks for more time.
        silence_s: how long it may be silent from then on.
        on_silent: called once for each process, with the time for which it has been silent.
    """

    def __init__(self, start_s: float, silence_s: float, on_silent: Callable[[float], None]) -> None:
        self._start_s = start_s
        self._silence_s = silence_s
        self._on_silent = on_silent
        self._loop = asyncio.get_running_loop()
        self._look_s = min(start_s, silence_s) / _LOOKS
        self._is_ready = False
        self._heard_s = 0.0
        self._deadline_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Watch a process that has just been started."""
        self.end()
        self._is_ready = False
        self._expect_within(self._start_s)
        self._look_later()

    def hear(self, fields: Mapping[str, str]) -> None:
        """Note a message of the process."""
        if self._timer is None:
            return
        if fields.get("READY") == "1" or fields.get("WATCHDOG") == "1":
            self._is_ready = True
            self._expect_within(self._silence_s)
        elif MORE_TIME in fields and not self._is_ready:
            self._expect_within(max(EXTENSION_S, self._deadline_s - self._loop.time()))

    def end(self) -> None:
        """Watch no process: it is dead."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expect_within(self, seconds: float) -> None:
        self._heard_s = self._loop.time()
        self._deadline_s = self._heard_s + seconds

    def _look_later(self) -> None:
        self._due_s = self._loop.time() + self._look_s
        self._timer = self._loop.call_at(self._due_s, self._look)

    def _look(self) -> None:
        now_s = self._loop.time()
        if now_s - self._due_s > self._look_s:
            self._expect_within(self._silence_s if self._is_ready else self._start_s)
        if now_s >= self._deadline_s:
            self.end()
            self._on_silent(now_s - self._heard_s)
        else:
            self._look_later()
