"""What the daemon grants to a lease, and checks of numbers that go into its messages."""

from __future__ import annotations

from operator import index
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import expand_ranges
from kvcached_client.errors import bad_reply, bad_value
from kvcached_client.protocol.engine import INTEGER_MAX, Acquired, LoadTicket
from kvcached_client.types import FenceSequence, LeaseId

Slots = npt.NDArray[np.int32]


class Grant(NamedTuple):
    """A granted lease."""

    id: LeaseId
    hit_blocks: int
    ready_blocks: int
    loads: tuple[LoadTicket, ...]
    table: Slots  #: the hit's slots, then exclusive ones


class Declaration(NamedTuple):
    """What the next daemon must know of a lease. See `protocol.sessions.Declare`."""

    request: str
    tokens: int
    hit: int
    frames: tuple[bytes, bytes, bytes]


NOTHING: Final = Grant(LeaseId(0), 0, 0, (), np.empty(0, np.int32))


def grant_of(reply: Acquired, frames: list[bytes], blocks: int) -> Grant:
    """The grant in a reply to `Acquire`.

    Raises:
        BadRequest: the reply contradicts itself, or is not for `blocks` blocks.
    """
    if not reply.ready <= reply.hit <= blocks or (reply.ready < reply.hit and not reply.loads):
        raise bad_reply(
            f"the daemon replied with a hit of {reply.hit} of {blocks} blocks, {reply.ready} of them ready, and "
            f"{len(reply.loads)} loads"
        )
    table = slots_of(frames[1], blocks - reply.hit)
    if reply.hit or frames[0]:
        table = np.concatenate((slots_of(frames[0], reply.hit), table))
    return Grant(LeaseId(reply.lease), reply.hit, reply.ready, reply.loads, table)


def check_fence(fence: FenceSequence) -> FenceSequence:
    """A fence as an int.

    Raises:
        BadRequest: it does not fit into a message.
    """
    named = FenceSequence(index(fence))
    if not 0 <= named <= INTEGER_MAX:
        raise bad_value(f"fence {named}", f"fences are numbers from 0 to {INTEGER_MAX}")
    return named


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks needed for `tokens`; the last one may be partly filled."""
    return int(-(-tokens // block_size))


def slots_of(packed: bytes, blocks: int) -> Slots:
    """The slots of a frame of ranges.

    Raises:
        BadRequest: the frame is malformed, or has another number of slots than `blocks`.
    """
    try:
        slots = expand_ranges(packed)
    except ValueError as error:
        raise bad_reply(f"the daemon replied with {error}") from None
    if len(slots) != blocks:
        raise bad_reply(f"the daemon replied with {len(slots)} slots for {blocks} blocks")
    return slots
