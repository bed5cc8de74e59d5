"""The lease of one request: cached blocks of its prompt, and slots of its own for everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Final, Literal, NamedTuple, Self, TypedDict, TypeVar, get_args

from msgspec import structs

from kvcached_client.blocks.block_table import SlotRanges
from kvcached_client.errors import DaemonUnreachable, ErrorCode, Refused, RequestError, bad_value, request_in_use
from kvcached_client.failpoints import failpoint
from kvcached_client.keys import KeyChain
from kvcached_client.lease_steps import LeaseSteps
from kvcached_client.protocol.engine import KNOWN_BLOCKS_MIN, Acquire, Acquired, Release
from kvcached_client.protocol.fields import PRIORITY_MAX, PRIORITY_MIN, TENANT_CHARS_MAX
from kvcached_client.protocol.grants import NOTHING, Grant, blocks_of, check_number, check_request, grant_of
from kvcached_client.rejoin import Reserve
from kvcached_client.transport.session import SessionChannel
from kvcached_client.transport.steps import Steps, complete
from kvcached_client.types import NO_FENCE, AcquiredPrefix, ChainKind, FenceSequence

#: Which blocks of a request others may find: all, those without output tokens, or none.
CachePolicy = Literal["all", "prompt", "nothing"]
_CACHE_POLICIES: Final = get_args(CachePolicy)

L = TypeVar("L", bound=LeaseSteps)


class Granted(NamedTuple):
    """What a session has granted, and to what kind of chains.

    Attributes:
        leases: by the id of their request; the daemon would grant a second one of an id on the same slots.
        reserve: provides slots while the daemon is away.
    """

    kind: ChainKind
    leases: Mapping[str, LeaseSteps]
    reserve: Reserve | None


class LeaseOptions(TypedDict, total=False):
    """The options of `Client.acquire`."""

    prompt_tokens: int | None
    reserve_tokens: int
    cache: CachePolicy
    full: bool
    priority: int
    tenant: str


class Lease(LeaseSteps):
    """Slots of one request, from `Client.acquire` until `finish` or `release`. A context manager that releases.

    With ``failures="miss"`` a lease may not be granted: it has no slots, and its methods do nothing. If a request of
    the lease gets no reply in time, it is sent again with the same id before the lease's next request, so that nothing
    is done twice or left out, however many requests of other leases come in between. After a `Client.rejoin` a lease
    whose release or finish had no reply is over.

    Some blocks of the hit may still be loading from host memory. Until `wait_loaded` returns, nothing can be committed:
    if the hit turns out shorter, the blocks that were cut off must be computed before everything after them.

    The slots stay in use until the highest fence of all calls has signalled, even if a release names a lower one. A
    lease that is dropped without a release holds them until its client is closed; a `ResourceWarning` names it.

    Attributes:
        granted: whether there is a lease at all.
        reason: with ``failures="miss"``: why the last call did nothing; None if it succeeded.
        id: the daemon's id of the lease; 0 if not granted.
        hit_blocks: leading blocks that were cached; a reader never writes them. `wait_loaded` may shorten the hit.
        ready_blocks: leading blocks of the hit that can be read now; the others can be read after their loads.
        loads: loads in flight, for `MappedPool.wait_layer`; empty after `wait_loaded`.
        depth: leading blocks that are committed or were cached; the next commit starts here.
    """

    def wait_loaded(self) -> int:
        """Wait until all loads of the lease have ended; returns the number of tokens that need no computing.

        If a load failed, the hit is now shorter, and `block_table` has slots of the lease's own for the blocks that
        were cut off. Compute from the returned token on, and repeat what was computed on top of those blocks.

        Without loads, and the second time, it returns at once. After an error, call it again or release the lease. With
        ``failures="miss"`` it then returns the number of tokens that are certainly there, and `is_loading` stays True:
        the slots of the rest of the hit may be neither read nor written.

        Raises:
            DeadlineExceeded: the loads have not ended in time.
            NoCapacity: the hit is shorter, and no slots are left for the blocks that were cut off.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        complete(self.loading())
        return self.ready_blocks * self._chain.block_size

    def allocate(self, tokens: int) -> None:
        """Get more slots, until `capacity_tokens` is at least `tokens`. Does nothing if it already is.

        Raises:
            NoCapacity: no slot is free and nothing can be evicted; the lease is unchanged.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        complete(self.allocating(tokens))

    def commit(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE, wait: bool = True) -> None:
        """Make the full blocks among the first `computed_tokens` tokens findable, as far as the cache policy allows.

        Call it after each chunk of prefill, and in every step of decoding: it skips blocks that are committed already,
        and sends nothing if no block is new. The block table stays valid: if another request committed a block first,
        the lease keeps its own slot of it.

        Args:
            computed_tokens: tokens from the start of the request whose KV is written, or will be once `fence` signals.
            fence: point in the engine's queued work after which the slots are written; 0 = they are written now.
            wait: False sends the request and returns. The lease's next call waits for the reply if it has not come by
                then, and starts from what it left. `Client.settle` raises what the daemon refused.

        Raises:
            BadRequest: `computed_tokens` exceeds the chain's tokens or the lease's capacity. With ``failures="miss"``,
                too, because this mistake of the caller could make wrong data findable.
            Refused: the lease is loading (`STILL_LOADING`): call `wait_loaded` first.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        self._carry_out(self.committing(computed_tokens, fence), wait=wait)

    def finish(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE, wait: bool = True) -> None:
        """`commit` and `release` in one message.

        With ``wait=False`` it sends the request and returns. If the daemon refuses the commit, the lease is released
        without it, and `Client.settle` raises the error.

        Raises:
            BadRequest, RequestError, TransportError: as `commit`. The lease is then still held, unless the daemon is
                gone: then it is over, and its new blocks may be lost. With ``failures="miss"`` it is released without
                the commit.
        """
        self._carry_out(self.finishing(computed_tokens, fence, gives_back=not wait), wait=wait)
        self._is_parting = not wait

    def release(self, *, fence: FenceSequence = NO_FENCE, wait: bool = True) -> None:
        """Give the slots back; blocks that were not committed are lost.

        Does nothing if the lease is already released, or ended with the session because the client is closed. With
        ``wait=False`` it sends the request and returns; `Client.settle` raises what the daemon refused.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        self._carry_out(self.releasing(fence), wait=wait)
        self._is_parting = not wait

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not self._is_parting:
            with self.parting(error):
                self.release()

    def _carry_out(self, steps: Steps[None], *, wait: bool) -> None:
        if wait:
            complete(steps)
        else:
            self._channel.posted.add(self.begin(steps))


def acquiring(
    make: Callable[..., L],
    channel: SessionChannel,
    name: str,
    chain: KeyChain,
    granted: Granted,
    *,
    prompt_tokens: int | None = None,
    reserve_tokens: int = 0,
    cache: CachePolicy = "all",
    full: bool = False,
    priority: int = 0,
    tenant: str = "",
) -> Steps[L]:
    """`Client.acquire`, in steps. The prompt is what the chain holds at the first one; `make` is the lease's class."""
    check_chain(chain)
    check_request(name)
    tokens, key_count = chain.token_count, chain.block_count
    reserve_tokens, priority = check_number("reserve_tokens", reserve_tokens), check_number("priority", priority)
    _check_prompt(tokens, prompt_tokens, reserve_tokens, cache, priority)
    check_tenant(tenant)
    prompt_blocks = blocks_of(tokens, chain.block_size)
    more = blocks_of(tokens + reserve_tokens, chain.block_size) - prompt_blocks
    own_blocks = key_count if prompt_tokens is None else int(prompt_tokens) // chain.block_size
    cacheable_blocks = {"all": None, "prompt": own_blocks, "nothing": 0}[cache]

    def attempt(deadline_ns: int) -> Steps[Grant]:
        _check_unused(channel, name, granted.leases.get(name))
        request = Acquire(
            id=channel.next_id(),
            epoch=channel.epoch,
            request=name,
            tokens=tokens,
            reserve=more,
            full=full,
            priority=priority,
            tenant=tenant,
            known=_known_blocks(channel, chain, key_count),
        )
        reply, frames = yield from _asking(channel, request, chain, key_count, deadline_ns)
        try:
            return grant_of(reply, frames, prompt_blocks + more)
        except RequestError:  # a grant that cannot be used is not kept
            channel.post(Release(id=channel.next_id(), epoch=channel.epoch, lease=reply.lease, reply=False))
            raise

    with channel.misses:
        check_kind(chain, granted.kind)
        try:
            grant = yield from channel.retry_when_freed(attempt)
            if key_count >= KNOWN_BLOCKS_MIN:
                chain.acquired = AcquiredPrefix(channel.prompts, key_count)
                channel.prompts.note(chain.key_range(key_count - 1, key_count), key_count)
        except DaemonUnreachable:
            reserve = granted.reserve if channel.is_gone else None
            slots = None if reserve is None else reserve.take(prompt_blocks + more)
            if slots is None:
                raise
            grant = NOTHING._replace(slots=SlotRanges.of(slots))
        failpoint("client.acquired")
        return make(channel, chain, cacheable_blocks, grant, name, granted.reserve)
    lease = make(channel, chain, cacheable_blocks, None, name)
    lease.reason = channel.misses.last_reason
    return lease


