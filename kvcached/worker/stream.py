"""The thread that carries out commands, one at a time: those that somebody waits for go first, mostly."""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable
from typing import Final

from kvcached.worker.messages import (
    COMMANDS_IN_FLIGHT_MAX,
    ERROR_SIZE_CHARS_MAX,
    Ack,
    Command,
    Load,
    Probe,
    Shutdown,
    Store,
)
from kvcached_client.failpoints import failpoint

Task = Store | Load | Probe

#: So many commands that somebody waits for go before a store that nobody waits for; then it has its turn, for it holds
#: slots on the device and in the host pool until it is over.
PASSES_MAX: Final = 16

_log: Final = logging.getLogger(__name__)


class NotTaken(Exception):
    """The stream does not take a command; it will not be carried out."""


def failed(command: Command, error: BaseException) -> Ack:
    """The ack of a command that an error ended."""
    return Ack(sequence=command.sequence, error=f"{type(error).__name__}: {error}"[:ERROR_SIZE_CHARS_MAX])


class CommandStream:
    """Runs commands off the caller's thread and acknowledges each exactly once, failed ones included.

    Loads, probes and urgent stores come before other stores; inside each class the order is that of the sequence
    numbers. A store that becomes urgent takes its place by its own number. `Shutdown` comes last. The thread ends after
    a `Shutdown`, or when an ack cannot be sent.

    Args:
        carry_out: called in the stream's thread; returns the corrupt blocks of a load.
        acknowledge: called in the stream's thread. An error that it raises ends the stream.
        ended: called in the stream's thread, once, when no further command will be carried out.
    """

    def __init__(
        self,
        carry_out: Callable[[Task], tuple[int, ...]],
        acknowledge: Callable[[Ack], None],
        ended: Callable[[], None],
    ) -> None:
        self._carry_out = carry_out
        self._acknowledge = acknowledge
        self._ended = ended
        self._changed = threading.Condition()
        # Guarded by the condition. Of the first two at most COMMANDS_IN_FLIGHT_MAX, each ordered by sequence number.
        self._waited_for: list[Command] = []
        self._others: list[Command] = []
        self._last: list[Command] = []
        self._passed = 0  # commands that went before a store that waits
        self._ending = False
        # A worker that ends does not wait for a copy that nobody will read.
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, command: Command) -> None:
        """Queue a `Task` or a `Shutdown`. Never waits.

        Raises:
            NotTaken: `COMMANDS_IN_FLIGHT_MAX` wait already, or a `Shutdown` came before.
        """
        with self._changed:
            if self._ending:
                raise NotTaken("a shutdown was ordered before")
            if isinstance(command.work, Shutdown):
                self._ending = True
                self._last.append(command)
            elif len(self._waited_for) + len(self._others) >= COMMANDS_IN_FLIGHT_MAX:
                raise NotTaken("too many commands wait")
            elif isinstance(command.work, Store) and not command.work.urgent:
                self._others.append(command)
            else:
                self._waited_for.append(command)
            self._changed.notify()

    def hurry(self, transfer: int) -> None:
        """Somebody waits for a store now. Does nothing where it runs, is over, or is not known."""
        with self._changed:
            for index, command in enumerate(self._others):
                if isinstance(command.work, Store) and command.work.transfer == transfer:
                    insort(self._waited_for, self._others.pop(index), key=lambda other: other.sequence)
                    return

    def _run(self) -> None:
        try:
            while True:
                command = self._next()
                ack = self._ack(command)
                failpoint("worker.ack")
                self._acknowledge(ack)
                if isinstance(command.work, Shutdown):
                    return
        except OSError as error:
            _log.error("cannot acknowledge: %s", error)
        finally:
            self._ended()

    def _next(self) -> Command:
        with self._changed:
            while not (queue := self._waited_for or self._others or self._last):
                self._changed.wait()
            if queue is self._waited_for and self._others and self._passed == PASSES_MAX:
                queue = self._others
            self._passed = self._passed + 1 if queue is self._waited_for and self._others else 0
            return queue.pop(0)

    def _ack(self, command: Command) -> Ack:
        corrupt: tuple[int, ...] = ()
        try:
            if isinstance(command.work, Store | Load | Probe):
                corrupt = self._carry_out(command.work)
        except Exception as error:  # noqa: BLE001  whatever went wrong, the daemon waits for an answer
            _log.exception("command %d failed", command.sequence)
            return failed(command, error)
        return Ack(sequence=command.sequence, corrupt=corrupt)
