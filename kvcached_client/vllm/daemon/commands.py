"""Commands of the scheduler's side to the daemon's thread, and events back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcached_client.offload import PreparedLoad, PreparedStore
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId
from kvcached_client.vllm.orders import GROUP_HASH_BYTES, SessionNote, group_key
from kvcached_client.vllm.settings import PrefetchMode

# --- commands -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branches:
    """Where a hit may end that needs states: branches of its chain, each behind some units of the chain.

    Attributes:
        name: name of a lease on one of them, unique among live leases.
        block_size: tokens in a block, as the daemon was told.
        unit_blocks: number of blocks of a unit.
        groups: the groups of states, each of which has a block behind a unit.
        hashes: the first bytes of the hash of the last tokens in the first unit, in the second one, and so on.
    """

    name: str
    block_size: int
    unit_blocks: int
    groups: tuple[int, ...]
    hashes: bytes

    def behind(self, units: int, chain: bytes) -> bytes:
        """The keys of the branch behind so many units of a chain."""
        last = self.hashes[(units - 1) * GROUP_HASH_BYTES : units * GROUP_HASH_BYTES]
        states = b"".join([group_key(last, group) for group in self.groups])
        return chain[: units * self.unit_blocks * KEY_SIZE_BYTES] + states

    def tokens_of(self, branch: bytes) -> int:
        """Number of tokens of a branch, as the daemon counts them."""
        return len(branch) // KEY_SIZE_BYTES * self.block_size

    def units_of(self, chain_blocks: int) -> int:
        """Number of units behind which a hit of so many blocks of the chain may end."""
        return min(chain_blocks // self.unit_blocks, len(self.hashes) // GROUP_HASH_BYTES)


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
        priority: blocks that only requests of lower priority use are evicted first.
        prefetch: how long the request waits for storage; None = as the settings say.
        tenant: whose quota of the host pool the blocks count against.
        branches: where the hit may end; None = anywhere.
        token_ids: packs the tokens of the blocks, where the daemon wants to know them; for the daemon's thread.
    """

    ticket: int
    name: str
    keys: bytes
    tokens: int
    load: bool
    prefill_tokens_per_s: float = 0.0
    priority: int = 0
    prefetch: PrefetchMode | None = None
    tenant: str = ""
    branches: Branches | None = None
    token_ids: Callable[[], bytes | None] | None = None


@dataclass(frozen=True, slots=True)
class Offer:
    """The next blocks of a lease are computed; the event is `Planned` or `Unplanned`.

    Attributes:
        ticket: comes back in the event.
        session: number of the lease's session.
        lease: the lease.
        start: depth of the first block.
        keys: keys of the blocks, 16 bytes each.
        token_ids: their tokens, packed, where the daemon wants to know them.
    """

    ticket: int
    session: int
    lease: LeaseId
    start: int
    keys: bytes
    token_ids: bytes | None = None


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
class Pin:
    """Keep the stored blocks of a prompt for a time; the event is `Pinned`.

    Attributes:
        session: number of the session.
        keys: keys of the blocks, 16 bytes each.
        ttl_ms: how long.
    """

    session: int
    keys: bytes
    ttl_ms: int


@dataclass(frozen=True, slots=True)
class MakeUpClear:
    """Clear the namespace, if a clear is still owed."""


Command = Seek | Offer | DropLoad | DropStore | Release | Pin | MakeUpClear

# --- events ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A session was opened.

    Attributes:
        note: what workers need to join it.
        tells_tokens: whether the daemon wants to know the tokens of blocks.
    """

    note: SessionNote
    tells_tokens: bool = False


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
        states: how many of the hit's last blocks are states: the lease is then on a branch of the chain.
    """

    ticket: int
    session: int
    lease: LeaseId
    hit: int
    load: PreparedLoad | None
    states: int = 0


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


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin was set, or not: the session is lost, or the daemon refused.

    Attributes:
        blocks: how many blocks it keeps; None if it was not set.
    """

    blocks: int | None


Event = Connected | Lost | Fetching | Found | NotFound | Planned | Unplanned | Pinned
