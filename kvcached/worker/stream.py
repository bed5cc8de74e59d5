"""The thread that carries out commands, one at a time and in order."""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from kvcached.worker.copier import Copier, SlotRun, merge_runs
from kvcached.worker.messages import (
    COMMANDS_IN_FLIGHT_MAX,
    ERROR_SIZE_CHARS_MAX,
    Ack,
    Command,
    Copy,
    Probe,
    Shutdown,
    unpack_slot_ranges,
)

_log: Final = logging.getLogger(__name__)


class CorruptCopy(Exception):
    """A probe read back other bytes than it wrote."""


class CommandStream:
    """Runs commands off the caller's thread and acknowledges each exactly once, failed ones included.

    Args:
        copier: used by the stream's thread only.
        slot_bytes: bytes of one block.
        acknowledge: called in the stream's thread. An error that it raises ends the stream.
        ended: called in the stream's thread, once, when no further command will be carried out.
    """

    def __init__(
        self, copier: Copier, slot_bytes: int, acknowledge: Callable[[Ack], None], ended: Callable[[], None]
    ) -> None:
        self._copier = copier
        self._slot_bytes = slot_bytes
        self._acknowledge = acknowledge
        self._ended = ended
        self._commands: queue.Queue[Command] = queue.Queue(COMMANDS_IN_FLIGHT_MAX)
        # A worker whose daemon is gone ends at once; it does not wait for a copy that nobody will read.
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, command: Command) -> bool:
        """Queue a command, or return False where `COMMANDS_IN_FLIGHT_MAX` wait already. Never waits."""
        try:
            self._commands.put_nowait(command)
        except queue.Full:
            return False
        return True

    def _run(self) -> None:
        try:
            while True:
                command = self._commands.get()
                self._acknowledge(self._ack(command))
                if isinstance(command.work, Shutdown):
                    return
        except OSError as error:
            _log.error("cannot acknowledge: %s", error)
        finally:
            self._ended()

    def _ack(self, command: Command) -> Ack:
        try:
            self._carry_out(command)
        except Exception as error:  # noqa: BLE001  whatever went wrong, the daemon waits for an answer
            _log.exception("command %d failed", command.sequence)
            return Ack(sequence=command.sequence, error=f"{type(error).__name__}: {error}"[:ERROR_SIZE_CHARS_MAX])
        return Ack(sequence=command.sequence)

    def _carry_out(self, command: Command) -> None:
        match command.work:
            case Copy(sources=sources, targets=targets):
                self._copier.copy(merge_runs(unpack_slot_ranges(sources), unpack_slot_ranges(targets)))
            case Probe() as work:
                probe(self._copier, self._slot_bytes, work)
            case Shutdown():
                pass


def probe(copier: Copier, slot_bytes: int, work: Probe) -> None:
    """Write a pattern into one slot, copy it to another and compare both with it. Both slots are zero afterwards.

    Raises:
        CorruptCopy: a slot reads differently.
        ValueError: a slot is not in the pool, or both are the same.
    """
    pattern = hashlib.shake_128(b"kvcached probe" + work.seed.to_bytes(8, "little")).digest(slot_bytes)
    expected = hashlib.blake2b(pattern, digest_size=16).digest()
    try:
        copier.fill(work.source, pattern)
        copier.copy([SlotRun(work.source, work.target, 1)])
        for slot in (work.source, work.target):
            if (found := copier.checksum(slot)) != expected:
                raise CorruptCopy(
                    f"probe {work.source} → {work.target}, seed {work.seed}: slot {slot} has checksum {found.hex()}, "
                    f"expected {expected.hex()}"
                )
    finally:
        copier.zero(work.source)
        copier.zero(work.target)
