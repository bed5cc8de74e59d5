"""What one request holds: the cached blocks of its prompt, and slots of its own for everything else."""

from __future__ import annotations

from operator import index
from typing import Final, Literal, NamedTuple, Self, get_args

import numpy as np
import numpy.typing as npt

from kvcached_client.block_table import compress_slots, expand_ranges
from kvcached_client.channel import SessionChannel
from kvcached_client.errors import ErrorCode, RequestError, Stale, request_error
from kvcached_client.keys import KeyChain
from kvcached_client.protocol import (
    INTEGER_MAX,
    Acquire,
    Acquired,
    Allocate,
    Allocated,
    Commit,
    Committed,
    Release,
    Released,
)
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId

#: Which blocks of a request others may find: prompt and output, only those without output tokens, or none.
CachePolicy = Literal["all", "prompt", "nothing"]

_REPLY_TO: Final[dict[type, type[Committed | Allocated | Released]]] = {
    Allocate: Allocated,
    Commit: Committed,
    Release: Released,
}
#: Answers after which there is nothing to give back, as after every `Stale` one.
_NOT_OURS: Final = frozenset({ErrorCode.ALREADY_RELEASED, ErrorCode.UNKNOWN_LEASE, ErrorCode.FOREIGN_LEASE})


class Grant(NamedTuple):
    """What the daemon granted."""

    id: LeaseId
    hit_blocks: int
    table: npt.NDArray[np.int32]  #: the hit's slots, then exclusive ones


_NOTHING: Final = Grant(LeaseId(0), 0, np.empty(0, np.int32))


