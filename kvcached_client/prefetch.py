"""Prefetch: bring blocks from storage into the host pool before a prompt is acquired."""

from __future__ import annotations

import time
from typing import NamedTuple, TypedDict, Unpack

from kvcached_client.keys import KeyChain
from kvcached_client.lease import check_chain, check_kind, check_tenant
from kvcached_client.protocol.engine import Prefetch, Prefetched
from kvcached_client.protocol.grants import check_number, check_real, with_tokens
from kvcached_client.protocol.sessions import PREFETCH_DEADLINE_MS_MAX, StopPolicy
from kvcached_client.transport.session import SessionChannel
from kvcached_client.transport.steps import Steps, complete
from kvcached_client.types import ChainKind

#: Time for the messages, in addition to the time that the daemon may wait.
_WAY_MS = 1000


class PrefetchResult(NamedTuple):
    """The outcome of a prefetch.

    Attributes:
        blocks: leading blocks of the prompt that were in the index, or have been fetched.
        fetched: blocks fetched from storage by this prefetch.
        is_over: no more blocks will come. False if the time ran out; fetches that have begun continue.
        reason: why it is over: fetched, stored, nothing, below_threshold, recompute, rate_limited, too_many, no_room,
            stopped, failed, cleared, unavailable; or waiting.
    """

    blocks: int
    fetched: int
    is_over: bool
    reason: str


class PrefetchOptions(TypedDict, total=False):
    """The options of `PrefetchCalls.prefetch`."""

    stop: StopPolicy
    deadline_ms: int | None
    prefill_tokens_per_s: float
    full: bool
    tenant: str


class PendingPrefetch:
    """Sends a prefetch request; its reply may be fetched later, by the client's thread. See `Client.prefetch`."""

    def __init__(
        self,
        channel: SessionChannel,
        epoch: int,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
        tenant: str = "",
        token_ids: bytes | None = None,
    ) -> None:
        most_ms = PREFETCH_DEADLINE_MS_MAX if deadline_ms is None else check_number("deadline_ms", deadline_ms)
        self._channel = channel
        self.request = Prefetch(
            id=channel.next_id(),
            epoch=epoch,
            tokens=check_number("tokens", tokens),
            full=full,
            stop=stop,
            deadline_ms=most_ms,
            prefill_tokens_per_s=check_real("prefill_tokens_per_s", prefill_tokens_per_s),
            tenant=tenant,
        )
        deadline_ns = time.monotonic_ns() + (most_ms + _WAY_MS) * 1_000_000
        frames = with_tokens(keys, token_ids, are_wanted=channel.tells_tokens)
        channel.send(self.request, frames, deadline_ns=deadline_ns)

    @property
    def is_over(self) -> bool:
        """Whether the reply has arrived, so that `result` would not wait."""
        return self._channel.is_over(self.request)

    def result(self) -> PrefetchResult:
        """Wait for the reply. Call it once."""
        reply = self._channel.receive(self.request, Prefetched)[0]
        return PrefetchResult(reply.blocks, reply.fetched, reply.is_over, reply.reason)

    def abandon(self) -> None:
        """Ignore the reply. Fetches that have begun continue."""
        self._channel.abandon(self.request)


class PrefetchCalls:
    """The storage requests of `Client`."""

    _channel: SessionChannel
    _chain_kind: ChainKind
    epoch: int

    def prefetch(
        self,
        chain: KeyChain,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
        tenant: str = "",
    ) -> PrefetchResult:
        """Bring a prompt's blocks from storage into host memory, where `acquire` hits them.

        Args:
            chain: the prompt.
            stop: how long to wait: "best_effort" does not wait, "wait_complete" waits until every block has come,
                "timeout" waits at most as long as the daemon is configured to, which grows with the prompt.
            deadline_ms: upper bound of the wait, whatever `stop` says.
            prefill_tokens_per_s: speed of this engine. Blocks that it is predicted to compute sooner than they can be
                fetched are not fetched; 0: fetch all.
            full: also fetch the block with the prompt's last token.
            tenant: whose quota of the host pool the blocks count against, as in the `acquire` behind it.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`; with ``failures="miss"`` nothing was fetched.
        """
        options: PrefetchOptions = {
            "stop": stop,
            "deadline_ms": deadline_ms,
            "prefill_tokens_per_s": prefill_tokens_per_s,
            "full": full,
            "tenant": tenant,
        }
        return complete(prefetching(self._channel, self._chain_kind, chain, **options))

    def begin_prefetch(
        self,
        chain: KeyChain,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
        tenant: str = "",
    ) -> PendingPrefetch:
        """As `prefetch`, without waiting. Other calls may be made before the reply is fetched; errors are raised."""
        check_chain(chain)
        check_kind(chain, self._chain_kind)
        check_tenant(tenant)
        return PendingPrefetch(
            self._channel,
            self.epoch,
            chain.keys,
            chain.token_count,
            stop=stop,
            deadline_ms=deadline_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            full=full,
            tenant=tenant,
            token_ids=chain.token_range(0, chain.block_count),
        )


def prefetching(
    channel: SessionChannel, kind: ChainKind, chain: KeyChain, **options: Unpack[PrefetchOptions]
) -> Steps[PrefetchResult]:
    """`PrefetchCalls.prefetch`, in steps."""
    check_chain(chain)
    check_tenant(options.get("tenant", ""))
    with channel.misses:
        check_kind(chain, kind)
        token_ids = chain.token_range(0, chain.block_count)
        pending = PendingPrefetch(channel, channel.epoch, chain.keys, chain.token_count, token_ids=token_ids, **options)
        yield pending.request
        return pending.result()
    return PrefetchResult(0, 0, is_over=True, reason="unavailable")
