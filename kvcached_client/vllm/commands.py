"""Commands of the scheduler's side to the daemon's thread, events back, and the queues between the two."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from kvcached_client.offload import PreparedLoad, PreparedStore
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.orders import SessionNote

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seek:
    """Acquire the cached prefix of a prompt; the event is `Found` or `NotFound`.

    Attributes:
        ticket: comes back in the event.
        name: name of the request, unique among live leases.
        keys: keys of its full blocks, 16 bytes each.
        tokens: number of its tokens.
        load: prepare to load the hit at once. Otherwise the lease is for stores only, and its hit counts all of `keys`.
        prefill_tokens_per_s: how fast vLLM computes prompts; 0 = not known.
    """

    ticket: int
    name: str
    keys: bytes
    tokens: int
    load: bool
    prefill_tokens_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Offer:
    """The next blocks of a lease are computed; the event is `Planned` or `Unplanned`.

    Attributes:
        ticket: comes back in the event.
        session: number of the lease's session.
        lease: the lease.
        start: depth of the first block.
        keys: keys of the blocks, 16 bytes each.
    """

    ticket: int
    session: int
    lease: LeaseId
    start: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class DropLoad:
    """A prepared load will not be made."""

    session: int
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class DropStore:
    """A prepared store will not be made."""

    session: int
    transfer: TransferId
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """A lease is no longer needed."""

    session: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class MakeUpClear:
    """Clear the namespace, if a clear is still owed."""


Command = Seek | Offer | DropLoad | DropStore | Release | MakeUpClear

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A session was opened."""

    note: SessionNote


@dataclass(frozen=True, slots=True)
class Lost:
    """A session is over, with its leases and prepared transfers."""

    session: int


@dataclass(frozen=True, slots=True)
class Fetching:
    """A seek waits for blocks from storage; its `Found` or `NotFound` comes later.

    Attributes:
        ticket: ticket of the seek.
        most_s: how much longer than usual that may take.
    """

    ticket: int
    most_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A lease was granted.

    Attributes:
        ticket: ticket of the seek.
        session: number of the lease's session.
        lease: to be released once.
        hit: leading blocks that are cached.
        load: slots of the hit; None if no load was requested, there is no hit, or it cannot be loaded.
    """

    ticket: int
    session: int
    lease: LeaseId
    hit: int
    load: PreparedLoad | None


@dataclass(frozen=True, slots=True)
class NotFound:
    """No lease: there is no session, the daemon refused, or it did not reply in time.

    Attributes:
        ticket: ticket of the seek.
        is_late: the daemon did not reply in time.
    """

    ticket: int
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """Which blocks of an offer to copy to which slots, and where the next offer starts."""

    ticket: int
    plan: PreparedStore


@dataclass(frozen=True, slots=True)
class Unplanned:
    """No block of an offer is to be copied: the session is lost, or the daemon refused."""

    ticket: int


Event = Connected | Lost | Fetching | Found | NotFound | Planned | Unplanned


#: Waiting seeks and offers: more than vLLM admits in a step. Further requests go without the cache.
COMMANDS_MAX: Final = 1024
#: Seeks of one turn: as many as vLLM usually admits in a step. The daemon answers them together.
SEEKS_PER_TURN_MAX: Final = 64
#: Other commands of one turn. No request waits for them, but a seek that arrives meanwhile waits for their replies,
#: about a millisecond. Every turn takes that many, however many seeks there are, because they hold blocks and leases.
OTHERS_PER_TURN_MAX: Final = 4


class CommandQueue:
    """Two queues, each in order: seeks that a request waits for, and all other commands. Not thread-safe."""

    def __init__(self) -> None:
        self._urgent: deque[Seek] = deque()
        self._others: deque[Command] = deque()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def put(self, command: Command) -> None:
        """Add a command at the end of its queue."""
        if isinstance(command, Seek) and command.load:
            self._urgent.append(command)
        else:
            self._others.append(command)

    def put_back(self, seeks: Iterable[Seek]) -> None:
        """Put seeks that could not be carried out back at the front, in this order."""
        self._urgent.extendleft(reversed(list(seeks)))

    def take_turn(self) -> list[Command]:
        """The commands to carry out next, seeks that a request waits for first."""
        turn: list[Command] = [self._urgent.popleft() for _ in range(min(len(self._urgent), SEEKS_PER_TURN_MAX))]
        turn += [self._others.popleft() for _ in range(min(len(self._others), OTHERS_PER_TURN_MAX))]
        return turn

    def remove(self, kinds: tuple[type[Command], ...]) -> list[Command]:
        """Remove and return all commands of some kinds."""
        waiting: list[Command] = [*self._urgent, *self._others]
        self._urgent.clear()
        self._others.clear()
        for command in waiting:
            if not isinstance(command, kinds):
                self.put(command)
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
            self._commands.put(command)
            self._notify()
            return True

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
                self._commands.put(MakeUpClear())
                self._notify()
                self._changed.wait_for(lambda: not (self._owes_clear and self._is_open), timeout_s)
            return not self._owes_clear

    def wake(self) -> None:
        """Make the thread check whether its session still exists."""
        with self._changed:
            self._notify()

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
