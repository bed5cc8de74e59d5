"""Keeps a daemon running, and what it stored while it is not: systemd's part, for where there is no systemd.

It works as a container's first process, too. It has one thread, holds descriptors, starts the daemon again when it
dies, ends one that hangs, passes signals on and reaps orphans. It waits for signals and notifications in an event loop,
and touches nothing else: what does so little does not die.
"""

from __future__ import annotations

import asyncio
import ctypes
import fcntl
import logging
import os
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, NoReturn

from kvcached.recovery.fd_store import (
    COUNT_VARIABLE,
    FIRST_DESCRIPTOR,
    NAMES_VARIABLE,
    NOTIFY_VARIABLE,
    PID_VARIABLE,
    STOPPING,
    VARIABLES,
    KeptDescriptors,
    NoticeSocket,
    notify,
)
from kvcached.recovery.watchdog import PID_VARIABLE as WATCHDOG_PID_VARIABLE
from kvcached.recovery.watchdog import USEC_VARIABLE, Pings, Watch
from kvcached.recovery.watchdog import VARIABLES as WATCHDOG_VARIABLES

#: Pauses between a death and the next start, in seconds: the first, doubled up to the longest, ...
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
#: ... and begun anew by a daemon that lived as long as this.
STABLE_AFTER_S: Final = 60.0
#: Deaths in a row before READY after which it gives up; their pauses add up to 12.7 s.
FAILED_STARTS_MAX: Final = 8
#: How long a daemon may take to be ready, unless it asks for more time: systemd's default.
START_MAX_S: Final = 90.0
#: A daemon that was silent for so long hangs: it pings twice in this time. The longest steps of its event loop take a
#: second or two on a busy machine, and ending a daemon that works costs more than engines lose by a hang, for they go
#: on without it.
SILENCE_MAX_S: Final = 30.0
#: From SIGABRT, which has it log where it hangs, to SIGKILL, which ends one that is stopped, too.
KILL_AFTER_S: Final = 3.0
#: Exit status: the daemon could not be started.
START_FAILED: Final = 3
#: The daemon's, for a configuration or an option that is wrong.
WRONG_USAGE: Final = 2

_PR_SET_PDEATHSIG: Final = 1
_PR_SET_CHILD_SUBREAPER: Final = 36
_NO_SUCH_PROGRAM: Final = 127
#: Python ignores these, and what is started would go on doing so.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)