def check_chain(chain: KeyChain) -> None:
    """Refuse tokens, or keys, in place of a chain.

    Raises:
        BadRequest: it is no `KeyChain`.
    """
    if not isinstance(chain, KeyChain):
        raise bad_value(f"a {type(chain).__name__} in place of a chain", "pass client.chain(tokens)")


def check_kind(chain: KeyChain, kind: ChainKind) -> None:
    """Refuse a chain of another session's kind: its blocks would go into slots of another size, or never be found.

    Raises:
        BadRequest: its namespace, its block size or its algorithm is not the session's.
    """
    if chain.kind == kind:
        return
    theirs, ours = chain.kind._asdict(), kind._asdict()
    differs = [
        f"another {name}" if name == "namespace" else f"the {name} {theirs[name]} instead of {ours[name]}"
        for name in ours
        if theirs[name] != ours[name]
    ]
    raise bad_value(
        f"a chain with {' and '.join(differs)}",
        "make it with client.chain(tokens). After a clear, or with another client, the namespace is another one: "
        "chains from before have to be made anew",
    )


def check_tenant(tenant: object) -> None:
    """Refuse what is no tenant's name.

    Raises:
        BadRequest: it is no text, or too long.
    """
    if isinstance(tenant, str):
        if len(tenant) <= TENANT_CHARS_MAX:
            return
        what = f"{len(tenant)} characters"
    else:
        what = f"the type {type(tenant).__name__}"
    raise bad_value(f"a tenant of {what}", f"a tenant's name is text of at most {TENANT_CHARS_MAX} characters")


