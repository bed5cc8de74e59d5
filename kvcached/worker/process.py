"""One worker process as the daemon sees it: start or adoption, messages, death. Decides nothing about its fellows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import msgspec

from kvcached.ledger import ProcessIdentity, identity_of
from kvcached.packet_connection import PacketConnection
from kvcached.seqpacket import peer_credentials, send
from kvcached.worker.adoption import remove_socket
from kvcached.worker.connection import READY_DESCRIPTORS, next_message, worker_connection
from kvcached.worker.messages import (
    Ack,
    Adopt,
    WorkerConfig,
    WorkerListening,
    WorkerMessage,
    WorkerReady,
    WorkerRefusal,
    encode,
)
from kvcached_client.errors import ErrorCode, RequestError, request_error

#: The number of the inherited descriptor follows; nothing that is secret or needs quoting is on the command line.
WORKER_COMMAND: Final = (sys.executable, "-m", "kvcached.worker.main")
#: A worker without a connection may be ending; if it does not, it is killed.
_DISCONNECTED_GRACE_S: Final = 0.5
_TAIL_LINES: Final = 20
_TAIL_BYTES_MAX: Final = 16 * 1024


class WorkerProcess:
    """Starts or adopts one worker and tells about it through two callbacks, both in the loop's thread.

    Args:
        config: `daemon_pidfd` is filled in at the start.
        host_memory: descriptors that go with the configuration: that of the host pool, if there is one. They stay the
            caller's, who closes them after this worker.
        log_path: where its output goes; appended to.
        on_ack: called with every ack.
        on_exit: called once with how it ended and with the end of its log, if it was ready before. Whatever it sent
            before its end was told first.
    """

    def __init__(
        self,
        config: WorkerConfig,
        host_memory: tuple[int, ...],
        log_path: str,
        on_ack: Callable[[Ack], None],
        on_exit: Callable[[str, str], None],
    ) -> None:
        self.descriptors: tuple[int, ...] = ()  #: what `WorkerReady` brought; this object's to close
        self._config = config
        self._host_memory = host_memory
        self._log_path = log_path
        self._log_start = 0
        self._on_ack = on_ack
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._identity: ProcessIdentity | None = None
        self._child: subprocess.Popen[bytes] | None = None  #: None for one that an earlier daemon started
        self._pidfd = -1
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._connection: PacketConnection[WorkerMessage] | None = None
        self._ready = False
        self._kill_reason = ""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"worker {self._config.replica}/{self._config.shard}"

    @property
    def identity(self) -> ProcessIdentity:
        """Which process it is.

        Raises:
            ValueError: it was not started.
        """
        if self._identity is None:
            raise ValueError(f"{self.name} was not started")
        return self._identity

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._identity is not None and not self._exited.done()

    async def start(self, deadline_s: float) -> None:
        """Start the process and wait until it is ready. After an error or a cancellation, `kill` and `close` it.

        Raises:
            DaemonFailure: it ended, or was not ready within `deadline_s`; the message ends with its log.
        """
        try:
            control = self._spawn()
        except OSError as error:
            failure = f"{self.name} cannot be started: {error}"
            raise request_error(ErrorCode.INTERNAL, failure, "correct what it names, then start again") from error
        with control:
            await self._greet(self._await_start(control), deadline_s)

    def take(self, process: ProcessIdentity, pidfd: int) -> None:
        """Make this object that of a worker which another daemon started; `kill` and `close` it in the end.

        Args:
            process: the worker.
            pidfd: of it; from now on this object's to close.
        """
        self._identity, self._pidfd = process, pidfd
        self._loop.add_reader(pidfd, self._on_dead)
        with suppress(OSError):  # no log yet; this is where its tail starts
            self._log_start = Path(self._log_path).stat().st_size

    async def adopt(self, deadline_s: float) -> None:
        """Wait until a worker that was taken is ready. It finishes first what it copies for a daemon that is dead.

        Raises:
            DaemonFailure: it holds something else, serves a daemon that is alive, ended, or was not ready within
                `deadline_s`, as a stopped process never is.
        """
        await self._greet(self._introduce(), deadline_s)

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the worker has read those before. Does nothing when it has ended."""
        if self._connection is not None:
            self._connection.send(message)

    def kill(self, reason: str = "") -> None:
        """End it by SIGKILL; `reason` says why in what `on_exit` is told. Does nothing when it has ended."""
        self._kill_reason = self._kill_reason or reason
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end by SIGTERM. Does nothing when it has ended."""
        self._signal(signal.SIGTERM)

    async def wait_exit(self, deadline_s: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        if self._identity is None:
            return True
        await asyncio.wait([self._exited], timeout=deadline_s)
        return self._exited.done()

    def close(self) -> None:
        """Give back every descriptor, and the socket's path if it is this worker's. Does nothing the second time."""
        if self._connection is not None:
            self._connection.close()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        if self._child is not None or self._ready:
            remove_socket(self._config.socket_path)

    def _spawn(self) -> socket.socket:
        """Start the process with its configuration waiting in the socket that it inherits. Returns our end."""
        with ExitStack() as ours, ExitStack() as theirs:
            control, inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(control)
            theirs.enter_context(inherited)
            daemon_pidfd = os.pidfd_open(os.getpid())
            theirs.callback(os.close, daemon_pidfd)
            log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            theirs.callback(os.close, log)
            self._log_start = os.fstat(log).st_size
            config = msgspec.structs.replace(self._config, daemon_pidfd=daemon_pidfd)
            send(control, encode(config), self._host_memory)
            process = subprocess.Popen(
                [*WORKER_COMMAND, str(inherited.fileno()), f"{self._config.replica}/{self._config.shard}"],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(inherited.fileno(), daemon_pidfd),
                # Ctrl-C at the terminal is for the daemon, which then ends its workers in order.
                start_new_session=True,
            )
            try:
                self._pidfd = os.pidfd_open(process.pid)
                self._identity = _child_identity(process.pid)
            except OSError:
                process.kill()
                process.wait()
                raise
            self._child = process
            self._loop.add_reader(self._pidfd, self._on_dead)
            ours.pop_all()
            return control

    async def _greet(self, greeting: Coroutine[Any, Any, bool], deadline_s: float) -> None:
        """Carry out a greeting, which returns False where the worker closed a connection instead of speaking."""
        try:
            async with asyncio.timeout(deadline_s):
                if not await greeting or self._exited.done():
                    await asyncio.shield(self._exited)
                    raise self._failure(ErrorCode.WORKER_LOST, f"{self.name} {self._ending()} before it was ready")
        except TimeoutError:
            failure = f"{self.name} was not ready within {deadline_s:g} s"
            raise self._failure(ErrorCode.DEADLINE, failure) from None
        except (OSError, ValueError) as error:  # msgspec.DecodeError is a ValueError
            raise self._failure(ErrorCode.INTERNAL, f"{self.name}: {error}") from error
        self._ready = True
        if self._connection is not None:
            self._connection.listen(self._on_message, self._on_disconnected, self.kill)

    async def _await_start(self, control: socket.socket) -> bool:
        if await _expect(control, WorkerListening, descriptors=0) is None:
            return False
        connection = self._connect()
        return connection is not None and await self._await_ready(connection)

    async def _introduce(self) -> bool:
        connection = self._connect()
        if connection is None:
            raise ValueError(f"it does not listen at {self._config.socket_path}")
        if (listening := peer_credentials(connection).pid) != self.identity.pid:
            raise ValueError(f"process {listening} listens in its place")
        own = os.pidfd_open(os.getpid())
        try:
            send(connection, encode(Adopt(config=self._config)), (own, *self._host_memory))
        except ConnectionError:
            return False
        finally:
            os.close(own)
        return await self._await_ready(connection)

    def _connect(self) -> socket.socket | None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._connection = worker_connection(connection)
        try:
            connection.connect(self._config.socket_path)
        except (ConnectionError, FileNotFoundError):
            return None
        return connection

    async def _await_ready(self, connection: socket.socket) -> bool:
        received = await _expect(connection, WorkerReady, descriptors=READY_DESCRIPTORS)
        self.descriptors = received or ()
        return received is not None

    def _on_message(self, message: WorkerMessage) -> None:
        if isinstance(message, Ack):
            self._on_ack(message)

    def _on_disconnected(self) -> None:
        self._loop.call_later(_DISCONNECTED_GRACE_S, self.kill, "it closed its connection")

    def _on_dead(self) -> None:
        self._loop.remove_reader(self._pidfd)
        if self._child is not None:
            self._child.wait()
        self._exited.set_result(None)
        if self._ready:
            if self._connection is not None:
                self._connection.read()
            self._on_exit(f"{self.name} {self._ending()}", self._log_tail())

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive and self._pidfd >= 0:
            with suppress(ProcessLookupError):  # dead, and its parent has seen it before us
                signal.pidfd_send_signal(self._pidfd, number)

    def _ending(self) -> str:
        if not self._exited.done():
            return "did not end"
        if self._child is None:  # how it ended is told to its parent only
            return f"was killed: {self._kill_reason}" if self._kill_reason else "ended"
        status = self._child.returncode
        if self._kill_reason and status == -signal.SIGKILL:
            return f"was killed: {self._kill_reason}"
        return f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"

    def _failure(self, code: ErrorCode, message: str) -> RequestError:
        return request_error(code, f"{message}; {self._log_tail()}", "correct what its log names, then start again")

    def _log_tail(self) -> str:
        try:
            with Path(self._log_path).open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._log_start, size - _TAIL_BYTES_MAX))
                lines = log.read().decode(errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError as error:  # somebody moved it away, which must not keep a death from being told
            return f"its log cannot be read: {error}"
        if not lines:
            return f"its log {self._log_path} is empty"
        return "\n".join([f"{self._log_path} ends:", *lines])


async def _expect(connection: socket.socket, kind: type[WorkerMessage], *, descriptors: int) -> tuple[int, ...] | None:
    """The descriptors that come with a message of `kind`; None where the worker closed the connection.

    Raises:
        ValueError: it said something else.
    """
    received = await next_message(connection)
    if received is None:
        return None
    message, came = received
    if isinstance(message, kind) and len(came) == descriptors:
        return came
    for descriptor in came:
        os.close(descriptor)
    what = f"it sent {type(message).__name__} with {len(came)} descriptors"
    raise ValueError(f"it refuses: {message.reason}" if isinstance(message, WorkerRefusal) else what)


def _child_identity(pid: int) -> ProcessIdentity:
    """Which process a child is that has not been waited for."""
    identity = identity_of(pid)
    if identity is None:
        raise OSError(f"process {pid} is not visible in /proc")
    return identity
