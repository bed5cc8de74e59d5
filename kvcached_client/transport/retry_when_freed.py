"""Waiting for slots that copies under way are about to free."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvcached_client.errors import DeadlineExceeded, ErrorCode, NoCapacity
from kvcached_client.protocol.engine import BLOCKS_PER_MESSAGE_MAX, Vacancy, Vacant
from kvcached_client.transport.session import SessionChannel

T = TypeVar("T")


def with_vacancies(channel: SessionChannel, attempt: Callable[[int], T]) -> T:
    """What ``attempt(deadline_ns)`` returns; where capacity is only pending, the daemon says when to try again.

    An attempt that fails says nothing about how many slots it lacks, for the client does not know the hit. So each wait
    is for one slot more than there were: it ends with the first copy that frees any.

    Args:
        channel: all attempts and waits together take as long as one of its calls may.
        attempt: a request with an id of its own each time.

    Raises:
        NoCapacity: nothing under way frees enough, or not in time. What was asked for was not granted.
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
        request = Vacancy(id=channel.next_id(), epoch=channel.epoch, blocks=wanted)
        try:
            vacant, _ = channel.ask(request, Vacant, deadline_ns=deadline_ns)
        except DeadlineExceeded:
            raise shortage from None
        available = vacant.available
        # Less than was waited for: no copy is under way that frees any.
        is_last = available < wanted
