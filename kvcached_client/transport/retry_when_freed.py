"""Retry when slots are freed: wait for slots that copies in flight are about to free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvcached_client.errors import DeadlineExceeded, ErrorCode, NoCapacity
from kvcached_client.protocol.engine import BLOCKS_PER_MESSAGE_MAX, SlotsAvailable, WaitForSlots
from kvcached_client.transport.session import SessionChannel

T = TypeVar("T")


def retry_when_freed(channel: SessionChannel, attempt: Callable[[int], T]) -> T:
    """Call ``attempt(deadline_ns)``; if capacity is pending, wait until slots are freed and call it again.

    The client does not know how many slots a failed attempt lacks, because it does not know the hit. So each wait is
    for one slot more than were available: it ends with the first copy that frees any.

    Args:
        channel: all attempts and waits together take at most as long as one of its calls.
        attempt: sends a request, each time with a new id.

    Raises:
        NoCapacity: no copy in flight frees enough slots, or not in time. Nothing was granted.
    """
    deadline_ns = channel.deadline_ns()
    available, is_last = 0, False
    while True:
        try:
            return attempt(deadline_ns)
        except NoCapacity as error:
            if error.code != ErrorCode.CAPACITY_PENDING or is_last or available >= BLOCKS_PER_MESSAGE_MAX:
                raise
            shortage = error
        wanted = available + 1
        request = WaitForSlots(id=channel.next_id(), epoch=channel.epoch, blocks=wanted)
        try:
            freed, _ = channel.ask(request, SlotsAvailable, deadline_ns=deadline_ns)
        except DeadlineExceeded:
            raise shortage from None
        available = freed.available
        # Fewer than requested: no copy in flight will free any.
        is_last = available < wanted
