"""What the scheduler's side asks of the link to the daemon, and what it hears from it."""

from __future__ import annotations

from dataclasses import dataclass

from kvcached_client.attached import PreparedLoad, PreparedStore
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
    """No lease: there is no session, or the daemon refused."""

    ticket: int


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
