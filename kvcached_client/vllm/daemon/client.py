"""The interface of the session's client that the daemon's thread uses, and seeks that wait for blocks.

A seek waits for blocks from storage before it acquires; a daemon without storage is asked only every few seconds. A
seek that has acquired, and was told of blocks that another engine is storing, waits for these, and acquires again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol

from kvcached_client.errors import RequestError
from kvcached_client.offload import Hold, Offered, PreparedLoad, PreparedStore
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.protocol.sessions import StopPolicy
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.steps import Pending
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId
from kvcached_client.vllm.daemon.commands import Seek
from kvcached_client.vllm.settings import PrefetchMode

#: Seeks that may wait at once. A daemon accepts no more than this from all engines; further seeks go without storage.
FETCHES_MAX: Final = 256
#: How long a request waits for one prefetch at most, whatever the daemon's configuration says.
FETCH_MS_MAX: Final = 60_000
#: How long a daemon whose storage is missing or broken is not asked again.
UNAVAILABLE_S: Final = 5.0


class PendingFetch(Pending[PrefetchResult], Protocol):
    """The part of `PendingPrefetch` that is used. Everything but `abandon` raises `KvcachedError`."""

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait."""

    def abandon(self) -> None:
        """Ignore the reply."""


class Fetch(NamedTuple):
    """A seek, and the prefetch that it waits for."""

    seek: Seek
    pending: PendingFetch


class Fetches:
    """Seeks that wait for storage or for stores of other engines, the oldest first.

    Args:
        mode: see `PrefetchMode`.
        clock: in seconds.
    """

    def __init__(self, mode: PrefetchMode, clock: Callable[[], float]) -> None:
        self._mode = mode
        self._clock = clock
        self._waiting: list[Fetch] = []
        self._not_before = 0.0
        #: The hits behind which seeks have waited for stores, by ticket.
        self._hits: dict[int, int] = {}
        #: Tickets of seeks that have asked for the states at the end of their hit.
        self._asked_states: set[int] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def are_wanted(self, seek: Seek, hold: Hold | None) -> bool:
        """Whether a seek waits: for storage, or if it has a hit, for what others are storing behind that.

        It waits for stores again only if its last wait for them has brought something. The daemon ends such a wait when
        vLLM would have computed the same blocks.
        """
        is_on = self._mode != "off" and seek.prefetch != "off"
        if not (is_on and seek.load and len(self._waiting) < FETCHES_MAX):
            return False
        if hold is None:
            return self._clock() >= self._not_before
        is_new = hold.hit > self._hits.get(seek.ticket, -1)
        return hold.filling > 0 and is_new and self.stop_of(seek) != "best_effort"

    def are_states_wanted(self, seek: Seek, hold: Hold) -> bool:
        """Whether a seek whose hit ends at no branch in the host pool waits for the states there: once."""
        is_at_one = seek.branches is not None and seek.branches.units_of(hold.hit) > 0
        if not (is_at_one and self.are_wanted(seek, None)) or seek.ticket in self._asked_states:
            return False
        self._asked_states.add(seek.ticket)
        return True

    def stop_of(self, seek: Seek) -> StopPolicy:
        """How long a wanted seek waits."""
        mode = seek.prefetch or self._mode
        return "timeout" if mode == "off" else mode

    def add(self, seek: Seek, pending: PendingFetch, hold: Hold | None) -> None:
        """Let a seek wait for its prefetch."""
        self._waiting.append(Fetch(seek, pending))
        if hold is not None:
            self._hits[seek.ticket] = hold.hit

    def answered(self, ticket: int) -> None:
        """A seek has its event."""
        self._hits.pop(ticket, None)
        self._asked_states.discard(ticket)

    def take_over(self) -> Fetch | None:
        """Remove and return one whose prefetch is over. Raises KvcachedError if the daemon is gone."""
        for fetch in self._waiting:
            if fetch.pending.is_over:
                self._waiting.remove(fetch)
                return fetch
        return None

    def note(self, result: PrefetchResult) -> None:
        """Note the outcome of one."""
        if result.reason == "unavailable":
            self._not_before = self._clock() + UNAVAILABLE_S

    def take_all(self) -> list[Seek]:
        """Remove and return all of them; their replies are ignored."""
        for fetch in self._waiting:
            fetch.pending.abandon()
        seeks = [fetch.seek for fetch in self._waiting]
        self._waiting.clear()
        return seeks

    def new_session(self) -> None:
        """Ask storage again: the new daemon may have some."""
        self._not_before = 0.0


