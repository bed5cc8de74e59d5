"""vLLM's objects as far as the scheduler's side reads them, and what it knows of each request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kvcached_client.offload import PreparedLoad
from kvcached_client.types import LeaseId


class Request(Protocol):
    """A request of vLLM's scheduler."""

    @property
    def request_id(self) -> str:
        """Unique among the requests that live."""

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far; speculative tokens do not count."""

    @property
    def num_prompt_tokens(self) -> int:
        """Of the prompt."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed once all steps that were scheduled are over."""

    @property
    def num_preemptions(self) -> int:
        """How often it lost its blocks."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Of its full blocks, chained. vLLM appends while tokens come."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether it must be computed, whatever is cached."""


class Block(Protocol):
    """A block of vLLM's pool."""


class BlockPool(Protocol):
    """vLLM's pool of device blocks."""

    @property
    def blocks(self) -> Sequence[Block]:
        """All blocks, by id."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Count one more user of each."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Count one less; of those that nobody uses any more the first ones are taken first."""


class NewRequest(Protocol):
    """A request in the first step that it is scheduled in; also one that came back, with all its blocks."""

    @property
    def req_id(self) -> str:
        """`Request.request_id`."""

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """One list for each group of layers."""

    @property
    def num_computed_tokens(self) -> int:
        """Before this step."""


class CachedRequests(Protocol):
    """Requests that were scheduled before, as parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]:
        """`Request.request_id` of each."""

    @property
    def resumed_req_ids(self) -> set[str]:
        """Those whose new blocks are all their blocks."""

    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]:
        """Blocks that were added to each."""

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Before this step."""


class Step(Protocol):
    """What vLLM's scheduler has decided for a step."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests that workers do not know."""

    @property
    def scheduled_cached_reqs(self) -> CachedRequests:
        """Requests that they know."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens to compute, speculative ones included."""

    @property
    def preempted_req_ids(self) -> set[str] | None:
        """Requests that lost their blocks since the step before."""


@dataclass(slots=True, eq=False)
class RequestState:
    """What is known of one request.

    Attributes:
        request: vLLM's.
        preemptions: that it had when it was last looked up.
        may_load: false once a load for it failed: a second try could fail for ever.
        is_asked: its hit was asked for since it began, or was preempted.
        asked_at: when, on the clock of deadlines; or when the time for storage is over.
        ticket: of the question whose answer is out; 0 = none. Answers to other tickets are to an earlier self of it.
        session, lease: what it holds at the daemon; no lease = None.
        is_fetching: the answer to that question waits for storage.
        is_late: it went without the cache because the answer was late.
        wants_load: it was asked for its hit, and has no blocks yet to load it into.
        load: where its hit is, as long as neither used nor dropped.
        local_blocks: leading blocks that vLLM itself had when it asked for the hit.
        depth: where the lease's next store starts.
        offered: blocks that need no offer any more: offered, hit, or refused for the time being.
        recomputed_from: depth of the first block of its hit that could not be loaded and is computed instead; None once
            the daemon was asked whether it wants them again.
        full: leading blocks that are computed, or will be at the end of this step.
        due: as many of them are to be offered without waiting for more.
        block_ids: its blocks in vLLM's pool.
        is_finished: vLLM has forgotten it.
        parting_start, parting: blocks of a finished request that wait to be offered; held, ids from that depth on.
    """

    request: Request
    preemptions: int
    may_load: bool = True
    is_asked: bool = False
    asked_at: float = 0.0
    ticket: int = 0
    session: int = 0
    lease: LeaseId | None = None
    is_fetching: bool = False
    is_late: bool = False
    wants_load: bool = False
    load: PreparedLoad | None = None
    local_blocks: int = 0
    depth: int = 0
    offered: int = 0
    recomputed_from: int | None = None
    full: int = 0
    due: int = 0
    block_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    parting_start: int = 0
    parting: list[int] = field(default_factory=list)

    @property
    def has_recomputed(self) -> bool:
        """Whether a part of its hit was computed since it could not be loaded, and all of the hit is there by now."""
        return self.recomputed_from is not None and self.due >= self.depth and not self.is_finished

    def forget_lease(self) -> None:
        """The lease is given back, or gone."""
        self.lease = self.load = None
        self.depth = self.offered = 0
        self.recomputed_from = None
