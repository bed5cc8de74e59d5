"""The storage process as the daemon sees it: its start, its messages, its death."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kvcached.process.child import ChildProcess
from kvcached.storage.messages import (
    REPLY_SIZE_BYTES_MAX,
    NotOpened,
    Opened,
    Report,
    Request,
    StorageConfig,
    decode_report,
    encode,
)

MODULE: Final = "kvcached.storage.main"
#: The number of the inherited descriptor follows; nothing that is secret is on the command line.
COMMAND: Final = (sys.executable, "-P", "-m", MODULE)
LOCK_NAME: Final = "storage.lock"
LOG_NAME: Final = "storage.log"

_log: Final = logging.getLogger(__name__)


class StorageProcess:
    """One storage process. Lives in one event loop's thread.

    Args:
        config: what it is told.
        memory: descriptors of the host pool, and of memory for the record of generations. They stay the caller's.
        run_dir: where its log and its lock are.
        on_opened: called once, when the backend is open, or cannot be opened: then it ends.
        on_reply: called with each reply after that.
        on_exit: called once, with why, when the kernel says that it is dead. Nothing of it touches memory any more.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(
        self,
        config: StorageConfig,
        memory: tuple[int, int],
        run_dir: Path,
        *,
        on_opened: Callable[[Opened | NotOpened], None],
        on_reply: Callable[[Report], None],
        on_exit: Callable[[str], None],
    ) -> None:
        self._on_opened = on_opened
        self._on_reply = on_reply
        self._on_exit = on_exit
        self._is_open = False
        self._reason = self._refusal = ""
        self.child = ChildProcess(
            (*COMMAND, "{}"),
            encode(config),
            memory,
            str(run_dir / LOCK_NAME),
            str(run_dir / LOG_NAME),
            decode_report,
            REPLY_SIZE_BYTES_MAX,
            on_message=self._on_message,
            on_exit=lambda: self._on_exit(self._ending()),
        )

    def send(self, request: Request) -> None:
        """Send a request; nothing happens where it has ended."""
        self.child.send(encode(request))

    def kill(self, reason: str) -> None:
        """End it by SIGKILL; `reason` says why in what `on_exit` is told. Does nothing when it has ended."""
        self._reason = self._reason or reason
        self.child.kill(reason)

    def refuse(self, reason: str) -> None:
        """End it because its backend cannot be used; `reason` says why in what `on_exit` is told."""
        self._refusal = reason
        self.child.kill(reason)

    async def stop(self, deadline_s: float, kill_deadline_s: float | None) -> None:
        """End it in order, or by SIGKILL at the deadline; returns when it is dead.

        Args:
            deadline_s: how long it may take to end in order.
            kill_deadline_s: how long its death is waited for after SIGKILL; None = for ever. It may still write.
        """
        self._reason = self._reason or "it was stopped"
        self.child.disconnect()
        if await self.child.wait_exit(deadline_s):
            return
        self.kill("it did not end")
        if not await self.child.wait_exit(kill_deadline_s):
            words = "storage process %(process)d did not end %(seconds)g s after SIGKILL: the next daemon waits for it"
            _log.error(words, {"process": self.child.pid, "seconds": kill_deadline_s})

    def _on_message(self, message: Report) -> None:
        if isinstance(message, Opened):
            self._is_open = True
            self._on_opened(message)
        elif isinstance(message, NotOpened):
            self._refusal = message.reason
            self._on_opened(message)
        else:
            self._on_reply(message)

    def _ending(self) -> str:
        if self._refusal:
            return f"cannot open its backend: {self._refusal}"
        how = self.child.ending()
        reason = f" ({self._reason})" if self._reason and self._reason not in how else ""
        # The last line that it logged, where that is about a start that failed.
        tail = [] if self._is_open else self.child.log_tail(1)
        return "".join([how, reason, *(f": {line}" for line in tail)])
