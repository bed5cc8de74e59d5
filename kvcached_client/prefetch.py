"""Blocks that are to come from storage into the host pool before a prompt is acquired."""

from __future__ import annotations

import time
from typing import NamedTuple

from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import Prefetch, Prefetched
from kvcached_client.protocol.storage import PREFETCH_DEADLINE_MS_MAX, StopPolicy
from kvcached_client.transport.session import SessionChannel

#: What the way to the daemon and back may take besides the time that it waits.
_WAY_MS = 1000


class PrefetchResult(NamedTuple):
    """What became of a prefetch.

    Attributes:
        blocks: leading blocks of the prompt that were in the index, or have come.
        fetched: how many of them have come from storage through it.
        is_over: nothing more will come. False where the time was up: what has been begun still comes.
        reason: why it is over: fetched, nothing, below_threshold, recompute, rate_limited, no_room, stopped, failed,
            cleared, unavailable; or waiting.
    """

    blocks: int
    fetched: int
    is_over: bool
    reason: str


class PendingPrefetch:
    """A prefetch that was asked for, and whose answer may be fetched later. Used by its client's thread.

    Sends the request. See `Client.prefetch`.
    """

    def __init__(
        self,
        channel: SessionChannel,
        epoch: int,
        keys: bytes,
        tokens: int,
        *,
        stop: StopPolicy,
        deadline_ms: int | None,
        prefill_tokens_per_s: float,
        full: bool,
    ) -> None:
        most_ms = PREFETCH_DEADLINE_MS_MAX if deadline_ms is None else deadline_ms
        self._channel = channel
        self._request = Prefetch(
            id=channel.next_id(),
            epoch=epoch,
            tokens=tokens,
            full=full,
            stop=stop,
            deadline_ms=most_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
        )
        deadline_ns = time.monotonic_ns() + (most_ms + _WAY_MS) * 1_000_000
        channel.send(self._request, (keys,), deadline_ns=deadline_ns)

    @property
    def is_over(self) -> bool:
        """Whether `result` would not wait. Hears what the daemon has said."""
        return self._channel.is_over(self._request)

    def result(self) -> PrefetchResult:
        """What became of it; waits for the answer. Once only."""
        reply = self._channel.receive(self._request, Prefetched)[0]
        return PrefetchResult(reply.blocks, reply.fetched, reply.is_over, reply.reason)

    def abandon(self) -> None:
        """Nobody wants the answer any more. What the daemon has begun goes on."""
        self._channel.abandon(self._request)


class PrefetchCalls:
    """The requests about storage of a session on a device pool."""

    _channel: SessionChannel
    epoch: int

    def prefetch(
        self,
        chain: KeyChain,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
    ) -> PrefetchResult:
        """Bring a prompt's blocks from storage into host memory, where `acquire` hits them.

        Args:
            chain: the prompt.
            stop: how long to wait: "best_effort" not at all, "wait_complete" until all has come, "timeout" as long as
                the daemon is configured to, which grows with the prompt.
            deadline_ms: at most so long, whatever `stop` says.
            prefill_tokens_per_s: how fast this engine computes. Blocks that it is predicted to compute sooner than
                they come are not fetched; 0: all are.
            full: also the block with the prompt's last token.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`; with ``failures="miss"`` nothing has come.
        """
        with self._channel.misses:
            return self.begin_prefetch(
                chain, stop=stop, deadline_ms=deadline_ms, prefill_tokens_per_s=prefill_tokens_per_s, full=full
            ).result()
        return PrefetchResult(0, 0, is_over=True, reason="unavailable")

    def begin_prefetch(
        self,
        chain: KeyChain,
        *,
        stop: StopPolicy = "timeout",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        full: bool = False,
    ) -> PendingPrefetch:
        """As `prefetch`, and does not wait. Other calls may be made before the answer is fetched; errors are raised."""
        return PendingPrefetch(
            self._channel,
            self.epoch,
            chain.keys,
            chain.token_count,
            stop=stop,
            deadline_ms=deadline_ms,
            prefill_tokens_per_s=prefill_tokens_per_s,
            full=full,
        )
