"""Commands that shards still work on: who has acknowledged which, and who is late.

A command is over when no shard works on it any more: each has acknowledged it or is dead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import NamedTuple

from kvcached.worker.messages import COMMANDS_IN_FLIGHT_MAX, Ack, Hurry, Work
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import ShardIndex


class ShardResult(NamedTuple):
    """What became of a command on one shard. Nothing of it goes on there any more."""

    shard: ShardIndex
    error: str = ""  #: why it failed; empty where it was carried out
    corrupt: tuple[int, ...] = ()  #: of a load: blocks, counted through its spans, that are not what was stored
    is_lost: bool = False  #: the worker died before it acknowledged


@dataclass(slots=True)
class _InFlight:
    """A command that some shard still works on."""

    on_settled: Callable[[ShardResult], None]
    waiting: set[int]  #: shards that have neither acknowledged it nor died
    sent_s: float
    deadline_s: float
    at_once: bool
    timer: asyncio.TimerHandle | None = None


class CommandsInFlight:
    """The commands of one group of workers. Used in one event loop's thread.

    Args:
        kill: ends the worker of a shard, with a reason: it is late, or acknowledged what it was not given.
    """

    def __init__(self, kill: Callable[[int, str], None]) -> None:
        self._kill = kill
        self._loop = asyncio.get_running_loop()
        self._commands: dict[int, _InFlight] = {}
        self._acknowledged_s: dict[int, float] = {}  #: by shard, when it was last seen to get on with its commands
        self._sequence = 0

    @property
    def next_sequence(self) -> int:
        """Number of the next command."""
        return self._sequence + 1

    def check_room(self, work: Work) -> None:
        """Refuse a command that would be one too many.

        Raises:
            NoCapacity: `COMMANDS_IN_FLIGHT_MAX` of its kind are under way.
        """
        # Carried out when it is read, not in its turn: it does not show that the worker gets on with its copies.
        at_once = isinstance(work, Hurry)
        if sum(command.at_once is at_once for command in self._commands.values()) >= COMMANDS_IN_FLIGHT_MAX:
            raise request_error(
                ErrorCode.NO_CAPACITY, f"{COMMANDS_IN_FLIGHT_MAX} commands are in flight", "wait for one to end"
            )

    def add(
        self, work: Work, shards: AbstractSet[int], on_settled: Callable[[ShardResult], None], deadline_s: float
    ) -> None:
        """The next command is given to these shards. `on_settled` is called once for each, when it is through."""
        self._sequence += 1
        command = _InFlight(on_settled, set(shards), self._loop.time(), deadline_s, at_once=isinstance(work, Hurry))
        command.timer = self._loop.call_later(deadline_s, self._on_overdue, self._sequence)
        self._commands[self._sequence] = command

    def acknowledge(self, shard: int, ack: Ack) -> None:
        """A shard says that it is through with a command."""
        command = self._commands.get(ack.sequence)
        if command is None or shard not in command.waiting:
            self._kill(shard, f"it acknowledged command {ack.sequence}, which it was not given")
            return
        if not command.at_once:
            self._acknowledged_s[shard] = self._loop.time()
        self._settle(ack.sequence, ShardResult(ShardIndex(shard), ack.error, ack.corrupt))

    def lose(self, shard: ShardIndex, ending: str) -> None:
        """A shard's worker is dead: it works on nothing any more."""
        for sequence in [number for number, command in self._commands.items() if shard in command.waiting]:
            self._settle(sequence, ShardResult(shard, ending, is_lost=True))

    def _on_overdue(self, sequence: int) -> None:
        command, now_s = self._commands[sequence], self._loop.time()
        due_s = {
            shard: max(command.sent_s, self._acknowledged_s.get(shard, 0)) + command.deadline_s
            for shard in command.waiting
        }
        late = [shard for shard, at_s in due_s.items() if at_s <= now_s]
        if not late:
            command.timer = self._loop.call_at(min(due_s.values()), self._on_overdue, sequence)
        for shard in late:
            self._kill(shard, f"it had not acknowledged command {sequence} after {command.deadline_s:g} s")

    def _settle(self, sequence: int, result: ShardResult) -> None:
        """One shard is through with a command."""
        command = self._commands[sequence]
        command.waiting.discard(result.shard)
        if not command.waiting:
            del self._commands[sequence]
            if command.timer is not None:
                command.timer.cancel()
        command.on_settled(result)


class Joined:
    """The results of all shards as one future.

    Args:
        what: the command, for the error's text.

    Attributes:
        done: fails with DaemonFailure where a shard failed or died.
        waiting: shards that are not through.
    """

    def __init__(self, what: str) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting: set[int] = set()
        self._what = what
        self._failures: list[ShardResult] = []

    def settle(self, result: ShardResult) -> None:
        """One shard is through."""
        self.waiting.discard(result.shard)
        if result.error:
            self._failures.append(result)
        if self.waiting or self.done.done():
            return
        if not self._failures:
            self.done.set_result(None)
            return
        reasons = "; ".join(f"shard {failure.shard}: {failure.error}" for failure in self._failures)
        code = ErrorCode.WORKER_LOST if self._failures[0].is_lost else ErrorCode.INTERNAL
        self.done.set_exception(request_error(code, f"{self._what}: {reasons}", "see the worker's log"))