def _check_unused(channel: SessionChannel, name: str, lease: LeaseSteps | None) -> None:
    """Refuse a request whose lease is not released. On a session that is over, the daemon's word is the better one."""
    if lease is not None and lease.is_held and not (channel.is_closed or channel.is_stale):
        raise request_in_use(name, "has a lease that is not released")


def _check_prompt(tokens: int, prompt_tokens: int | None, reserve_tokens: int, cache: str, priority: int) -> None:
    if prompt_tokens is not None and not 1 <= check_number("prompt_tokens", prompt_tokens) <= tokens:
        raise bad_value(
            f"{prompt_tokens} tokens of the prompt, but the chain holds {tokens}",
            "prompt_tokens says how many of the chain's tokens are the prompt, at least one",
        )
    if tokens < 1:
        raise bad_value(f"a prompt of {tokens} tokens", "give a chain of at least one")
    if reserve_tokens < 0:
        raise bad_value(f"reserve_tokens {reserve_tokens}", "give 0 or more")
    if cache not in _CACHE_POLICIES:
        raise bad_value(f"cache {cache!r}", f"give one of {', '.join(map(repr, _CACHE_POLICIES))}")
    if not PRIORITY_MIN <= priority <= PRIORITY_MAX:
        raise bad_value(f"priority {priority}", f"give {PRIORITY_MIN} to {PRIORITY_MAX}")


def _known_blocks(channel: SessionChannel, chain: KeyChain, key_count: int) -> int:
    """How many leading blocks of a prompt are an earlier prompt whose keys the daemon has, unless it forgot them."""
    if key_count < KNOWN_BLOCKS_MIN:
        return 0
    acquired = chain.acquired
    if acquired is not None and acquired.session is channel.prompts and acquired.blocks <= key_count:
        return acquired.blocks
    return channel.prompts.known_blocks(chain.key_range(0, key_count))


def _asking(
    channel: SessionChannel, request: Acquire, chain: KeyChain, key_count: int, deadline_ns: int
) -> Steps[tuple[Acquired, list[bytes]]]:
    """Send an acquire, with all keys where the daemon has forgotten those that it should know."""
    if request.known:
        keys = chain.key_range(request.known - 1, key_count)
        try:
            return (yield from channel.asking(request, Acquired, (keys,), deadline_ns=deadline_ns))
        except Refused as error:
            if error.code is not ErrorCode.UNKNOWN_PREFIX:
                raise
        channel.prompts.forget(chain.key_range(request.known - 1, request.known))
        request = structs.replace(request, id=channel.next_id(), known=0)
    keys = chain.key_range(0, key_count)
    return (yield from channel.asking(request, Acquired, (keys,), deadline_ns=deadline_ns))
