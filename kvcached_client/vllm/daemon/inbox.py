"""The queues between the scheduler's side and the daemon's thread: commands go in, events come out."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final, Protocol

from kvcached_client.types import KEY_SIZE_BYTES
from kvcached_client.vllm.daemon.commands import Command, Event, MakeUpClear, Offer, Release, Seek

#: Waiting seeks and offers: more than vLLM admits in a step. Further requests go without the cache.
COMMANDS_MAX: Final = 1024
#: Seeks of one turn: as many as vLLM usually admits in a step. The daemon answers them together.
SEEKS_PER_TURN_MAX: Final = 64
#: Other commands of one turn. No request waits for them, but a seek that arrives meanwhile waits for their replies,
#: some milliseconds. Every turn takes that many, however many seeks there are, because they hold blocks and leases.
OTHERS_PER_TURN_MAX: Final = 32
#: How long offers and releases wait for others: one message for many costs each of them a third of a message of its
#: own, in the engine's processes and in the daemon. Meanwhile their blocks are held, and other engines do not hit them.
GATHER_S: Final = 0.05
#: Offers of so many blocks do not wait: the blocks cost more than the message.
BLOCKS_GATHERED_MAX: Final = 128


class CommandQueue:
    """Two queues, each in order: seeks that a request waits for, and all other commands. Not thread-safe.

    Offers and releases wait for others: until the first has waited for `GATHER_S`, they are many, a command comes that
    does not wait, or somebody hurries.
    """

    def __init__(self) -> None:
        self._urgent: deque[Seek] = deque()
        self._others: deque[Command] = deque()
        self._due_at = 0.0  #: when the others' turn begins
        self._blocks = 0  #: in the offers that wait for it

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def put(self, command: Command, now: float) -> None:
        """Add a command at the end of its queue, at a time in seconds."""
        if isinstance(command, Seek) and command.load:
            self._urgent.append(command)
            return
        if not self._others:
            self._due_at, self._blocks = now + GATHER_S, 0
        self._others.append(command)
        if isinstance(command, Offer):
            self._blocks += len(command.keys) // KEY_SIZE_BYTES
        are_many = len(self._others) >= OTHERS_PER_TURN_MAX or self._blocks >= BLOCKS_GATHERED_MAX
        if are_many or not isinstance(command, (Offer, Release)):
            self._due_at = 0.0

    def hurry(self) -> None:
        """Let no command wait for others."""
        self._due_at = 0.0

    def due_in(self, now: float) -> float | None:
        """How long until there is a turn to take; 0 = there is one, None = there are no commands."""
        if self._urgent:
            return 0.0
        return max(self._due_at - now, 0.0) if self._others else None

    def put_back(self, seeks: Iterable[Seek]) -> None:
        """Put seeks that could not be carried out back at the front, in this order."""
        self._urgent.extendleft(reversed(list(seeks)))

    def take_turn(self, now: float) -> list[Command]:
        """The commands to carry out next, seeks that a request waits for first."""
        turn: list[Command] = [self._urgent.popleft() for _ in range(min(len(self._urgent), SEEKS_PER_TURN_MAX))]
        if now >= self._due_at:
            turn += [self._others.popleft() for _ in range(min(len(self._others), OTHERS_PER_TURN_MAX))]
        return turn

    def remove(self, kinds: tuple[type[Command], ...]) -> list[Command]:
        """Remove and return all commands of some kinds."""
        waiting: list[Command] = [*self._urgent, *self._others]
        self._urgent = deque(each for each in self._urgent if not isinstance(each, kinds))
        self._others = deque(each for each in self._others if not isinstance(each, kinds))
        return [command for command in waiting if isinstance(command, kinds)]


#: By how much one answer moves the typical time.
_STEP: Final = 1.1
#: The typical time before the first answer, and its bounds.
_FIRST_S: Final = 0.5e-3
_TYPICAL_S_MIN: Final = 20e-6
_TYPICAL_S_MAX: Final = 1.0


class EventQueue:
    """A queue from one thread to another."""

    def __init__(self) -> None:
        self._events: deque[Event] = deque()
        self._arrived = threading.Condition()

    def append(self, event: Event) -> None:
        """Add an event, and wake the thread that waits for one."""
        with self._arrived:
            self._events.append(event)
            self._arrived.notify()

    def take(self) -> list[Event]:
        """The events since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for an event; returns whether there is one."""
        with self._arrived:
            return bool(self._events) or self._arrived.wait_for(lambda: bool(self._events), timeout_s)


class TypicalTime:
    """A running median: each time moves it a tenth up or down, so that one very long time counts like any other.

    Attributes:
        seconds: the median so far.
    """

    def __init__(self) -> None:
        self.seconds = _FIRST_S

    def observe(self, seconds: float) -> None:
        """Count one more time."""
        moved = self.seconds * _STEP if seconds > self.seconds else self.seconds / _STEP
        self.seconds = min(max(moved, _TYPICAL_S_MIN), _TYPICAL_S_MAX)


class LinkPort(Protocol):
    """What the scheduler's side uses of the thread that talks to the daemon: `CommandInbox` is one."""

    @property
    def is_taking(self) -> bool:
        """Whether seeks and offers are accepted: there is a session, and the daemon is not behind."""

    def submit(self, command: Command) -> bool:
        """Add a command; returns whether it was accepted. Without a session none is."""

    def hurry(self) -> None:
        """Send the offers and releases that wait for others."""

    def take(self) -> list[Event]:
        """The events since the last call."""

    @property
    def answer_s(self) -> float:
        """How long the daemon typically takes to reply to a seek."""

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for events; returns whether there are any."""

    def clear(self, timeout_s: float) -> bool:
        """Clear the namespace; returns whether that was done in time. If not, it is done later."""


class CommandInbox(LinkPort):
    """What the scheduler's side sees of the thread that talks to the daemon: commands go in, events come out.

    Any thread may call the public methods; they never wait for the daemon, except `wait` and `clear`.

    Args:
        clock: in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        # Guarded by `_changed`:
        self._commands = CommandQueue()
        self._is_open = False  #: commands are accepted
        self._is_closing = False
        self._owes_clear = False
        self._quiet_until = 0.0  #: no seeks and offers before that
        self._is_listening = False  #: the thread waits for the daemon, or for `_wake`
        self._wake: int | None = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  #: for a thread that listens
        # Appended by the thread, taken by the scheduler:
        self._events = EventQueue()
        self._answers = TypicalTime()  #: of seeks; changed by the thread

    @property
    def is_taking(self) -> bool:
        """Whether seeks and offers are accepted: there is a session, and the daemon is not behind."""
        is_behind = len(self._commands) >= COMMANDS_MAX or self._is_quiet
        return self._is_open and not is_behind

    def submit(self, command: Command) -> bool:
        """Add a command; returns whether it was accepted. Without a session none is."""
        with self._changed:
            if not (self.is_taking if isinstance(command, (Seek, Offer)) else self._is_open):
                return False
            now = self._clock()
            due_in = self._commands.due_in(now)
            self._commands.put(command, now)
            if due_in is None or (self._commands.due_in(now) or 0.0) < due_in:
                self._notify()  # else the thread wakes by itself, early enough
            return True

    def hurry(self) -> None:
        """Send the offers and releases that wait for others."""
        if not self._commands:
            return
        with self._changed:
            self._commands.hurry()
            self._notify()

    def take(self) -> list[Event]:
        """The events since the last call."""
        return self._events.take()

    def wait(self, timeout_s: float) -> bool:
        """Wait at most `timeout_s` for events; returns whether there are any."""
        return self._events.wait(timeout_s)

    @property
    def answer_s(self) -> float:
        """How long the daemon typically takes to reply to a seek."""
        return self._answers.seconds

    def clear(self, timeout_s: float) -> bool:
        """Clear the namespace; returns whether that was done in time. If not, it is done later."""
        with self._changed:
            self._owes_clear = True
            if self._is_open:
                self._commands.put(MakeUpClear(), self._clock())
                self._notify()
                self._changed.wait_for(lambda: not (self._owes_clear and self._is_open), timeout_s)
            return not self._owes_clear

    def wake(self) -> None:
        """Make the thread check whether its session still exists."""
        with self._changed:
            self._notify()

    def _await_turn(self, is_awaited: Callable[[], bool], *, until: float | None) -> None:
        """Wait for a turn of commands, or for something else; no longer than `until`. The caller holds `_changed`."""
        while not is_awaited():
            now = self._clock()
            waits = [] if until is None else [until - now]
            if (due_in := self._commands.due_in(now)) is not None:
                waits.append(due_in)
            if (waits and min(waits) <= 0) or not self._changed.wait(min(waits, default=None)):
                return

    def _notify(self) -> None:
        """Wake the thread. The caller holds `_changed`."""
        self._changed.notify_all()
        if self._is_listening and self._wake is not None:
            self._is_listening = False
            os.eventfd_write(self._wake, 1)

    @property
    def _is_quiet(self) -> bool:
        """Whether the pause after a missed deadline is not over."""
        return self._clock() < self._quiet_until
