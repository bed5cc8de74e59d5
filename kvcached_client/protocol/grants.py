"""What the daemon grants to a lease, and checks of numbers that go into its messages."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from operator import index
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import SlotRanges
from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.errors import RequestError, bad_reply, bad_value, request_error, request_in_use
from kvcached_client.protocol.engine import INTEGER_MAX, Acquired, Held, LoadTicket, StorePrepared, StoresPrepared
from kvcached_client.protocol.fields import TOKENS
from kvcached_client.types import KEY_SIZE_BYTES, FenceSequence, LeaseId, TransferId, unpack_ranges

Slots = npt.NDArray[np.int32]
#: Indices of an engine's blocks.
BlockTable = Sequence[int] | npt.NDArray[np.integer[Any]]


class Grant(NamedTuple):
    """A granted lease."""

    id: LeaseId
    hit_blocks: int
    ready_blocks: int
    loads: tuple[LoadTicket, ...]
    slots: SlotRanges  #: the hit's slots, then exclusive ones


class Declaration(NamedTuple):
    """What the next daemon must know of a lease. See `protocol.sessions.Declare`."""

    request: str
    tokens: int
    hit: int
    frames: tuple[bytes, bytes, bytes]


class Piece(NamedTuple):
    """Consecutive blocks of a chain: the depth of the first, and their number."""

    start: int
    blocks: int


class PreparedLoad(NamedTuple):
    """The host slots to read, one for each block.

    Attributes:
        transfer: id of the copy, for shards and daemon.
        generation: generation that the blocks' headers must have.
        slots: int32 ``[blocks]``.
        start: depth of the first block.
    """

    transfer: TransferId
    generation: int
    slots: npt.NDArray[np.int32]
    start: int

    def __repr__(self) -> str:
        what = f"transfer={self.transfer}, generation={self.generation}"
        return f"PreparedLoad({what}, start={self.start}, blocks={len(self.slots)})"

    def job(self, keys: bytes, blocks: BlockTable, *, first: int = 0) -> BlockJob:
        """What each shard has to `load`.

        Args:
            keys: 16 bytes for each block of the prompt, from its beginning.
            blocks: the engine's blocks: `blocks[i]` is the index of the one at depth ``first + i`` of the prompt. It
                may be longer than needed, and is copied.
            first: depth of the first of `blocks`.

        Raises:
            BadRequest: `keys` or `blocks` do not cover the prepared blocks.
        """
        span = _span_of(Piece(self.start, len(self.slots)), self.slots, check_keys(keys), blocks, first)
        return BlockJob(self.transfer, self.generation, (span,), self.start)


class Hold(NamedTuple):
    """A lease.

    Attributes:
        lease: its id.
        hit: leading blocks that the host pool holds for it.
        filling: blocks behind these that other sessions were storing. A lease never gets them; to wait for them,
            release it, `prefetch`, and acquire again.
        load: the load of the hit's blocks from `load_from` on. None if it was not asked for, if there are no such
            blocks, if others are storing blocks behind the hit, or if the daemon starts no copies now.
    """

    lease: LeaseId
    hit: int
    filling: int = 0
    load: PreparedLoad | None = None


class PreparedStore(NamedTuple):
    """The host slots to write.

    Attributes:
        transfer: id of the copy; 0 if there is nothing to copy.
        depth: new depth of the lease, where its next store starts. The host pool had no room for offered blocks beyond
            it. Under some write policies not every block before it is copied.
        generation: generation to write into the blocks' headers.
        pieces: the blocks to copy. Pieces before the offered blocks replace copies that were lost.
        slots: int32, one for each block of the pieces, in their order.
    """

    transfer: TransferId
    depth: int
    generation: int
    pieces: tuple[Piece, ...]
    slots: npt.NDArray[np.int32]

    def __repr__(self) -> str:
        what = f"transfer={self.transfer}, generation={self.generation}"
        return f"PreparedStore({what}, depth={self.depth}, pieces={len(self.pieces)}, blocks={len(self.slots)})"

    def job(self, keys: bytes, blocks: BlockTable, *, first: int = 0) -> BlockJob:
        """What each shard has to `store`, unless `transfer` is 0. See `PreparedLoad.job`.

        Raises:
            BadRequest: `keys` or `blocks` do not cover the pieces.
        """
        spans, at, keys = [], 0, check_keys(keys)
        for piece in self.pieces:
            spans.append(_span_of(piece, self.slots[at : at + piece.blocks], keys, blocks, first))
            at += piece.blocks
        return BlockJob(self.transfer, self.generation, tuple(spans))


class Offered(NamedTuple):
    """The next computed blocks of a lease: as the arguments of `OffloadClient.begin_prepare_store`."""

    lease: LeaseId
    start: int
    keys: bytes
    token_ids: bytes | None = None

    def __repr__(self) -> str:
        return f"Offered(lease={self.lease}, start={self.start}, blocks={len(self.keys) // KEY_SIZE_BYTES})"

    def checked(self) -> Offered:
        """The same, its start an int and its keys bytes.

        Raises:
            BadRequest: as `check_number` and `check_keys`.
        """
        return Offered(self.lease, check_number("start", self.start), check_keys(self.keys), self.token_ids)


def with_tokens(keys: bytes, token_ids: bytes | None, *, are_wanted: bool) -> tuple[bytes, ...]:
    """The frames of keys, and of their tokens if the daemon wants them and the message has room for them."""
    if token_ids is None or not are_wanted or len(token_ids) > TOKENS.size_bytes_max:
        return (keys,)
    return keys, token_ids


def check_token_ids(keys: bytes, token_ids: bytes | None, block_size: int) -> None:
    """Refuse tokens that are not those of as many blocks as there are keys.

    Raises:
        BadRequest: they are more or fewer.
    """
    blocks = len(keys) // KEY_SIZE_BYTES
    if token_ids is not None and len(token_ids) != blocks * block_size * TOKENS.item_bytes:
        raise bad_value(
            f"{len(token_ids)} bytes of token_ids for {blocks} blocks of {block_size} tokens",
            "give 4 bytes for each token of all of these blocks, as KeyChain.token_range does",
        )


def offered_frames(offers: Sequence[Offered], block_size: int) -> tuple[bytes, ...]:
    """The frames of offers: their keys, and their tokens if any offer has some and the message has room for them.

    Args:
        offers: in order.
        block_size: tokens in a block; 0 = nobody wants to know the tokens.
    """
    keys = b"".join([offer.keys for offer in offers])
    for offer in offers if block_size else ():
        check_token_ids(offer.keys, offer.token_ids, block_size)
    size_bytes = len(keys) // KEY_SIZE_BYTES * block_size * TOKENS.item_bytes
    if not 0 < size_bytes <= TOKENS.size_bytes_max or all(offer.token_ids is None for offer in offers):
        return (keys,)
    untold = b"\xff" * (block_size * TOKENS.item_bytes)
    tokens = [
        untold * (len(offer.keys) // KEY_SIZE_BYTES) if offer.token_ids is None else offer.token_ids for offer in offers
    ]
    return keys, b"".join(tokens)


class Holds:
    """The leases that a session has been given, by id, and by that of their request, until they are given back."""

    def __init__(self) -> None:
        self._requests: dict[LeaseId, str] = {}
        self._leases: dict[str, LeaseId] = {}

    def check_unused(self, request: str) -> None:
        """Refuse a request that has a lease: who acquires again would be given the same one.

        Raises:
            BadRequest: as `check_request`.
            Refused: the lease was not given back.
        """
        check_request(request)
        if request in self._leases:
            raise request_in_use(request, "has a lease that is not released")

    def add(self, request: str, lease: LeaseId) -> None:
        """A lease was granted."""
        self._requests[lease], self._leases[request] = request, lease

    def drop(self, lease: LeaseId) -> None:
        """A release of a lease was sent."""
        request = self._requests.pop(lease, None)
        if request is not None:
            self._leases.pop(request, None)


NOTHING: Final = Grant(LeaseId(0), 0, 0, (), SlotRanges(b"", 0))


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
    slots = ranges_of(frames[1], blocks - reply.hit)
    if reply.hit or frames[0]:
        slots = ranges_of(frames[0], reply.hit) + slots
    return Grant(LeaseId(reply.lease), reply.hit, reply.ready, reply.loads, slots)


def hold_of(held: Held, frames: list[bytes], blocks: int, load_from: int | None) -> Hold:
    """The lease in a reply to `Acquire` in offload mode.

    Raises:
        BadRequest: the reply contradicts itself, or is not for `blocks` blocks or this load.
    """
    if held.hit + held.filling > blocks:
        raise bad_reply(
            f"the daemon replied with a hit of {held.hit} blocks, and {held.filling} behind it, for {blocks} keys"
        )
    lease = LeaseId(held.lease)
    if not held.transfer and not frames:
        return Hold(lease, held.hit, held.filling)
    if load_from is None or load_from >= held.hit or not held.transfer or not frames:
        raise bad_reply(f"the daemon announced load {held.transfer} from {load_from} on, for a hit of {held.hit}")
    slots = slots_of(frames[0], held.hit - load_from)
    load = PreparedLoad(TransferId(held.transfer), held.generation, slots, load_from)
    return Hold(lease, held.hit, held.filling, load)


def check_keys(keys: bytes | bytearray | memoryview) -> bytes:
    """Packed keys as bytes, which nobody changes later.

    Raises:
        BadRequest: they are something else, such as a chain.
    """
    if not isinstance(keys, (bytes, bytearray, memoryview)):
        raise bad_value(f"a {type(keys).__name__} in place of keys", "pass chain.keys, or chain.key_range(start, stop)")
    return keys if isinstance(keys, bytes) else bytes(keys)


def check_request(request: object) -> None:
    """Refuse what is no request's id.

    Raises:
        BadRequest: it is no text.
    """
    if not isinstance(request, str):
        raise bad_value(f"a {type(request).__name__} in place of a request's id", "give each request a text as its id")


def check_real(what: str, number: object) -> float:
    """A number as a float.

    Raises:
        BadRequest: it is something else.
    """
    try:
        if isinstance(number, Real) and not isinstance(number, bool):
            return float(number)
    except OverflowError:  # a whole number may have any size, and too many digits to be printed
        raise bad_value(f"{what} is too large", "give a number up to 1e308") from None
    raise bad_value(f"{what} {number!r}", "give a number")


def check_number(what: str, number: object) -> int:
    """A whole number as an int.

    Raises:
        BadRequest: it is something else.
    """
    if type(number) is int:  # as nearly all are
        return number
    try:
        if not isinstance(number, bool):
            return index(number)  # type: ignore[arg-type]
    except TypeError:
        pass
    raise bad_value(f"{what} {number!r}", "give a whole number")


def check_fence(fence: FenceSequence) -> FenceSequence:
    """A fence as an int.

    Raises:
        BadRequest: it does not fit into a message.
    """
    named = FenceSequence(check_number("fence", fence))
    if not 0 <= named <= INTEGER_MAX:
        raise bad_value(f"fence {named}", f"fences are numbers from 0 to {INTEGER_MAX}")
    return named


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks needed for `tokens`; the last one may be partly filled."""
    return int(-(-tokens // block_size))


def slots_of(packed: bytes, blocks: int) -> Slots:
    """The slots of a frame of ranges, one by one.

    Raises:
        BadRequest: as `ranges_of`.
    """
    return ranges_of(packed, blocks).table


def ranges_of(packed: bytes, blocks: int) -> SlotRanges:
    """The slots of a frame of ranges.

    Raises:
        BadRequest: the frame is malformed, or has another number of slots than `blocks`.
    """
    try:
        slots = SlotRanges.checked(packed)
    except ValueError as error:
        raise bad_reply(f"the daemon replied with {error}") from None
    if slots.count != blocks:
        raise bad_reply(f"the daemon replied with {slots.count} slots for {blocks} blocks")
    return slots


def store_of(reply: StorePrepared, pieces: bytes, slots: bytes) -> PreparedStore:
    """The plan in a reply to `PrepareStore`.

    Raises:
        BadRequest: the frames are malformed, or do not fit each other.
    """
    named = tuple(Piece(*pair) for pair in unpack_ranges(pieces))
    found = slots_of(slots, sum(piece.blocks for piece in named))
    return PreparedStore(TransferId(reply.transfer), reply.depth, reply.generation, named, found)


def stores_of(reply: StoresPrepared, pieces: bytes, slots: bytes, offers: int) -> list[PreparedStore | RequestError]:
    """The plans in a reply to `PrepareStores`, or the error of an offer that was refused.

    Raises:
        BadRequest: the reply is malformed, contradicts itself, or is not for as many offers.
    """
    named = [Piece(*pair) for pair in unpack_ranges(pieces)]
    found = slots_of(slots, sum(piece.blocks for piece in named))
    counted = sum(outcome.pieces for outcome in reply.outcomes)
    if len(reply.outcomes) != offers or counted != len(named):
        raise bad_reply(f"the daemon replied to {len(reply.outcomes)} of {offers} offers, with {len(named)} pieces")
    plans: list[PreparedStore | RequestError] = []
    first = at = 0
    for outcome in reply.outcomes:
        own = tuple(named[first : first + outcome.pieces])
        end = at + sum(piece.blocks for piece in own)
        if outcome.refusal is None:
            transfer = TransferId(outcome.transfer)
            plans.append(PreparedStore(transfer, outcome.depth, outcome.generation, own, found[at:end]))
        else:
            plans.append(request_error(outcome.refusal, outcome.why, ""))
        first, at = first + outcome.pieces, end
    return plans


def _span_of(piece: Piece, slots: Slots, keys: bytes, blocks: BlockTable, first: int) -> JobSpan:
    """The span of a piece of a prompt."""
    start, stop = piece.start, piece.start + piece.blocks
    if len(keys) < stop * KEY_SIZE_BYTES or not first <= start <= stop <= first + len(blocks):
        raise bad_value(
            f"blocks [{start}, {stop}) are prepared, with keys of {len(keys) // KEY_SIZE_BYTES} blocks and a table of "
            f"blocks [{first}, {first + len(blocks)})",
            "give the keys from the beginning of the prompt, and a table that has all prepared blocks",
        )
    parent = keys[max(start - 1, 0) * KEY_SIZE_BYTES : start * KEY_SIZE_BYTES]
    own = keys[start * KEY_SIZE_BYTES : stop * KEY_SIZE_BYTES]
    return JobSpan(start, parent, own, np.array(blocks[start - first : stop - first], np.int64), slots)
