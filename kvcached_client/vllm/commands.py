"""What the scheduler's side asks of the daemon's thread and what it hears from it, and the queues between the two."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from kvcached_client.offload import PreparedLoad, PreparedStore
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.orders import SessionNote

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Seek:
    """Acquire what is cached of a request's prompt; answered by `Found` or `NotFound`.

    Attributes:
        ticket: comes back in the answer.
        name: of the request, unique among live leases.
        keys: of its full blocks, 16 bytes each.
        tokens: that it has.
        load: prepare to load the hit at once; else the lease is for storing only, and its hit counts all of `keys`.
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
    """The blocks that follow on a lease are computed; answered by `Planned` or `Unplanned`.

    Attributes:
        ticket: comes back in the answer.
        session: number of the lease's session.
        lease: whose.
        start: depth of the first block.
        keys: of the blocks, 16 bytes each.
    """

    ticket: int
    session: int
    lease: LeaseId
    start: int
    keys: bytes


@dataclass(frozen=True, slots=True)
class DropLoad:
    """A prepared load is not wanted."""

    session: int
    transfer: TransferId


@dataclass(frozen=True, slots=True)
class DropStore:
    """A prepared store cannot be made."""

    session: int
    transfer: TransferId
    why: str


@dataclass(frozen=True, slots=True)
class Release:
    """A lease is not needed any more."""

    session: int
    lease: LeaseId


@dataclass(frozen=True, slots=True)
class MakeUpClear:
    """Clear the namespace, if that is owed."""


Command = Seek | Offer | DropLoad | DropStore | Release | MakeUpClear

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """There is a session."""

    note: SessionNote


@dataclass(frozen=True, slots=True)
class Lost:
    """A session is over, with its leases and prepared transfers."""

    session: int


@dataclass(frozen=True, slots=True)
class Fetching:
    """A seek waits for blocks from storage; its answer still comes.

    Attributes:
        ticket: of the seek.
        most_s: how much longer than usual that may take.
    """

    ticket: int
    most_s: float


@dataclass(frozen=True, slots=True)
class Found:
    """A lease.

    Attributes:
        ticket: of the seek.
        session: number of the lease's session.
        lease: to be released once.
        hit: leading blocks that are cached.
        load: where they are; None where no load was asked for, there is no hit, or it cannot be loaded.
    """

    ticket: int
    session: int
    lease: LeaseId
    hit: int
    load: PreparedLoad | None


@dataclass(frozen=True, slots=True)
class NotFound:
    """No lease: there is no session, or the daemon refused, or it did not answer in time.

    Attributes:
        ticket: of the seek.
        is_late: the daemon did not answer in time.
    """

    ticket: int
    is_late: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """What of an offer to copy where, and from where the next one starts."""

    ticket: int
    plan: PreparedStore


@dataclass(frozen=True, slots=True)
class Unplanned:
    """Nothing of an offer is to be copied: the session is lost, or the daemon refused."""

    ticket: int


Event = Connected | Lost | Fetching | Found | NotFound | Planned | Unplanned


#: Seeks of one turn: all that vLLM usually admits in a step. The daemon answers them in one go.
SEEKS_PER_TURN_MAX: Final = 64
#: Other commands of one turn. No request waits for them, and a seek that comes meanwhile waits until they are answered:
#: about a millisecond. So many go with every turn, however many seeks there are, for they hold blocks and leases.
OTHERS_PER_TURN_MAX: Final = 4


class CommandQueue:
    """Two queues: seeks that a request waits for, and all other commands. Each keeps its order. Not thread-safe."""

    def __init__(self) -> None:
        self._urgent: deque[Seek] = deque()
        self._others: deque[Command] = deque()

    def __len__(self) -> int:
        return len(self._urgent) + len(self._others)

    def put(self, command: Command) -> None:
        """Add a command behind those of its kind."""
        if isinstance(command, Seek) and command.load:
            self._urgent.append(command)
        else:
            self._others.append(command)

    def put_back(self, seeks: Iterable[Seek]) -> None:
        """Add seeks that could not be carried out before all others, in this order."""
        self._urgent.extendleft(reversed(list(seeks)))

    def take_turn(self) -> list[Command]:
        """The commands to carry out next, seeks that a request waits for first."""
        turn: list[Command] = [self._urgent.popleft() for _ in range(min(len(self._urgent), SEEKS_PER_TURN_MAX))]
        turn += [self._others.popleft() for _ in range(min(len(self._others), OTHERS_PER_TURN_MAX))]
        return turn

    def remove(self, kinds: tuple[type[Command], ...]) -> list[Command]:
        """Take out all commands of some kinds."""
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
    """Appended to by one thread, taken from by another one."""

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
        """Wait until there is an event, no longer than so many seconds; whether there is one."""
        with self._arrived:
            return bool(self._events) or self._arrived.wait_for(lambda: bool(self._events), timeout_s)


class TypicalTime:
    """A running median of times: each moves it a tenth up or down. One that is very long counts like any other.

    Attributes:
        seconds: the median so far.
    """

    def __init__(self) -> None:
        self.seconds = _FIRST_S

    def observe(self, seconds: float) -> None:
        """Count one more time."""
        moved = self.seconds * _STEP if seconds > self.seconds else self.seconds / _STEP
        self.seconds = min(max(moved, _TYPICAL_S_MIN), _TYPICAL_S_MAX)