_log: Final = logging.getLogger(__name__)
_libc: Final = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Policy:
    """When a dead daemon is started again, and when one is taken for hung."""

    failed_starts_max: int = FAILED_STARTS_MAX
    pause_min_s: float = PAUSE_MIN_S
    pause_max_s: float = PAUSE_MAX_S
    stable_after_s: float = STABLE_AFTER_S
    start_max_s: float = START_MAX_S
    silence_max_s: float = SILENCE_MAX_S
    kill_after_s: float = KILL_AFTER_S


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The daemon that belongs to this program."""
    return [sys.executable, "-m", "kvcached", "serve", *arguments]


def supervise(command: Sequence[str], policy: Policy) -> int:
    """Run `command` until SIGTERM or SIGINT, which are passed on; SIGHUP starts it anew. Returns the exit status.

    That is the daemon's own where it was told to stop (128 and the signal's number where one killed it), or where the
    very first start was wrong usage; and `START_FAILED` where it died too often before it was ready.

    Raises:
        OSError: the kernel refused what is needed for the start; nothing was started.
    """
    return asyncio.run(_Supervisor(command, policy).run())


class _Supervisor:
    def __init__(self, command: Sequence[str], policy: Policy) -> None:
        self._command = list(command)
        self._policy = policy
        self._kept = KeptDescriptors()
        self._pid = 0  #: of the daemon; 0 while there is none
        self._started_s = 0.0
        self._is_ready = self._was_ever_ready = False
        self._is_told_to_stop = False  #: by who sent us a signal, or the daemon one
        self._is_to_restart = False
        self._failed_starts = 0
        self._pause_s = policy.pause_min_s
        self._timer: asyncio.TimerHandle | None = None
        self._kill_timer: asyncio.TimerHandle | None = None  #: from SIGABRT to SIGKILL

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._notices = NoticeSocket()
        self._watch = Watch(self._policy.start_max_s, self._policy.silence_max_s, self._on_silent)
        self._pings = Pings()  # whoever manages us watches us in the same way
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_restart)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop, number)
        self._loop.add_reader(self._notices.fileno(), self._read_notices)
        try:
            self._start()
            return await self._done
        finally:
            self._pings.close()
            self._loop.remove_reader(self._notices.fileno())
            self._notices.close()
            self._kept.close()

    def _start(self) -> None:
        self._timer = None
        self._is_ready = self._is_to_restart = False
        self._started_s = time.monotonic()
        try:
            silence_us = int(self._policy.silence_max_s * 1e6)
            self._pid = _start_process(self._command, self._notices.name, silence_us, self._kept)
        except OSError as error:  # no memory, or too many processes: it may pass
            _log.error("the daemon cannot be started: %s", error)
            self._after_death(START_FAILED)
        else:
            self._watch.begin()
            _log.info("daemon %d started, with %d descriptors kept for it", self._pid, len(self._kept))

    def _read_notices(self) -> None:
        for notice in self._notices.messages(self._pid):
            self._kept.take(notice)
            self._watch.hear(notice.fields)
            if notice.fields.get("READY") == "1":
                self._is_ready = self._was_ever_ready = True
                self._failed_starts = 0
                self._pings.ready()
            if notice.fields.get("STOPPING") == "1" and not self._is_to_restart:
                # Without a signal through us somebody told the daemon itself.
                self._is_told_to_stop = True
                notify(STOPPING)

    def _on_silent(self, silent_s: float) -> None:
        """The daemon lives and does nothing: it hangs, or somebody has stopped it."""
        _log.error(
            "daemon %d has not said for %.1f s that it lives: it hangs, or was stopped. It is ended by SIGABRT, which "
            "makes it log where it hangs, and by SIGKILL after %g s",
            self._pid,
            silent_s,
            self._policy.kill_after_s,
        )
        os.kill(self._pid, signal.SIGABRT)
        self._kill_timer = self._loop.call_later(self._policy.kill_after_s, os.kill, self._pid, signal.SIGKILL)

    def _on_child(self) -> None:
        """Reap whoever ended: the daemon, or an orphan of it that has become ours."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if pid == self._pid:
                    self._read_notices()  # what it said before its end
                    self._pid = 0
                    self._watch.end()
                    if self._kill_timer is not None:
                        self._kill_timer.cancel()
                    self._after_death(os.waitstatus_to_exitcode(status))

    def _after_death(self, status: int) -> None:
        """Start again, after a pause where nobody asked for it, or end. A negative status is that of a signal."""
        self._failed_starts += not self._is_ready
        if self._is_told_to_stop:
            self._end(status if status >= 0 else 128 - status)
        elif self._is_to_restart:
            self._start()
        elif status == WRONG_USAGE and not self._was_ever_ready:
            self._end(status)  # it will not get better by itself
        elif self._failed_starts >= self._policy.failed_starts_max:
            _log.error("the daemon ended %d times in a row before it was ready: giving up", self._failed_starts)
            self._end(START_FAILED)
        else:
            how = f"with status {status}" if status >= 0 else f"by signal {-status}, {signal.strsignal(-status)}"
            self._start_later(how)

    def _start_later(self, how: str) -> None:
        if time.monotonic() - self._started_s >= self._policy.stable_after_s:
            self._pause_s = self._policy.pause_min_s
        _log.error("the daemon ended %s; the next one starts in %.1f s", how, self._pause_s)
        self._timer = self._loop.call_later(self._pause_s, self._start)
        self._pause_s = min(2 * self._pause_s, self._policy.pause_max_s)

    def _on_stop(self, number: int) -> None:
        self._is_told_to_stop = True
        if self._pid:
            os.kill(self._pid, number)
        else:
            self._end(0)

    def _on_restart(self) -> None:
        """Stop the daemon, if it runs, and start it; what it stored stays. A second time ends it at once."""
        if self._is_told_to_stop:
            return
        if self._pid:
            _log.info("daemon %d is restarted", self._pid)
            self._is_to_restart = True
            os.kill(self._pid, signal.SIGTERM)
        elif self._timer is not None:
            self._timer.cancel()
            self._start()

    def _end(self, status: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._done.done():
            self._done.set_result(status)


def _start_process(command: list[str], notify_name: str, silence_us: int, kept: KeptDescriptors) -> int:
    """Start the daemon with the descriptors that are kept for it. Returns its pid.

    It learns its own pid between fork and exec, which nothing but a fork allows. This process has one thread.
    """
    ours = {*VARIABLES, *WATCHDOG_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {NOTIFY_VARIABLE: notify_name, USEC_VARIABLE: str(silence_us)}
    # A signal in between would be handled by the child as if it were the parent.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(command, environment, kept, parent, before)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


def _become(
    command: list[str],
    environment: dict[str, str],
    kept: KeptDescriptors,
    parent: int,
    mask: set[int | signal.Signals],
) -> NoReturn:
    try:
        for number in signal.valid_signals():
            if signal.getsignal(number) not in (signal.SIG_IGN, signal.SIG_DFL, None):
                signal.signal(number, signal.SIG_DFL)
        for number in _IGNORED_BY_PYTHON:
            signal.signal(number, signal.SIG_DFL)
        # Its own group: Ctrl-C reaches it through us, once. It does not outlive us: nobody would keep its memory.
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(START_FAILED)
        _hand_on(kept.descriptors)
        environment[WATCHDOG_PID_VARIABLE] = str(os.getpid())
        if len(kept):
            environment |= {
                PID_VARIABLE: str(os.getpid()),
                COUNT_VARIABLE: str(len(kept)),
                NAMES_VARIABLE: ":".join(kept.names),
            }
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        os.execvpe(command[0], command, environment)  # noqa: S606 - without a shell is what is wanted
    except BaseException as error:  # noqa: BLE001 - whatever it is, this must not go on as a second parent
        os.write(sys.stderr.fileno(), f"kvcached: {command[0]} cannot be run: {error}\n".encode())
    finally:
        os._exit(_NO_SUCH_PROGRAM)


def _hand_on(descriptors: list[int]) -> None:
    """Descriptors to 3, 4, ..., open in the next program. Whatever is there is the parent's."""
    end = FIRST_DESCRIPTOR + len(descriptors)
    out_of_the_way = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, end) for descriptor in descriptors]
    for place, descriptor in enumerate(out_of_the_way, FIRST_DESCRIPTOR):
        os.dup2(descriptor, place, inheritable=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, f"prctl {option}: {os.strerror(number)}")
