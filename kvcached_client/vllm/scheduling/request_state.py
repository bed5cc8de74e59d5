"""The part of vLLM's objects that the scheduler's side uses, and its state of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from kvcached_client.offload import PreparedLoad
from kvcached_client.types import LeaseId
from kvcached_client.vllm.scheduling.wishes import NO_WISHES, Wishes

#: The output of a request that is a prefill for another engine, as proxies ask for it. That engine gets the prompt as
#: soon as this token is there, so that offers do not wait for others.
PREFILL_TOKENS: Final = 1


class Request(Protocol):
    """A request of vLLM's scheduler."""

    @property
    def request_id(self) -> str:
        """Id that is unique among unfinished requests."""

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output so far, without speculative tokens."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""

    @property
    def max_tokens(self) -> int:
        """Tokens of output at most."""

    @property
    def pooling_params(self) -> object | None:
        """What an embedding or a score is asked for with; None = output is generated."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose KV is computed once all scheduled steps are over."""

    @property
    def num_preemptions(self) -> int:
        """How often the request lost its blocks."""

    @property
    def all_token_ids(self) -> Sequence[int]:
        """Tokens of prompt and output so far; zeros where the prompt is given as embeddings."""

    @property
    def cache_salt(self) -> str | None:
        """What keeps the blocks of a tenant from others."""

    @property
    def lora_request(self) -> object | None:
        """The adapter."""

    @property
    def mm_features(self) -> Sequence[object]:
        """Images and other items of the prompt."""

    @property
    def prompt_embeds(self) -> object | None:
        """The prompt, where it is given as embeddings."""

    @property
    def block_hashes(self) -> Sequence[bytes]:
        """Chained hashes of its full blocks. vLLM appends hashes as tokens are computed."""

    @property
    def skip_reading_prefix_cache(self) -> bool:
        """Whether the request must be computed without cached blocks."""

    @property
    def kv_transfer_params(self) -> dict[str, Any] | None:
        """What the client asks of the connector."""

    @property
    def kv_hints(self) -> object | None:
        """What an orchestrator asks of the cache: vLLM's envelope of actions."""


class Block(Protocol):
    """A block of vLLM's pool."""

    @property
    def block_hash(self) -> bytes | None:
        """Hash of its tokens and those before it, with the number of its group; None if it cannot be found."""


class BlockPool(Protocol):
    """vLLM's pool of device blocks."""

    @property
    def blocks(self) -> Sequence[Block]:
        """All blocks; the index is the block's id."""

    def touch(self, blocks: Sequence[Block]) -> None:
        """Add a user to each block."""

    def free_blocks(self, ordered_blocks: Iterable[Block]) -> None:
        """Remove a user from each block. Unused blocks are reused in this order."""


class HashedBlock(Block, Protocol):
    """A block, and what vLLM finds it by."""

    @property
    def block_id(self) -> int:
        """Its number."""

    @property
    def block_hash_num_tokens(self) -> int | None:
        """How many tokens the hash is of: fewer than the block's and those before it if vLLM shares part of it."""


class WatchedPool(Protocol):
    """vLLM's pool, as `DeviceBlocks` uses it."""

    @property
    def blocks(self) -> Sequence[HashedBlock]:
        """As in `BlockPool`."""

    def touch(self, blocks: Sequence[Any]) -> None:
        """As in `BlockPool`."""

    def unpin_blocks(self, blocks: Iterable[Any], on_reuse: Callable[[Any], None]) -> None:
        """Remove a user from each block; call back when it is handed out again, or all hashes are dropped.

        Unused blocks are reused after all others, in this order.
        """

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: Any, num_tokens: int | None) -> None:  # noqa: ANN401
        """Find a block by a hash from now on."""


class RequestBlocks(Protocol):
    """Blocks of a request."""

    @property
    def blocks(self) -> Sequence[Sequence[HashedBlock]]:
        """A list for each group of layers."""


class CacheManager(Protocol):
    """vLLM's manager of the blocks of requests."""

    @property
    def block_pool(self) -> WatchedPool:
        """All blocks."""

    def get_blocks(self, request_id: str) -> RequestBlocks:
        """The blocks that a request has now; none if it has none."""


class NewRequest(Protocol):
    """A request in the first step in which it is scheduled, with all its blocks; also after a preemption."""

    @property
    def req_id(self) -> str:
        """`Request.request_id`."""

    @property
    def block_ids(self) -> Sequence[Sequence[int]]:
        """Block ids, one list for each group of layers."""

    @property
    def num_computed_tokens(self) -> int:
        """Tokens that were computed before this step."""


class CachedRequests(Protocol):
    """Requests that were scheduled in an earlier step, as parallel lists."""

    @property
    def req_ids(self) -> Sequence[str]:
        """`Request.request_id` of each."""

    @property
    def resumed_req_ids(self) -> set[str]:
        """Requests whose new blocks replace all their blocks."""

    @property
    def new_block_ids(self) -> Sequence[Sequence[Sequence[int]] | None]:
        """Block ids that were added to each request."""

    @property
    def num_computed_tokens(self) -> Sequence[int]:
        """Tokens that were computed before this step."""


