"""The lease of one request: cached blocks of its prompt, and slots of its own for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, Literal, Self

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import compress_slots
from kvcached_client.errors import DaemonUnreachable, ErrorCode, RequestError, Stale, bad_value, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.grants import NOTHING, Declaration, Grant, Slots, blocks_of, check_fence, slots_of
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import (
    Allocate,
    Allocated,
    Commit,
    Committed,
    Load,
    Loaded,
    Release,
    Released,
)
from kvcached_client.rejoin import Reserve
from kvcached_client.transport.misses import FailureReason
from kvcached_client.transport.session import SessionChannel
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId

#: Which blocks of a request others may find: all, those without output tokens, or none.
CachePolicy = Literal["all", "prompt", "nothing"]

_REPLY_TO: Final[dict[type, type[Committed | Allocated | Released]]] = {
    Allocate: Allocated,
    Commit: Committed,
    Release: Released,
}
#: Refusals that mean that there is nothing to give back; so does every `Stale`.
_NOT_OURS: Final = frozenset({ErrorCode.ALREADY_RELEASED, ErrorCode.UNKNOWN_LEASE, ErrorCode.FOREIGN_LEASE})


class Lease:
    """Slots of one request, from `Client.acquire` until `finish` or `release`. A context manager that releases.

    With ``failures="miss"`` a lease may not be granted: it has no slots, and its methods do nothing. If a request of
    the lease gets no reply in time, it is sent again with the same id before the lease's next request, so that nothing
    is done twice or left out.

    Some blocks of the hit may still be loading from host memory. Until `wait_loaded` returns, nothing can be committed:
    if the hit turns out shorter, the blocks that were cut off must be computed before everything after them.

    The slots stay in use until the highest fence of all calls has signalled, even if a release names a lower one.

    Attributes:
        granted: whether there is a lease at all.
        reason: with ``failures="miss"``: why the last call did nothing; None if it succeeded.
        id: the daemon's id of the lease; 0 if not granted.
        hit_blocks: leading blocks that were cached; a reader never writes them. `wait_loaded` may shorten the hit.
        ready_blocks: leading blocks of the hit that can be read now; the others can be read after their loads.
        loads: loads in flight, for `MappedPool.wait_layer`; empty after `wait_loaded`.
        depth: leading blocks that are committed or were cached; the next commit starts here.
    """

    def __init__(
        self,
        channel: SessionChannel,
        chain: KeyChain,
        cache: CachePolicy,
        grant: Grant | None,
        name: str,
        reserve: Reserve | None = None,
    ) -> None:
        """Use `Client.acquire`. `grant` is None if the lease is not granted.

        `reserve` provides slots while the daemon is away; if the grant has no id, all its slots are from the reserve.
        """
        self.granted = grant is not None
        self.reason: FailureReason | None = None
        self.id, self.hit_blocks, self.ready_blocks, self.loads, table = grant or NOTHING
        self.depth = self.hit_blocks
        self._channel = channel
        self._name = name
        self._reserve = reserve
        #: Slots taken from the reserve while the daemon is away.
        self._borrowed = table if grant is not None and not self.id else NOTHING.table
        self._chain = chain
        self._cacheable_blocks = {"all": None, "prompt": chain.token_count // chain.block_size, "nothing": 0}[cache]
        self._set_table(table)
        self._is_held = self.granted
        self._fence = NO_FENCE  #: the highest that was named
        #: Sent without a reply in time: whether it took effect is unknown.
        self._unsettled: tuple[Allocate | Commit | Release, tuple[bytes, ...]] | None = None
        #: The same for the request of `wait_loaded`: only `wait_loaded` may shorten the hit.
        self._unsettled_load: Load | None = None

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, including those of blocks that are still loading."""
        return self.hit_blocks * self._chain.block_size

    @property
    def is_loading(self) -> bool:
        """Whether blocks of the hit are still loading; `wait_loaded` waits for them."""
        return bool(self.loads)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The slot of each block of the request: int32 ``[blocks]``, read-only. `allocate` makes a new array."""
        return self._table

    @property
    def capacity_tokens(self) -> int:
        """Tokens that have a slot, including those of the hit."""
        return len(self._table) * self._chain.block_size

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
        if self.is_loading:
            failpoint("client.load")
            with self._missable():
                self._channel.retry_when_freed(self._wait_for_loads)
        return self.ready_blocks * self._chain.block_size

    def allocate(self, tokens: int) -> None:
        """Get more slots, until `capacity_tokens` is at least `tokens`. Does nothing if it already is.

        Raises:
            NoCapacity: no slot is free and nothing can be evicted; the lease is unchanged.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self.granted:
            return
        with self._missable():
            self._channel.retry_when_freed(lambda deadline_ns: self._grow(tokens, deadline_ns))

    def commit(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """Make the full blocks among the first `computed_tokens` tokens findable, as far as the cache policy allows.

        Call it after each chunk of prefill, and in every step of decoding: it skips blocks that are committed already,
        and sends nothing if no block is new. The block table stays valid: if another request committed a block first,
        the lease keeps its own slot of it.

        Args:
            computed_tokens: tokens from the start of the request whose KV is written, or will be once `fence` signals.
            fence: point in the engine's queued work after which the slots are written; 0 = they are written now.

        Raises:
            BadRequest: `computed_tokens` exceeds the chain's tokens or the lease's capacity. With ``failures="miss"``,
                too, because this mistake of the caller could make wrong data findable.
            Refused: the lease is loading (`STILL_LOADING`): call `wait_loaded` first.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        with self._missable():
            named = self._note_fence(fence)
            self._settle()
            self._check_loaded()
            if stop > self.depth:
                request = Commit(
                    id=self._channel.next_id(),
                    epoch=self._channel.epoch,
                    lease=self.id,
                    start=self.depth,
                    fence=named,
                )
                failpoint("client.commit")
                self._perform(request, self._blocks(stop))

    def finish(self, computed_tokens: int, *, fence: FenceSequence = NO_FENCE) -> None:
        """`commit` and `release` in one message.

        Raises:
            BadRequest, RequestError, TransportError: as `commit`. The lease is then still held; with
                ``failures="miss"`` it is released without the commit.
        """
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        with self._missable():
            self._note_fence(fence)
            if not self._settle_release():
                self._settle()
                self._check_loaded()
                self._release(self._blocks(stop) if stop > self.depth else ())
            return
        if self._unsettled is None or not isinstance(self._unsettled[0], Release):
            reason = self.reason
            self.release(fence=fence)
            self.reason = reason

    def release(self, *, fence: FenceSequence = NO_FENCE) -> None:
        """Give the slots back; blocks that were not committed are lost.

        Does nothing if the lease is already released, or ended with the session because the client is closed.

        Raises:
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self._is_held or self._channel.is_closed:
            return
        with self._missable():
            self._note_fence(fence)
            if not self._settle_release():
                self._release(())

    def declaration(self) -> Declaration | None:
        """What the next daemon must know of the lease; None if it is released or was never granted."""
        if not self._is_held:
            return None
        there, own = (self.ready_blocks, self.hit_blocks) if self.loads else (self.depth, self.depth)
        held, exclusive = compress_slots(self._table[:there]), compress_slots(self._table[own:])
        frames = (self._chain.key_range(0, there), held, exclusive)
        return Declaration(self._name, self._chain.token_count, own, frames)

    def hold_only(self, slots: Slots) -> None:
        """Keep only these slots; other leases have the rest."""
        self._set_table(slots)

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """Continue over another connection, under another id. Requests without a reply have had no effect."""
        self._channel, self.id = channel, lease_id
        self._unsettled = self._unsettled_load = None
        self._borrowed = NOTHING.table

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def _missable(self) -> Iterator[None]:
        """With ``failures="miss"``, turn an error inside into a miss, and set `reason`."""
        self.reason = None
        with self._channel.misses:
            yield
            return
        self.reason = self._channel.misses.last_reason

    def _set_table(self, table: npt.NDArray[np.int32]) -> None:
        table.flags.writeable = False
        self._table = table

    def _commit_stop(self, computed_tokens: int) -> int:
        if not 0 <= computed_tokens <= min(self._chain.token_count, self.capacity_tokens):
            raise bad_value(
                f"{computed_tokens} computed tokens, but the chain has {self._chain.token_count} tokens "
                f"and the lease slots for {self.capacity_tokens}",
                "extend the chain and allocate before computing",
            )
        stop = computed_tokens // self._chain.block_size
        return stop if self._cacheable_blocks is None else min(stop, self._cacheable_blocks)

    def _check_loaded(self) -> None:
        if self.is_loading:
            raise request_error(
                ErrorCode.STILL_LOADING,
                f"lease {self.id} depends on {len(self.loads)} loads whose end is not known",
                "call wait_loaded first, and compute from the token that it returns",
            )

    def _wait_for_loads(self, deadline_ns: int) -> None:
        self._settle(deadline_ns)
        request = self._unsettled_load or Load(id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id)
        self._channel.send(request, deadline_ns=deadline_ns)
        self._unsettled_load = request
        try:
            loaded, frames = self._channel.receive(request, Loaded)
        except RequestError as error:
            self._unsettled_load = None
            self._note_refusal(error)
            raise
        self._unsettled_load = None
        self._shorten_hit(loaded.hit, frames[0])

    def _shorten_hit(self, hit: int, packed: bytes) -> None:
        """Set the hit that the loads left, and the slots that replace the blocks that were cut off."""
        cut_blocks = self.hit_blocks - hit
        replacements = slots_of(packed, cut_blocks)
        if cut_blocks:
            table = self._table.copy()
            table[hit : self.hit_blocks] = replacements
            self._set_table(table)
        self.hit_blocks = self.ready_blocks = self.depth = hit
        self.loads = ()

    def _grow(self, tokens: int, deadline_ns: int) -> None:
        if self._channel.is_gone and self._grow_from_reserve(self._missing(tokens)):
            return
        self._settle(deadline_ns)
        if (blocks := self._missing(tokens)) > 0:
            request = Allocate(id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, blocks=blocks)
            self._perform(request, deadline_ns=deadline_ns)

    def _missing(self, tokens: int) -> int:
        return blocks_of(tokens, self._chain.block_size) - len(self._table)

    def _grow_from_reserve(self, blocks: int) -> bool:
        slots = None if self._reserve is None or not self._is_held or blocks < 1 else self._reserve.take(blocks)
        if slots is None:
            return False
        self._borrowed = np.concatenate((self._borrowed, slots))
        self._set_table(np.concatenate((self._table, slots)))
        return True

    def _blocks(self, stop: int) -> tuple[bytes, bytes]:
        """Frames with keys and slots of the blocks [depth, stop)."""
        return self._chain.key_range(self.depth, stop), compress_slots(self._table[self.depth : stop])

    def _note_fence(self, fence: FenceSequence) -> FenceSequence:
        """The fence as an int; the highest is kept for the release."""
        named = check_fence(fence)
        self._fence = max(self._fence, named)
        self._channel.named_fence = max(self._channel.named_fence, named)
        return named

    def _release(self, frames: tuple[bytes, ...]) -> None:
        request = Release(
            id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, start=self.depth, fence=self._fence
        )
        self._perform(request, frames)

    def _settle_release(self) -> bool:
        """Whether a release was sent before; if so, wait for its reply."""
        if self._unsettled is None or not isinstance(self._unsettled[0], Release):
            return False
        self._perform(*self._unsettled)
        return True

    def _settle(self, deadline_ns: int | None = None) -> None:
        """Repeat a request without a reply, except for loads; the lease is held afterwards."""
        if self._unsettled is not None:
            self._perform(*self._unsettled, deadline_ns=deadline_ns)
        if not self._is_held:
            raise request_error(ErrorCode.ALREADY_RELEASED, f"lease {self.id} is released", "acquire again")

    def _note_gone(self) -> None:
        """A release found no daemon: the lease is over, and is not declared to the next daemon."""
        if self._channel.is_gone and self._is_held:
            self._is_held = False
            if self._reserve is not None:
                self._reserve.give(self._borrowed, self._fence)

    def _note_refusal(self, error: RequestError) -> None:
        if isinstance(error, Stale) or error.code in _NOT_OURS:
            self._is_held = False

    def _perform(
        self,
        request: Allocate | Commit | Release,
        frames: tuple[bytes, ...] = (),
        *,
        deadline_ns: int | None = None,
    ) -> None:
        """Send a request and apply its reply."""
        try:
            self._channel.send(request, frames, deadline_ns=deadline_ns)
            self._unsettled = (request, frames)
            failpoint("client.sent")
            reply, reply_frames = self._channel.receive(request, _REPLY_TO[type(request)])
        except DaemonUnreachable:
            if isinstance(request, Release):
                self._note_gone()
            raise
        except RequestError as error:
            self._unsettled = None
            self._note_refusal(error)
            raise
        self._unsettled = None
        if isinstance(reply, Committed):
            self.depth = reply.depth
        elif isinstance(reply, Allocated):
            self._set_table(np.concatenate((self._table, slots_of(reply_frames[0], reply.blocks))))
        else:
            self._is_held = False