class Lease:
    """Slots of one request, from `Client.acquire` until `finish` or `release`. A context manager that releases.

    With ``failures="miss"`` a lease may be not granted: it has no slots, and its methods do nothing. A request that got
    no answer in time is remembered and sent again, with its id, before the next one of this lease, so that nothing is
    done twice and nothing is left out.

    The slots are in use until the highest fence that any call named has signalled: a release with a lower one, or none,
    goes out with that.

    Attributes:
        granted: whether there is a lease at all.
        id: the daemon's name for it; 0 if not granted.
        hit_blocks: leading blocks that were cached, ready to read; never written by their reader.
        depth: leading blocks that are committed or were cached: where the next commit starts.
    """

    def __init__(self, channel: SessionChannel, chain: KeyChain, cache: CachePolicy, grant: Grant | None) -> None:
        """Use `Client.acquire`. Without a grant the lease is not granted."""
        self.granted = grant is not None
        self.id, self.hit_blocks, table = grant or _NOTHING
        self.depth = self.hit_blocks
        self._channel = channel
        self._chain = chain
        self._cacheable_blocks = {"all": None, "prompt": chain.token_count // chain.block_size, "nothing": 0}[cache]
        self._set_table(table)
        self._is_held = self.granted
        self._fence = NO_FENCE  #: the highest that was named
        #: Sent, and not answered in time: whether it took effect is unknown.
        self._unsettled: tuple[Allocate | Commit | Release, tuple[bytes, ...]] | None = None

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing."""
        return self.hit_blocks * self._chain.block_size

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Slots by position of the block in the request: int32 ``[blocks]``, read-only. `allocate` makes another."""
        return self._table

    @property
    def capacity_tokens(self) -> int:
        """Tokens that have a slot, those of the hit included."""
        return len(self._table) * self._chain.block_size

    def allocate(self, tokens: int) -> None:
        """Get slots until `capacity_tokens` is at least `tokens`. Does nothing if it is already.

        Raises:
            NoCapacity: nothing free and nothing evictable; the lease is as before.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self.granted:
            return
        with self._channel.misses:
            self._settle()
            blocks = blocks_of(tokens, self._chain.block_size) - len(self._table)
            if blocks > 0:
                request = Allocate(id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, blocks=blocks)
                self._perform(request)

    def commit(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """Make the full blocks among the first `computed_tokens` tokens findable, as far as the cache policy allows.

        Call it after each chunk of prefill and as often as wanted while decoding: blocks already committed are left
        out, and where none is new nothing is sent. The block table stays valid: the lease keeps its own slot of a
        block that somebody else committed first.

        Args:
            computed_tokens: tokens from the start of the request whose KV is written, or will be once `fence` signals.
            fence: point in the engine's queued work after which the slots are written; 0 = they are.

        Raises:
            BadRequest: `computed_tokens` exceeds the chain's tokens or the lease's capacity (with either setting of
                ``failures``: it is a mistake of the caller that could make wrong data findable).
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        with self._channel.misses:
            named = self._note_fence(fence)
            self._settle()
            if stop > self.depth:
                request = Commit(
                    id=self._channel.next_id(),
                    epoch=self._channel.epoch,
                    lease=self.id,
                    start=self.depth,
                    fence=named,
                )
                self._perform(request, self._blocks(stop))

    def finish(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """`commit` and `release` in one message.

        Raises:
            BadRequest, RequestError, TransportError: as `commit`. The lease is then still held, unless failures are
                misses: then it is released without the commit.
        """
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        with self._channel.misses:
            self._note_fence(fence)
            if not self._settle_release():
                self._settle()
                self._release(self._blocks(stop) if stop > self.depth else ())
            return
        if self._unsettled is None:
            self.release(fence=fence)

    def release(self, *, fence: FenceSequence = NO_FENCE) -> None:
        """Give slots and pins back; what was not committed is lost.

        Does nothing if they are already back, or the client is closed: then its session is over, and with it the lease.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self._is_held or self._channel.is_closed:
            return
        with self._channel.misses:
            self._note_fence(fence)
            if not self._settle_release():
                self._release(())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _set_table(self, table: npt.NDArray[np.int32]) -> None:
        table.flags.writeable = False
        self._table = table

    def _commit_stop(self, computed_tokens: int) -> int:
        if not 0 <= computed_tokens <= min(self._chain.token_count, self.capacity_tokens):
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"{computed_tokens} computed tokens, but the chain has {self._chain.token_count} tokens "
                f"and the lease slots for {self.capacity_tokens}",
                "extend the chain and allocate before computing",
            )
        stop = computed_tokens // self._chain.block_size
        return stop if self._cacheable_blocks is None else min(stop, self._cacheable_blocks)

    def _blocks(self, stop: int) -> tuple[bytes, bytes]:
        """Frames that name the blocks [depth, stop)."""
        return self._chain.key_range(self.depth, stop), compress_slots(self._table[self.depth : stop])

    def _note_fence(self, fence: FenceSequence) -> FenceSequence:
        """The fence as an int, remembered if it is the highest so far."""
        named = FenceSequence(index(fence))
        if not 0 <= named <= INTEGER_MAX:
            raise request_error(ErrorCode.BAD_VALUE, f"fence {named}", f"fences are numbers from 0 to {INTEGER_MAX}")
        self._fence = max(self._fence, named)
        return named

    def _release(self, frames: tuple[bytes, ...]) -> None:
        request = Release(
            id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, start=self.depth, fence=self._fence
        )
        self._perform(request, frames)

    def _settle_release(self) -> bool:
        """Whether a release was sent before; then its answer is in now."""
        if self._unsettled is None or not isinstance(self._unsettled[0], Release):
            return False
        self._perform(*self._unsettled)
        return True

    def _settle(self) -> None:
        """Get the answer to what was left unsettled; the lease is held afterwards."""
        if self._unsettled is not None:
            self._perform(*self._unsettled)
        if not self._is_held:
            raise request_error(ErrorCode.ALREADY_RELEASED, f"lease {self.id} is released", "acquire again")

    def _perform(self, request: Allocate | Commit | Release, frames: tuple[bytes, ...] = ()) -> None:
        """Ask, and take over what the answer says."""
        self._channel.send(request, frames)
        self._unsettled = (request, frames)
        try:
            reply, reply_frames = self._channel.receive(request, _REPLY_TO[type(request)])
        except RequestError as error:
            self._unsettled = None
            if isinstance(error, Stale) or error.code in _NOT_OURS:
                self._is_held = False
            raise
        self._unsettled = None
        if isinstance(reply, Committed):
            self.depth = reply.depth
        elif isinstance(reply, Allocated):
            self._set_table(np.concatenate((self._table, _slots(reply_frames[0], reply.blocks))))
        else:
            self._is_held = False


def acquire_lease(
    channel: SessionChannel, name: str, chain: KeyChain, *, reserve_tokens: int, cache: CachePolicy, full: bool
) -> Lease:
    """A lease for a request whose prompt is what `chain` holds now. See `Client.acquire`."""
    tokens = chain.token_count
    if tokens < 1 or reserve_tokens < 0 or cache not in get_args(CachePolicy):
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"a prompt of {tokens} tokens, a reserve of {reserve_tokens}, cache {cache!r}",
            f"at least one token; cache is one of {', '.join(get_args(CachePolicy))}",
        )
    prompt_blocks = blocks_of(tokens, chain.block_size)
    request = Acquire(
        id=channel.next_id(),
        epoch=channel.epoch,
        request=name,
        tokens=tokens,
        reserve=blocks_of(tokens + reserve_tokens, chain.block_size) - prompt_blocks,
        full=full,
    )
    with channel.misses:
        reply, frames = channel.ask(request, Acquired, (chain.keys,))
        if reply.loading:
            raise _strange("blocks that are still loading, which this client did not agree to")
        table = _slots(frames[1], prompt_blocks - reply.hit + request.reserve)
        if reply.hit or frames[0]:
            table = np.concatenate((_slots(frames[0], reply.hit), table))
        return Lease(channel, chain, cache, Grant(LeaseId(reply.lease), reply.hit, table))
    return Lease(channel, chain, cache, None)


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens, the last one perhaps in part."""
    return int(-(-tokens // block_size))


def _slots(packed: bytes, blocks: int) -> npt.NDArray[np.int32]:
    try:
        slots = expand_ranges(packed)
    except ValueError as error:
        raise _strange(str(error)) from None
    if len(slots) != blocks:
        raise _strange(f"{len(slots)} slots for {blocks} blocks")
    return slots


def _strange(what: str) -> RequestError:
    return request_error(ErrorCode.MALFORMED, f"the daemon replied with {what}", "client and daemon differ in version")
