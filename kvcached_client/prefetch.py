"""Blocks that are to come from storage into the host pool before a prompt is acquired."""

from __future__ import annotations

import time
from typing import NamedTuple

from kvcached_client.channel import SessionChannel
from kvcached_client.protocol import Prefetch, Prefetched
from kvcached_client.protocol_storage import PREFETCH_DEADLINE_MS_MAX, StopPolicy

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


def ask_prefetch(
    channel: SessionChannel,
    epoch: int,
    keys: bytes,
    tokens: int,
    *,
    stop: StopPolicy,
    deadline_ms: int | None,
    prefill_tokens_per_s: float,
    full: bool,
) -> PrefetchResult:
    """Ask for a prefetch and wait as long as it is to be waited for. See `Client.prefetch`."""
    most_ms = PREFETCH_DEADLINE_MS_MAX if deadline_ms is None else deadline_ms
    request = Prefetch(
        id=channel.next_id(),
        epoch=epoch,
        tokens=tokens,
        full=full,
        stop=stop,
        deadline_ms=most_ms,
        prefill_tokens_per_s=prefill_tokens_per_s,
    )
    deadline_ns = time.monotonic_ns() + (most_ms + _WAY_MS) * 1_000_000
    reply = channel.ask(request, Prefetched, (keys,), deadline_ns=deadline_ns)[0]
    return PrefetchResult(reply.blocks, reply.fetched, reply.is_over, reply.reason)
