"""One worker process as the daemon sees it: start, messages, death. Decides nothing about its fellows."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcached.process.child import ChildProcess
from kvcached.worker.messages import (
    REPLY_SIZE_BYTES_MAX,
    Ack,
    WorkerConfig,
    WorkerMessage,
    decode_worker_message,
    encode,
)
from kvcached_client.errors import ErrorCode, RequestError, request_error

MODULE: Final = "kvcached.worker.main"
#: The number of the inherited descriptor follows; nothing that is secret or needs quoting is on the command line.
WORKER_COMMAND: Final = (sys.executable, "-m", MODULE)
#: The locks of all workers of a run directory.
LOCK_PATTERN: Final = "worker-*.lock"


class WorkerProcess:
    """Starts one worker and tells about it through two callbacks, both in the loop's thread.

    Args:
        config: what it is told.
        memory: descriptors that go with the configuration, see `WorkerConfig`. They stay the caller's.
        run_dir: where its log and its lock are.
        on_ack: called with every ack.
        on_exit: called once with how it ended and with the end of its log, if it was ready before. Whatever it sent
            before its end was told first.
    """

    def __init__(
        self,
        config: WorkerConfig,
        memory: tuple[int, ...],
        run_dir: str,
        on_ack: Callable[[Ack], None],
        on_exit: Callable[[str, str], None],
    ) -> None:
        self.name = f"worker {config.replica}/{config.shard}"  #: how messages call it
        self._config = config
        self._memory = memory
        self._lock_path, self._log_path = (
            str(Path(run_dir) / f"worker-{config.replica}-{config.shard}.{suffix}") for suffix in ("lock", "log")
        )
        self._on_ack = on_ack
        self._on_exit = on_exit
        self._child: ChildProcess[WorkerMessage] | None = None
        self._ready: asyncio.Future[bool] = asyncio.get_running_loop().create_future()  #: False: it ended before

    @property
    def pid(self) -> int:
        """Its process id.

        Raises:
            ValueError: it was not started.
        """
        if self._child is None:
            raise ValueError(f"{self.name} was not started")
        return self._child.pid

    @property
    def is_alive(self) -> bool:
        """Whether it was started and has not been seen to end."""
        return self._child is not None and self._child.is_alive

    async def start(self, deadline_s: float) -> None:
        """Start the process and wait until it is ready. After an error or a cancellation, `kill` it.

        Raises:
            DaemonFailure: it ended, or was not ready within `deadline_s`; the message ends with its log.
        """
        try:
            self._child = ChildProcess(
                (*WORKER_COMMAND, "{}", f"{self._config.replica}/{self._config.shard}"),
                encode(self._config),
                self._memory,
                self._lock_path,
                self._log_path,
                decode_worker_message,
                REPLY_SIZE_BYTES_MAX,
                on_message=self._on_message,
                on_exit=self._on_dead,
            )
        except OSError as error:
            failure = f"{self.name} cannot be started: {error}"
            raise request_error(ErrorCode.INTERNAL, failure, "correct what it names, then start again") from error
        try:
            async with asyncio.timeout(deadline_s):
                is_ready = await asyncio.shield(self._ready)
        except TimeoutError:
            raise self._failure(ErrorCode.DEADLINE, f"was not ready within {deadline_s:g} s") from None
        if not is_ready or not self.is_alive:
            raise self._failure(ErrorCode.WORKER_LOST, f"{self._child.ending()} before it was ready")

    def send(self, message: bytes) -> None:
        """Send a message, or queue it until the worker has read those before. Does nothing when it has ended."""
        if self._child is not None:
            self._child.send(message)

    def kill(self, reason: str = "") -> None:
        """End it by SIGKILL; `reason` says why in what `on_exit` is told. Does nothing when it has ended."""
        if self._child is not None:
            self._child.kill(reason)

    def terminate(self) -> None:
        """Ask it to end by SIGTERM. Does nothing when it has ended."""
        if self._child is not None:
            self._child.terminate()

    async def wait_exit(self, deadline_s: float) -> bool:
        """Wait for its end; returns whether it has ended."""
        return self._child is None or await self._child.wait_exit(deadline_s)

    def _on_message(self, message: WorkerMessage) -> None:
        if isinstance(message, Ack):
            self._on_ack(message)
        elif not self._ready.done():
            self._ready.set_result(True)

    def _on_dead(self) -> None:
        was_ready = self._ready.done()
        if not was_ready:
            self._ready.set_result(False)
        elif self._child is not None:
            self._on_exit(f"{self.name} {self._child.ending()}", self._log_tail())

    def _failure(self, code: ErrorCode, what: str) -> RequestError:
        message = f"{self.name} {what}; {self._log_tail()}"
        return request_error(code, message, "correct what its log names, then start again")

    def _log_tail(self) -> str:
        lines = [] if self._child is None else self._child.log_tail()
        return "\n".join([f"{self._log_path} ends:", *lines]) if lines else f"its log {self._log_path} is empty"
