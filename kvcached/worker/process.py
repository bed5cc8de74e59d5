"""One worker process as the daemon sees it: start, handshake, messages, death. Decides nothing about its fellows."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import msgspec

from kvcached.seqpacket import Packet, receive, send
from kvcached.worker.messages import (
    REPLY_SIZE_BYTES_MAX,
    Ack,
    WorkerConfig,
    WorkerListening,
    WorkerMessage,
    WorkerReady,
    decode_worker_message,
    encode,
)
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import PROGRESS_SLOTS

#: The number of the inherited descriptor follows; nothing that is secret or needs quoting is on the command line.
WORKER_COMMAND: Final = (sys.executable, "-m", "kvcached.worker.main")
#: A worker without a connection is ending; if it does not, it is killed.
_DISCONNECTED_GRACE_S: Final = 0.5
#: What `WorkerReady` brings: the pool's memory, the progress page, and an eventfd for each entry of it.
READY_DESCRIPTORS: Final = 2 + PROGRESS_SLOTS
_TAIL_LINES: Final = 20
_TAIL_BYTES_MAX: Final = 16 * 1024


class WorkerProcess:
    """Starts one worker and tells about it through two callbacks, both in the loop's thread.

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
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd = -1
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._connection: socket.socket | None = None
        self._outbox: deque[bytes] = deque()  # bounded by the commands in flight
        self._ready = False
        self._kill_reason = ""

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"worker {self._config.replica}/{self._config.shard}"

    @property
    def pid(self) -> int:
        """Its process id."""
        if self._process is None:
            raise ValueError(f"{self.name} was not started")
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._process is not None and not self._exited.done()

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
        try:
            async with asyncio.timeout(deadline_s):
                if not await self._handshake(control) or self._exited.done():
                    await asyncio.shield(self._exited)
                    raise self._failure(ErrorCode.WORKER_LOST, f"{self.name} {self._ending()} before it was ready")
        except TimeoutError:
            failure = f"{self.name} was not ready within {deadline_s:g} s"
            raise self._failure(ErrorCode.DEADLINE, failure) from None
        except (OSError, ValueError) as error:  # msgspec.DecodeError is a ValueError
            raise self._failure(ErrorCode.INTERNAL, f"{self.name}: {error}") from error
        finally:
            control.close()
        self._ready = True
        if self._connection is not None:
            self._loop.add_reader(self._connection.fileno(), self._on_readable)

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the worker has read those before. Does nothing when it has ended."""
        if self._connection is None:
            return
        if self._outbox:
            self._outbox.append(message)
            return
        try:
            send(self._connection, message)
        except BlockingIOError:
            self._outbox.append(message)
            self._loop.add_writer(self._connection.fileno(), self._on_writable)
        except OSError:
            self._on_disconnected()

    def kill(self, reason: str = "") -> None:
        """End it by SIGKILL; `reason` says why in what `on_exit` is told. Does nothing when it has ended."""
        self._kill_reason = self._kill_reason or reason
        self._signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask it to end by SIGTERM. Does nothing when it has ended."""
        self._signal(signal.SIGTERM)

    async def wait_exit(self, deadline_s: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        if self._process is None:
            return True
        await asyncio.wait([self._exited], timeout=deadline_s)
        return self._exited.done()

    def close(self) -> None:
        """Give back every descriptor and the socket's path. Does nothing the second time."""
        self._disconnect()
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        descriptors, self.descriptors = self.descriptors, ()
        for descriptor in descriptors:
            os.close(descriptor)
        path = Path(self._config.socket_path)
        if path.is_socket():
            path.unlink()

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
            except OSError:
                process.kill()
                process.wait()
                raise
            self._process = process
            self._loop.add_reader(self._pidfd, self._on_dead)
            ours.pop_all()
            return control

    async def _handshake(self, control: socket.socket) -> bool:
        """Returns False where the worker closed a connection instead of speaking.

        Raises:
            ValueError: it said something else than it should.
        """
        if await self._expect(control, WorkerListening, descriptors=0) is None:
            return False
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        self._connection = connection
        try:
            connection.connect(self._config.socket_path)
        except (ConnectionError, FileNotFoundError):
            return False
        received = await self._expect(connection, WorkerReady, descriptors=READY_DESCRIPTORS)
        self.descriptors = received or ()
        return received is not None

    async def _expect(
        self, connection: socket.socket, kind: type[WorkerMessage], *, descriptors: int
    ) -> tuple[int, ...] | None:
        """The descriptors that come with a message of `kind`; None where the worker closed the connection."""
        packet = await self._next_packet(connection)
        if packet is None:
            return None
        with ExitStack() as unwanted:
            unwanted.callback(packet.close)
            message = decode_worker_message(packet.data)
            if not isinstance(message, kind) or packet.cut or len(packet.descriptors) != descriptors:
                raise ValueError(f"it sent {type(message).__name__} with {len(packet.descriptors)} descriptors")
            unwanted.pop_all()
        return tuple(packet.descriptors)

    async def _next_packet(self, connection: socket.socket) -> Packet | None:
        readable: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(connection.fileno(), _set, readable)
        try:
            await readable
        finally:
            self._loop.remove_reader(connection.fileno())
        try:
            return receive(connection, REPLY_SIZE_BYTES_MAX, READY_DESCRIPTORS)
        except ConnectionError:
            return None

    def _on_readable(self) -> None:
        try:
            while self._connection is not None:
                packet = receive(self._connection, REPLY_SIZE_BYTES_MAX, 0)
                if packet is None:
                    break
                message = decode_worker_message(packet.data)
                if isinstance(message, Ack):
                    self._on_ack(message)
        except BlockingIOError:
            return
        except ConnectionError:
            pass
        except msgspec.DecodeError as error:
            self.kill(f"it sent what cannot be decoded: {error}")
        self._on_disconnected()

    def _on_writable(self) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            while self._outbox:
                send(connection, self._outbox[0])
                self._outbox.popleft()
        except BlockingIOError:
            return
        except ConnectionError:
            self._on_disconnected()
            return
        self._loop.remove_writer(connection.fileno())

    def _on_disconnected(self) -> None:
        self._disconnect()
        self._loop.call_later(_DISCONNECTED_GRACE_S, self.kill, "it closed its connection")

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        self._loop.remove_reader(connection.fileno())
        self._loop.remove_writer(connection.fileno())
        connection.close()
        self._outbox.clear()

    def _on_dead(self) -> None:
        if self._process is None:
            return
        self._loop.remove_reader(self._pidfd)
        self._process.wait()
        self._exited.set_result(None)
        if self._ready:
            self._on_readable()
            self._on_exit(f"{self.name} {self._ending()}", self._log_tail())

    def _signal(self, number: signal.Signals) -> None:
        if self.is_alive and self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, number)

    def _ending(self) -> str:
        status = self._process.returncode if self._process is not None else None
        if status is None or not self._exited.done():
            return "did not end"
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


def _set(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
