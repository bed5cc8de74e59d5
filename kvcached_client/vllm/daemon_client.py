"""The session's client as far as the daemon's thread uses it, and the seeks that wait for blocks from storage.

A daemon without storage costs one question now and then.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from kvcached_client.offload import Hold, PreparedLoad, PreparedStore
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.protocol.storage import StopPolicy
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.commands import Seek

#: How long requests wait for storage: as the daemon is configured to, not at all, or for all that is there. Or storage
#: is not used.
PrefetchMode: TypeAlias = Literal["timeout", "best_effort", "wait_complete", "off"]

#: Seeks that wait at once. A daemon takes no more than this of all engines; whoever comes later goes without storage.
FETCHES_MAX: Final = 256
#: How long a request is held for storage, whatever the daemon's configuration says.
FETCH_MS_MAX: Final = 60_000
#: A daemon without storage, or with one that does not work, is not asked for that long.
UNAVAILABLE_S: Final = 5.0


class Pending(Protocol):
    """What is used of `PendingPrefetch`. All but `abandon` raise `KvcachedError`."""

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait."""

    def result(self) -> PrefetchResult:
        """What became of it."""

    def abandon(self) -> None:
        """Nobody wants the answer any more."""


class Fetch(NamedTuple):
    """A seek, and what it waits for."""

    seek: Seek
    pending: Pending


class Fetches:
    """Those that wait, the oldest first.

    Args:
        mode: see `PrefetchMode`.
        clock: in seconds.
    """

    def __init__(self, mode: PrefetchMode, clock: Callable[[], float]) -> None:
        self.mode = mode
        self._clock = clock
        self._waiting: list[Fetch] = []
        self._not_before = 0.0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def are_wanted(self, seek: Seek) -> bool:
        """Whether storage is to be asked before a seek."""
        is_possible = len(self._waiting) < FETCHES_MAX and self._clock() >= self._not_before
        return self.mode != "off" and seek.load and is_possible

    def add(self, seek: Seek, pending: Pending) -> None:
        """Have a seek wait."""
        self._waiting.append(Fetch(seek, pending))

    def take_over(self) -> Fetch | None:
        """One whose prefetch is over; it waits no more. Raises KvcachedError where the daemon is gone."""
        for fetch in self._waiting:
            if fetch.pending.is_over:
                self._waiting.remove(fetch)
                return fetch
        return None

    def note(self, result: PrefetchResult) -> None:
        """What became of one."""
        if result.reason == "unavailable":
            self._not_before = self._clock() + UNAVAILABLE_S

    def take_all(self) -> list[Seek]:
        """All of them; their answers are not waited for any more."""
        for fetch in self._waiting:
            fetch.pending.abandon()
        seeks = [fetch.seek for fetch in self._waiting]
        self._waiting.clear()
        return seeks

    def new_session(self) -> None:
        """Another daemon may have storage."""
        self._not_before = 0.0


T_co = TypeVar("T_co", covariant=True)


class Asked(Protocol[T_co]):
    """A request that was sent to the daemon."""

    def result(self) -> T_co:
        """The answer; waits for it."""


class Client(Protocol):
    """What is used of `OffloadClient`. All but the attributes raise `KvcachedError`."""

    @property
    def session(self) -> SessionGrant:
        """For the shards."""

    @property
    def is_alive(self) -> bool:
        """Whether, as far as is known, the session is still there."""

    def begin_acquire(self, request: str, keys: bytes, tokens: int, *, full: bool = False) -> Asked[Hold]:
        """Pin what is cached of a prompt."""

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
    ) -> Pending:
        """Bring blocks from storage into the host pool."""

    def listen(self, wake: int, timeout_s: float) -> bool:
        """Wait until the daemon has said something, or the descriptor `wake` is readable; False after `timeout_s`."""

    def begin_prepare_load(self, lease: LeaseId, start: int, blocks: int) -> Asked[PreparedLoad]:
        """Where blocks of a hit are."""

    def cancel_load(self, transfer: TransferId) -> None:
        """A prepared load will not be made."""

    def begin_prepare_store(self, lease: LeaseId, start: int, keys: bytes) -> Asked[PreparedStore]:
        """Where computed blocks are to go."""

    def cancel_store(self, transfer: TransferId, why: str) -> None:
        """A prepared store will not be made."""

    def post_release(self, lease: LeaseId) -> None:
        """Give a lease back, without an answer."""

    def settle(self) -> None:
        """Give back what was granted after a deadline had passed."""

    def clear(self) -> int:
        """Begin a new generation of the namespace."""

    def close(self) -> None:
        """End the session."""