class Client(Protocol):
    """The part of `OffloadClient` that is used. Everything but the attributes raises `KvcachedError`."""

    @property
    def session(self) -> SessionGrant:
        """What the shards need to join."""

    @property
    def tells_tokens(self) -> bool:
        """Whether the daemon wants to know the tokens of blocks."""

    @property
    def is_alive(self) -> bool:
        """Whether the session still exists, as far as is known."""

    def begin_acquire(
        self, request: str, keys: bytes, tokens: int, *, full: bool, priority: int, tenant: str, load_from: int | None
    ) -> Pending[Hold]:
        """Lock the cached prefix of a prompt, and ask for the slots of its blocks from `load_from` on."""

    def begin_match(self, keys: bytes, tokens: int, *, full: bool) -> Pending[int]:
        """Ask how many leading blocks the host pool holds."""

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        tenant: str = "",
        token_ids: bytes | None = None,
    ) -> PendingFetch:
        """Bring blocks from storage into the host pool."""

    def listen(self, wake: int, timeout_s: float) -> bool:
        """Wait for a message of the daemon, or until the descriptor `wake` is readable; False after `timeout_s`."""

    def begin_prepare_load(self, lease: LeaseId, start: int, blocks: int) -> Pending[PreparedLoad]:
        """Ask for the slots of a hit."""

    def cancel_load(self, transfer: TransferId) -> None:
        """Call off a prepared load."""

    def begin_prepare_stores(
        self, offers: Sequence[Offered], releases: Sequence[LeaseId]
    ) -> Pending[list[PreparedStore | RequestError]]:
        """Ask for slots for computed blocks of several leases, then give leases back."""

    def cancel_store(self, transfer: TransferId, why: str) -> None:
        """Call off a prepared store."""

    def post_release(self, lease: LeaseId) -> None:
        """Give a lease back without waiting for the reply."""

    def pin(self, keys: bytes, *, ttl_ms: int) -> int:
        """Keep the stored blocks of a prefix for a time; returns their number."""

    def settle(self) -> None:
        """Give back what was granted after a deadline had passed."""

    def clear(self) -> int:
        """Begin a new generation of the namespace."""

    def close(self) -> None:
        """End the session."""


def begin_acquire(seek: Seek, client: Client) -> Pending[Hold]:
    """Send a seek, which loads its whole hit, unless the hit has to end at a branch."""
    return client.begin_acquire(
        seek.name,
        seek.keys,
        seek.tokens,
        full=not seek.load,
        priority=seek.priority,
        tenant=seek.tenant,
        load_from=0 if seek.load and seek.branches is None else None,
    )


def begin_fetch(seek: Seek, client: Client, *, stop: StopPolicy, behind: Hold | None = None) -> PendingFetch:
    """Ask for a seek's blocks that are in storage, or are being stored.

    Args:
        seek: the seek. With branches, what it asks for is the longest one.
        client: the session.
        stop: how long to wait.
        behind: the branch at the end of this hit is asked for instead.
    """
    keys, tokens, branches = seek.keys, seek.tokens, seek.branches
    if branches is not None:
        blocks = len(keys) // KEY_SIZE_BYTES if behind is None else behind.hit
        keys = branches.behind(branches.units_of(blocks), keys)
        tokens = branches.tokens_of(keys) + 1
    return client.begin_prefetch(
        keys,
        tokens,
        stop=stop,
        deadline_ms=FETCH_MS_MAX,
        prefill_tokens_per_s=seek.prefill_tokens_per_s,
        tenant=seek.tenant,
        token_ids=seek.token_ids() if seek.token_ids is not None and branches is None else None,
    )


def begin_load(hold: Hold, client: Client) -> Pending[PreparedLoad]:
    """Ask for the slots of a whole hit that came without them."""
    return client.begin_prepare_load(hold.lease, 0, hold.hit)
