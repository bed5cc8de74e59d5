"""What the daemon grants, as a lease holds it."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import expand_ranges
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import Acquired, LoadTicket
from kvcached_client.types import LeaseId

Slots = npt.NDArray[np.int32]


class Grant(NamedTuple):
    """What the daemon granted."""

    id: LeaseId
    hit_blocks: int
    ready_blocks: int
    loads: tuple[LoadTicket, ...]
    table: Slots  #: the hit's slots, then exclusive ones


class Declaration(NamedTuple):
    """What a daemon that was started anew has to know of a lease. See `protocol_return.Declare`."""

    request: str
    tokens: int
    hit: int
    frames: tuple[bytes, bytes, bytes]


NOTHING: Final = Grant(LeaseId(0), 0, 0, (), np.empty(0, np.int32))


def grant_of(reply: Acquired, frames: list[bytes], blocks: int) -> Grant:
    """The grant that an answer to `Acquire` holds.

    Raises:
        BadRequest: it contradicts itself, or is not for so many blocks.
    """
    if not reply.ready <= reply.hit <= blocks or (reply.ready < reply.hit and not reply.loads):
        raise _strange(
            f"a hit of {reply.hit} of {blocks} blocks, {reply.ready} of them ready, and {len(reply.loads)} loads"
        )
    table = slots_of(frames[1], blocks - reply.hit)
    if reply.hit or frames[0]:
        table = np.concatenate((slots_of(frames[0], reply.hit), table))
    return Grant(LeaseId(reply.lease), reply.hit, reply.ready, reply.loads, table)


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens, the last one perhaps in part."""
    return int(-(-tokens // block_size))


def slots_of(packed: bytes, blocks: int) -> Slots:
    """A frame of ranges as so many slots.

    Raises:
        BadRequest: they are others, or more, or fewer.
    """
    try:
        slots = expand_ranges(packed)
    except ValueError as error:
        raise _strange(str(error)) from None
    if len(slots) != blocks:
        raise _strange(f"{len(slots)} slots for {blocks} blocks")
    return slots


def _strange(what: str) -> RequestError:
    return request_error(ErrorCode.MALFORMED, f"the daemon replied with {what}", "client and daemon differ in version")
