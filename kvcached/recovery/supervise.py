"""Restarts the daemon, and keeps its stored descriptors meanwhile: a service manager for machines without systemd.

The supervisor also works as the first process of a container. It has one thread, holds descriptors, restarts the daemon
when it dies, kills a daemon that hangs, forwards signals and reaps orphans. It waits for signals and notifications in
an event loop. It does nothing else, so that it has few ways to fail.
"""

from __future__ import annotations

import asyncio
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

from kvcached.process.descriptors import raise_soft_limit
from kvcached.process.notify import NOTIFY_VARIABLE, STOPPING, notify
from kvcached.process.prctl import PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG, prctl
from kvcached.process.trial import Trial
from kvcached.recovery.fd_store import (
    COUNT_VARIABLE,
    FIRST_DESCRIPTOR,
    NAMES_VARIABLE,
    PID_VARIABLE,
    VARIABLES,
    KeptDescriptors,
    NoticeSocket,
)
from kvcached.recovery.keeper_link import KeeperLink
from kvcached.recovery.watchdog import PID_VARIABLE as WATCHDOG_PID_VARIABLE
from kvcached.recovery.watchdog import USEC_VARIABLE, Pings, Watch
from kvcached.recovery.watchdog import VARIABLES as WATCHDOG_VARIABLES

#: Pauses between a death and the next start, in seconds: the first one, which doubles up to the longest, ...
PAUSE_MIN_S: Final = 0.1
PAUSE_MAX_S: Final = 10.0
#: ... and starts again from the first after a daemon that lived this long.
STABLE_AFTER_S: Final = 60.0
#: Deaths in a row before READY after which it gives up; their pauses add up to 12.7 s.
FAILED_STARTS_MAX: Final = 8
#: How long a start may take, unless the daemon asks for more time: systemd's default.
START_MAX_S: Final = 90.0
#: A daemon that is silent for this long counts as hung: it pings twice in this time. The longest steps of its event
#: loop take a second or two on a busy machine. Killing a working daemon costs more than engines lose by a hang, because
#: they continue without the daemon.
SILENCE_MAX_S: Final = 30.0
#: The time from SIGABRT, which makes the daemon log where it hangs, to SIGKILL, which also ends a stopped process.
KILL_AFTER_S: Final = 3.0
#: How long a look at the configuration may take before SIGHUP restarts a daemon that runs.
CHECK_MAX_S: Final = 30.0
#: Set for the check at SIGHUP, to the daemon's process: the next daemon gets the memory of that one, or memory that is
#: free by then, so that what is left beside it says nothing. It is no option, which a `check-config` of another version
#: might not know, and no KVCACHED_ variable, which would be taken for a key of the configuration.
RESTART_VARIABLE: Final = "CHECKED_BEFORE_RESTART"
#: Exit status: the daemon could not be started.
START_FAILED: Final = 3
#: Exit status of the daemon if its configuration or an option is wrong.
WRONG_USAGE: Final = 2

_NO_SUCH_PROGRAM: Final = 127
#: Python ignores these signals, and the started program would inherit that.
_IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Policy:
    """When a dead daemon is restarted, and when a silent one counts as hung."""

    failed_starts_max: int = FAILED_STARTS_MAX
    pause_min_s: float = PAUSE_MIN_S
    pause_max_s: float = PAUSE_MAX_S
    stable_after_s: float = STABLE_AFTER_S
    start_max_s: float = START_MAX_S
    silence_max_s: float = SILENCE_MAX_S
    kill_after_s: float = KILL_AFTER_S
    check_max_s: float = CHECK_MAX_S


def serve_command(arguments: Sequence[str]) -> list[str]:
    """The command that starts this distribution's daemon."""
    return _command("serve", arguments)


def check_command(arguments: Sequence[str]) -> list[str]:
    """The command that looks whether the daemon would start with the configuration as it is now."""
    return _command("check-config", arguments)


