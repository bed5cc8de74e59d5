"""The storage process as the daemon sees it: its start, its messages, its death."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final

from kvcached.packet_connection import PacketConnection
from kvcached.seqpacket import send
from kvcached.storage.messages import (
    REPLY_SIZE_BYTES_MAX,
    Opened,
    Order,
    Reply,
    StorageConfig,
    decode_reply,
    encode,
)

#: The number of the inherited descriptor follows; nothing that is secret is on the command line.
COMMAND: Final = (sys.executable, "-m", "kvcached.storage.main")
LOCK_NAME: Final = "storage.lock"
LOG_NAME: Final = "storage.log"
_TAIL_BYTES: Final = 4096


class StorageProcess:
    """One storage process. Lives in one event loop's thread.

    Args:
        config: what it is told.
        host_memory: descriptor of the host pool, which stays the caller's.
        log_path: where its output goes; appended to.
        on_opened: called once, when the backend is open.
        on_reply: called with each reply after that.
        on_exit: called once, with why, when the kernel says that it is dead. Nothing of it touches memory any more.
    """

    def __init__(
        self,
        config: StorageConfig,
        host_memory: int,
        log_path: str,
        *,
        on_opened: Callable[[Opened], None],
        on_reply: Callable[[Reply], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._log_path = log_path
        self._on_opened = on_opened
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._loop = asyncio.get_running_loop()
        self._exited: asyncio.Future[None] = self._loop.create_future()
        self._is_open = False
        self._reason = ""
        self._log_start = 0
        with ExitStack() as ours, ExitStack() as theirs:
            control, inherited = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.enter_context(control)
            theirs.enter_context(inherited)
            log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
            theirs.callback(os.close, log)
            self._log_start = os.fstat(log).st_size
            send(control, encode(config), (host_memory,))
            self._child = subprocess.Popen(
                [*COMMAND, str(inherited.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(inherited.fileno(),),
                start_new_session=True,
            )
            try:
                self._pidfd = os.pidfd_open(self._child.pid)
            except OSError:
                self._child.kill()
                self._child.wait()
                raise
            control.settimeout(0)
            self._connection = PacketConnection(control, decode_reply, REPLY_SIZE_BYTES_MAX)
            ours.pop_all()
        self._loop.add_reader(self._pidfd, self._on_dead)
        self._connection.listen(self._on_message, lambda: self.kill("it closed its connection"), self.kill)

    def send(self, order: Order) -> None:
        """Send an order; nothing happens where it has ended."""
        self._connection.send(encode(order))

    def kill(self, reason: str) -> None:
        """End it by SIGKILL; `reason` says why in what `on_exit` is told. Does nothing when it has ended."""
        self._reason = self._reason or reason
        if not self._exited.done():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    async def stop(self, deadline_s: float) -> None:
        """End it in order, or by SIGKILL at the deadline; returns when it is dead."""
        self._reason = self._reason or "it was stopped"
        self._connection.close()
        await asyncio.wait([self._exited], timeout=deadline_s)
        if not self._exited.done():
            self.kill("it did not end")
            await self._exited

    def _on_message(self, message: Reply) -> None:
        if isinstance(message, Opened):
            self._is_open = True
            self._on_opened(message)
        else:
            self._on_reply(message)

    def _on_dead(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._exited.set_result(None)  # first: nobody is to be killed any more, whatever comes of reading
        os.close(self._pidfd)
        self._child.wait()
        self._connection.read()  # what it said last
        self._connection.close()
        self._on_exit(self._ending())

    def _ending(self) -> str:
        status = self._child.returncode
        how = f"ended with status {status}" if status >= 0 else f"was ended by {signal.Signals(-status).name}"
        reason = f" ({self._reason})" if self._reason else ""
        return f"{how}{reason}{self._log_tail()}"

    def _log_tail(self) -> str:
        """The last line that it logged, where that is about a start that failed."""
        if self._is_open:
            return ""
        try:
            with Path(self._log_path).open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
                lines = log.read().decode(errors="replace").split("\n")
        except OSError:  # somebody has taken it away
            return ""
        last = [line for line in lines if line.strip()][-1:]
        return f": {last[0]}" if last else ""


async def end_earlier(run_dir: Path, deadline_s: float) -> None:
    """Wait until the storage process of an earlier daemon is dead: until then it may write into the host pool.

    Raises:
        OSError: it does not end.
    """
    try:
        lock = os.open(run_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            await _end_holder(lock, deadline_s)
    finally:
        os.close(lock)


async def _end_holder(lock: int, deadline_s: float) -> None:
    """End the process that wrote its id into a file and holds a lock on it."""
    text = os.pread(lock, 20, 0).strip()
    if not text.isdigit():
        raise OSError("the storage process of an earlier daemon starts or ends right now; start again")
    pid = int(text)
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await _readable(pidfd, deadline_s)
        except TimeoutError:
            raise OSError(f"storage process {pid} of an earlier daemon waits for its device and does not end") from None
        finally:
            os.close(pidfd)


async def _readable(descriptor: int, deadline_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.remove_reader(descriptor)
        ready.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        async with asyncio.timeout(deadline_s):
            await ready
    finally:
        loop.remove_reader(descriptor)
