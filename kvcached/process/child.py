"""A child process as the daemon sees it: its start, its messages, its death. Workers and storage are such processes.

A child inherits one end of a connection, with its configuration waiting in it. It ends when the daemon closes the other
end, or dies. It inherits a lock, too, which is held until it is dead: so the next daemon sees whether memory that has
outlived the last one may still be written (`kvcached.process.earlier`).
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Generic, TypeVar

import msgspec

from kvcached.log import open_log
from kvcached.process.earlier import name_holder, take_lock
from kvcached.process.seqpacket import receive, send

M = TypeVar("M")

#: How long a process may take to die after SIGKILL. One that takes longer waits in the kernel, for a device that hangs.
KILL_DEADLINE_S: Final = 5.0
#: A child without a connection may be ending; if it does not, it is killed.
_DISCONNECTED_GRACE_S: Final = 0.5
_TAIL_LINES: Final = 20
_TAIL_BYTES_MAX: Final = 16 * 1024


class ChildProcess(Generic[M]):
    """One process, from its start to its death. Lives in one event loop's thread.

    Args:
        command: what is run; the number of the inherited descriptor replaces ``{}`` in it. Nothing in it is secret.
        configuration: the first message to the child.
        descriptors: sent along with it. They stay the caller's.
        lock_path: the file of the lock.
        log_path: where the child's output goes; appended to.
        decode: makes a message of a packet, or raises `msgspec.DecodeError`.
        message_bytes_max: of a message from the child.
        on_message: called with each message.
        on_exit: called once when the kernel says that the child is dead: nothing of it touches memory any more.
            Everything that it sent before its end was told first.

    Raises:
        OSError: the process cannot be started, or one that holds the lock lives; none is left.
    """

    def __init__(
        self,
        command: Sequence[str],
        configuration: bytes,
        descriptors: tuple[int, ...],
        lock_path: str,
        log_path: str,
        decode: Callable[[bytes], M],
        message_bytes_max: int,
        *,
        on_message: Callable[[M], None],
        on_exit: Callable[[], None],
    ) -> None:
        self._log_path = log_path
        self._decode = decode
        self._message_bytes_max = message_bytes_max
        self._on_message = on_message
        self._on_exit = on_exit
        self._outbox: deque[bytes] = deque()  # bounded by the requests in flight
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._kill_reason = ""
        with ExitStack() as ours, ExitStack() as theirs:
            connection, inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(connection)
            theirs.enter_context(inherited)
            lock = take_lock(lock_path)
            theirs.callback(os.close, lock)
            log = open_log(log_path)
            theirs.callback(os.close, log)
            self._log_start = os.fstat(log).st_size
            send(connection, configuration, descriptors)
            number = str(inherited.fileno())
            self._child = subprocess.Popen(
                [number if argument == "{}" else argument for argument in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(inherited.fileno(), lock),
                # Ctrl-C at the terminal is for the daemon, which then ends its children in order.
                start_new_session=True,
            )
            try:
                name_holder(lock, self._child.pid)
                self._pidfd = os.pidfd_open(self._child.pid)
            except OSError:
                self._child.kill()
                self._child.wait()
                raise
            connection.settimeout(0)
            self._connection: socket.socket | None = connection
            ours.pop_all()
        self._loop.add_reader(self._pidfd, self._on_dead)
        self._loop.add_reader(connection.fileno(), self._read)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether it has not been seen to end."""
        return not self._exited.done()

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the child has read those before. Does nothing when it has ended."""
        if self._connection is None:
            return
        if self._outbox:
            self._outbox.append(message)
            return
        try:
            send(self._connection, message)
        except BlockingIOError:
            self._outbox.append(message)
            self._loop.add_writer(self._connection.fileno(), self._on_writable, self._connection)
        except OSError:
            self._on_disconnected()

    def disconnect(self) -> None:
        """Close the connection, and drop what was not sent: the child ends. Does nothing the second time."""
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._loop.remove_reader(connection.fileno())
        self._loop.remove_writer(connection.fileno())
        connection.close()
        self._outbox.clear()

    def kill(self, reason: str = "") -> None:
        """End it by SIGKILL; the first `reason` becomes part of `ending`. Does nothing when it has ended."""
        self._kill_reason = self._kill_reason or reason
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end by SIGTERM. Does nothing when it has ended."""
        self._signal(signal.SIGTERM)

    async def wait_exit(self, deadline_s: float | None) -> bool:
        """Wait for its end, for as long as it takes where `deadline_s` is None. Returns whether it has ended."""
        await asyncio.wait([self._exited], timeout=deadline_s)
        return self._exited.done()

    @property
    def status(self) -> int | None:
        """Its exit status, a negative one for a signal; None while it is alive."""
        return None if self.is_alive else self._child.returncode

    def ending(self) -> str:
        """How it ended, in words."""
        if self.is_alive:
            return "did not end"
        status = self._child.returncode
        if self._kill_reason and status == -signal.SIGKILL:
            return f"was killed: {self._kill_reason}"
        return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def log_tail(self, lines_max: int = _TAIL_LINES) -> list[str]:
        """The last lines that it logged, without empty ones; empty where somebody has taken the log away."""
        try:
            with Path(self._log_path).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES_MAX))
                lines = log.read().decode(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-lines_max:]

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    def _read(self) -> None:
        """Take every message that is there."""
        try:
            while self._connection is not None:
                packet = receive(self._connection, self._message_bytes_max, 0)
                if packet is None:
                    break
                self._on_message(self._decode(packet.data))
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            self.disconnect()
            self.kill(f"it sent what cannot be decoded: {error}")
        self._on_disconnected()

    def _on_writable(self, connection: socket.socket) -> None:
        try:
            while self._outbox:
                send(connection, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except OSError:
            self._on_disconnected()
            return
        self._loop.remove_writer(connection.fileno())

    def _on_disconnected(self) -> None:
        """The child has closed its end, or is gone: it ends; if it does not, it is killed."""
        if self._connection is None:
            return
        self.disconnect()
        if self.is_alive:
            self._loop.call_later(_DISCONNECTED_GRACE_S, self.kill, "it closed its connection")

    def _on_dead(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._exited.set_result(None)  # first: nobody is to be killed any more, whatever comes of reading
        os.close(self._pidfd)
        self._child.wait()
        self._read()  # what it said last
        self.disconnect()
        self._on_exit()