def _command(name: str, arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-P", "-m", "kvcached", name, *arguments]


def supervise(command: Sequence[str], policy: Policy, keeper: str = "", check: Sequence[str] = ()) -> int:
    """Run `command` until SIGTERM or SIGINT, which are forwarded; SIGHUP restarts it. Returns the exit status.

    If the daemon was told to stop, or if its first start was wrong usage, that is the daemon's own status, or 128 plus
    the number of the signal that killed it. If it died too often before it was ready, that is `START_FAILED`.

    Args:
        command: the daemon's.
        policy: when it is started again.
        keeper: the socket of a keeper, which keeps the descriptors beyond the end of this process; empty without one.
        check: run at SIGHUP while the daemon runs, which is only restarted if this ends with 0; empty for no check.

    Raises:
        OSError: the kernel or the keeper refused a step before the first start; nothing was started.
    """
    raise_soft_limit()  # it holds every part of every pool, as the daemon does
    return asyncio.run(_Supervisor(command, policy, keeper, check).run())


class _Supervisor:
    def __init__(self, command: Sequence[str], policy: Policy, keeper: str, check: Sequence[str]) -> None:
        self._command = list(command)
        self._check_command = list(check)
        self._policy = policy
        self._keeper_path = keeper
        self._kept = KeptDescriptors()
        self._pid = 0  #: the daemon's; 0 while none runs
        self._started_s = 0.0
        self._is_ready = self._was_ever_ready = False
        self._is_told_to_stop = False  #: a signal to the supervisor, or to the daemon, has asked for the stop
        self._is_to_restart = False
        self._failed_starts = 0
        self._pause_s = policy.pause_min_s
        self._timer: asyncio.TimerHandle | None = None
        self._kill_timer: asyncio.TimerHandle | None = None  #: from SIGABRT to SIGKILL
        self._check: Trial | None = None  #: of the configuration, while it runs
        self._checked_pid = 0  #: the daemon's when the last check began

    async def run(self) -> int:
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._notices = NoticeSocket()
        self._watch = Watch(self._policy.start_max_s, self._policy.silence_max_s, self._on_silent)
        self._pings = Pings()  # the supervisor's own manager watches the supervisor in the same way
        prctl(PR_SET_CHILD_SUBREAPER, 1)
        self._loop.add_signal_handler(signal.SIGCHLD, self._on_child)
        self._loop.add_signal_handler(signal.SIGHUP, self._on_restart)
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_stop, number)
        self._loop.add_reader(self._notices.fileno(), self._read_notices)
        self._keeper = KeeperLink(self._keeper_path, self._kept) if self._keeper_path else None
        try:
            if self._keeper is not None:
                await self._keeper.open()
            if not self._done.done():  # nobody has told it to stop meanwhile
                self._start()
            return await self._done
        finally:
            self._pings.close()
            if self._check is not None:
                self._check_timer.cancel()
                self._check.kill()
            if self._keeper is not None:
                self._keeper.close()
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
        except OSError as error:  # no memory, or too many processes: the next try may succeed
            _log.error("the daemon cannot be started: %s", error)
            self._after_death(START_FAILED)
        else:
            self._watch.begin()
            _log.info("daemon %d started, with %d descriptors kept for it", self._pid, len(self._kept))

    def _read_notices(self) -> None:
        for notice in self._notices.messages(self._pid):
            if self._keeper is not None:
                self._keeper.pass_on(notice)
            self._kept.take(notice)
            self._watch.hear(notice.fields)
            if notice.fields.get("READY") == "1":
                self._is_ready = self._was_ever_ready = True
                self._failed_starts = 0
                self._pings.ready()
            if notice.fields.get("STOPPING") == "1" and not self._is_to_restart:
                # If no signal came through the supervisor, somebody has told the daemon directly.
                self._is_told_to_stop = True
                notify(STOPPING)

    def _on_silent(self, silent_s: float) -> None:
        """The daemon is alive but silent: it hangs, or was stopped by a signal. Nothing comes before the signal."""
        os.kill(self._pid, signal.SIGABRT)
        self._kill_timer = self._loop.call_later(self._policy.kill_after_s, os.kill, self._pid, signal.SIGKILL)
        _log.error(
            "daemon %d has not said for %.1f s that it lives: it hangs, or was stopped. It is ended by SIGABRT, which "
            "makes it log where it hangs, and by SIGKILL after %g s",
            self._pid,
            silent_s,
            self._policy.kill_after_s,
        )

    def _on_child(self) -> None:
        """Reap processes that have ended: the daemon, or orphans that it has left."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._check is not None and pid == self._check.pid:
                    self._on_checked(self._check, os.waitstatus_to_exitcode(status))
                elif pid == self._pid:
                    self._read_notices()  # messages from before its end
                    self._pid = 0
                    self._watch.end()
                    if self._kill_timer is not None:
                        self._kill_timer.cancel()
                    self._after_death(os.waitstatus_to_exitcode(status))

    def _after_death(self, status: int) -> None:
        """Restart the daemon, after a pause unless a restart was requested, or end. A negative status is a signal."""
        self._failed_starts += not (self._is_ready or self._is_to_restart)
        if self._is_told_to_stop:
            self._end(_exit_status(status))
        elif self._is_to_restart:
            self._start()
        elif -status in (signal.SIGTERM, signal.SIGINT):  # somebody has told a daemon to stop that was not ready yet
            self._end(_exit_status(status))
        elif status == WRONG_USAGE and not self._was_ever_ready:
            self._end(status)  # another start would end in the same way
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
        """Restart the daemon: one that runs only where the next one can start, for nobody else has its memory."""
        if self._is_told_to_stop or self._check is not None:
            return
        if not self._pid or self._is_to_restart or not self._check_command:
            self._restart()
            return
        try:
            self._check = Trial(self._check_command, {RESTART_VARIABLE: str(self._pid)})
            self._checked_pid = self._pid
        except OSError as error:
            self._refuse_restart(f"the configuration cannot be checked: {error}")
        else:
            self._check_timer = self._loop.call_later(self._policy.check_max_s, self._check.kill)

    def _on_checked(self, check: Trial, status: int) -> None:
        self._check = None
        self._check_timer.cancel()
        fault = check.end(status)
        if status == -signal.SIGKILL:
            fault = f"the check of the configuration was killed, as after {self._policy.check_max_s:g} s"
        if not fault:
            self._restart()
        elif self._pid != self._checked_pid:  # it has died: the lock of the next one may be what the check found
            self._on_restart()
        elif not self._is_told_to_stop:
            self._refuse_restart(fault)

    def _refuse_restart(self, fault: str) -> None:
        _log.error("SIGHUP: the daemon goes on and is not restarted: %s. Mend that, and send SIGHUP again", fault)

    def _restart(self) -> None:
        """Stop the daemon if it runs, and start it with its stored descriptors. A second call kills it at once."""
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


def _exit_status(status: int) -> int:
    """A process's status as a shell has it."""
    return status if status >= 0 else 128 - status