class BlockState(Protocol):
    """What vLLM says of blocks beside which are new."""

    @property
    def boundary_state_offloads(self) -> Mapping[str, Sequence[tuple[int, int, int]]]:
        """Blocks that hold states when this step is over and stay as they are, by request.

        Of each block the number of its group, its id, and how many tokens the state is of.
        """


class Step(Protocol):
    """The decisions of vLLM's scheduler for a step."""

    @property
    def scheduled_new_reqs(self) -> Sequence[NewRequest]:
        """Requests that workers do not know yet."""

    @property
    def scheduled_cached_reqs(self) -> CachedRequests:
        """Requests that workers know."""

    @property
    def num_scheduled_tokens(self) -> Mapping[str, int]:
        """Tokens to compute, by request id, including speculative tokens."""

    @property
    def preempted_req_ids(self) -> set[str] | None:
        """Requests that lost their blocks since the last step."""

    @property
    def kv_connector_block_state(self) -> BlockState | None:
        """What else vLLM says of blocks."""


@dataclass(slots=True, eq=False)
class RequestState:
    """The scheduler's side's state of one request.

    Attributes:
        request: vLLM's request.
        preemptions: the request's number of preemptions when it was last looked up.
        wishes: what the request asks for.
        may_load: False after a failed load, because a second load could fail, too, without end.
        is_asked: the hit was asked for since the request began or was preempted.
        asked_at: time of the seek on the clock of deadlines; or the end of the time for storage.
        ticket: ticket of the seek or offer whose event is awaited; 0 = none. Events with other tickets are outdated.
        session, lease: the request's lease and the number of its session; None = no lease.
        is_fetching: the awaited event waits for storage.
        is_late: the request was computed without the cache, because the event was late.
        wants_load: the hit was asked for, and the request has no blocks yet to load it into.
        load: slots of the hit, until the load is ordered or dropped.
        states: how many of the lease's last blocks are states. Such a lease is for a load, or for a store of them.
        loaded_units: behind how many units of the chain states were loaded; 0 = none.
        local_blocks: leading blocks that vLLM itself had cached when it asked for the hit.
        depth: depth of the lease, where its next store starts.
        offered: leading blocks that need no offer: they were offered, are in the hit, or were refused for now.
        recomputed_from: depth of the first block of the hit that could not be loaded and is computed instead; None
            after these blocks were offered again.
        trusted: leading blocks that are right whatever becomes of another connector's load; None = all.
        full: leading blocks that are computed, or will be at the end of this step, and are trusted.
        due: leading blocks that are to be offered without waiting for more.
        group_keys: keys of the chain of the blocks of several groups; None = one group.
        block_ids: the request's blocks in vLLM's pool; with several groups, they are looked up instead.
        is_finished: vLLM has forgotten the request.
        parting_start, parting: blocks that wait for their offer and are held meanwhile, and the depth of the first: of
            a finished request; with several groups of layers, of any request.
    """

    request: Request
    preemptions: int
    wishes: Wishes = NO_WISHES
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
    states: int = 0
    loaded_units: int = 0
    local_blocks: int = 0
    depth: int = 0
    offered: int = 0
    recomputed_from: int | None = None
    trusted: int | None = None
    full: int = 0
    due: int = 0
    group_keys: Sequence[bytes] | None = None
    block_ids: list[int] = field(default_factory=list)
    is_finished: bool = False
    parting_start: int = 0
    parting: list[int] = field(default_factory=list)

    @property
    def chain(self) -> Sequence[bytes]:
        """Keys of the chain of the request's blocks; their first 16 bytes count."""
        return self.request.block_hashes if self.group_keys is None else self.group_keys

    @property
    def loadable(self) -> int:
        """Number of blocks of the chain in the prepared load."""
        return 0 if self.load is None else len(self.load.slots) - self.states

    @property
    def is_prefill(self) -> bool:
        """Whether the request is computed for another engine. Those for embeddings have one token of output, too."""
        return self.request.max_tokens == PREFILL_TOKENS and self.request.pooling_params is None

    @property
    def is_preempted(self) -> bool:
        """Whether the request was preempted since it was last looked up: its blocks may belong to others by now."""
        return not self.is_finished and self.preemptions != self.request.num_preemptions

    @property
    def has_recomputed(self) -> bool:
        """Whether blocks of the hit that could not be loaded were computed instead, and the hit is complete now."""
        return self.recomputed_from is not None and self.due >= self.depth and not self.is_finished

    def forget_lease(self) -> None:
        """Reset the state that belongs to a lease, after the lease was released or lost."""
        self.lease = self.load = None
        self.depth = self.offered = self.states = 0
        self.recomputed_from = None