def _start_process(command: list[str], notify_name: str, silence_us: int, kept: KeptDescriptors) -> int:
    """Start the daemon with the descriptors that are kept for it. Returns its pid.

    Its environment has to contain its own pid, which only a fork can set before exec. This process has one thread.
    """
    ours = {*VARIABLES, *WATCHDOG_VARIABLES}
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {NOTIFY_VARIABLE: notify_name, USEC_VARIABLE: str(silence_us)}
    # Without this the child would handle a signal as the parent does.
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
        # In its own group it gets Ctrl-C only from the supervisor. It ends with the supervisor, which keeps its memory.
        os.setpgid(0, 0)
        # That group is in the background of a terminal: under `stty tostop` its first line there would stop it.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
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
    except BaseException as error:  # noqa: BLE001 - whatever the error is, the child must not continue as a second parent
        os.write(sys.stderr.fileno(), f"kvcached: {command[0]} cannot be run: {error}\n".encode())
    finally:
        os._exit(_NO_SUCH_PROGRAM)


def _hand_on(descriptors: list[int]) -> None:
    """Move the descriptors to 3, 4, ..., which the next program inherits. They replace the parent's."""
    end = FIRST_DESCRIPTOR + len(descriptors)
    out_of_the_way = [fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, end) for descriptor in descriptors]
    for place, descriptor in enumerate(out_of_the_way, FIRST_DESCRIPTOR):
        os.dup2(descriptor, place, inheritable=True)
