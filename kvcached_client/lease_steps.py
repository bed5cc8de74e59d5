"""What a lease sends and what the replies change, in steps, so that a batch can send many calls before it waits."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import SlotRanges
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    RequestError,
    Stale,
    bad_value,
    request_error,
)
from kvcached_client.failpoints import failpoint
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import Allocate, Allocated, Commit, Committed, Load, Loaded, Release, Released
from kvcached_client.protocol.fields import RESERVE_REQUEST_PREFIX
from kvcached_client.protocol.grants import (
    NOTHING,
    Declaration,
    Grant,
    Slots,
    blocks_of,
    check_fence,
    check_number,
    ranges_of,
)
from kvcached_client.rejoin import Reserve
from kvcached_client.transport.connection import InUse
from kvcached_client.transport.misses import FailureReason, NotedMisses
from kvcached_client.transport.session import SessionChannel
from kvcached_client.transport.steps import BatchedCall, Steps
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId

_REPLY_TO: Final[dict[type, type[Committed | Allocated | Released]]] = {
    Allocate: Allocated,
    Commit: Committed,
    Release: Released,
}
#: Refusals that mean that there is nothing to give back; so does every `Stale`.
_NOT_OURS: Final = frozenset({ErrorCode.ALREADY_RELEASED, ErrorCode.UNKNOWN_LEASE, ErrorCode.FOREIGN_LEASE})

_log: Final = logging.getLogger("kvcached_client")


class LeaseSteps:
    """The calls of `Lease`, in steps; `Lease` describes them.

    A lease has one call under way: each call first waits until the one before it is over.
    """

    _is_held = False  #: of a lease whose constructor was interrupted

    def __init__(
        self,
        channel: SessionChannel,
        chain: KeyChain,
        cacheable_blocks: int | None,
        grant: Grant | None,
        name: str,
        reserve: Reserve | None = None,
    ) -> None:
        """Use `Client.acquire`. `grant` is None if the lease is not granted.

        `cacheable_blocks` is how many leading blocks may be committed; None if all.
        `reserve` provides slots while the daemon is away; if the grant has no id, all its slots are from the reserve.
        """
        self.granted = grant is not None
        self.reason: FailureReason | None = None
        self.id, self.hit_blocks, self.ready_blocks, self.loads, slots = grant or NOTHING
        self.depth = self.hit_blocks
        self._channel = channel
        self._name = name
        self._reserve = reserve
        #: Slots taken from the reserve while the daemon is away.
        self._borrowed = slots if grant is not None and not self.id else NOTHING.slots
        self._chain = chain
        self._cacheable_blocks = cacheable_blocks
        self._slots = slots
        self._is_held = self.granted
        self._is_given_back = False  #: its slots may be those of others
        self._fence = NO_FENCE  #: the highest that was named
        #: Sent without a reply in time: whether it took effect is unknown.
        self._unsettled: tuple[Allocate | Commit | Release, tuple[bytes, ...]] | None = None
        #: The same for the request of `wait_loaded`: only `wait_loaded` may shorten the hit.
        self._unsettled_load: Load | None = None
        self._last_begun: BatchedCall[None] | None = None  #: that nobody waited for; maybe under way
        self._is_parting = False  #: its last call was sent, and nobody waits for the reply

    def __del__(self) -> None:
        if self._is_held:
            self._warn_of_drop()

    def __repr__(self) -> str:
        if not self.granted:
            state = f"not granted: {self.reason}"
        elif self._is_held:
            state = f"hit_blocks={self.hit_blocks}, ready_blocks={self.ready_blocks}, blocks={self._slots.count}"
        else:
            state = "released"
        return f"{type(self).__name__}(request={self._name!r}, {state})"

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, including those of blocks that are still loading."""
        return self.hit_blocks * self._chain.block_size

    @property
    def is_loading(self) -> bool:
        """Whether blocks of the hit are still loading; `wait_loaded` waits for them."""
        return bool(self.loads)

    @property
    def is_held(self) -> bool:
        """Whether the lease has slots, and no release of it was sent."""
        return self._is_held and not self._is_release_unheard

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """The slot of each block of the request: int32 ``[blocks]``, read-only. `allocate` makes a new array.

        Raises:
            Refused: the lease is released, and its slots may be those of others. Not because the session is over: then
                they are nobody's until its processes have ended.
        """
        if self._is_given_back or self._is_release_unheard:
            raise request_error(ErrorCode.ALREADY_RELEASED, f"lease {self.id} is released", "acquire again")
        table = self._slots.table
        table.flags.writeable = False
        return table

    @property
    def capacity_tokens(self) -> int:
        """Tokens that have a slot, including those of the hit."""
        return self._slots.count * self._chain.block_size

    def begin(self, steps: Steps[None]) -> BatchedCall[None]:
        """Begin a call of this lease whose reply is awaited later.

        Raises:
            KvcachedError: the request was not sent.
        """
        self._last_begun = BatchedCall(steps)
        return self._last_begun

    def loading(self) -> Steps[None]:
        """`Lease.wait_loaded`."""
        self._await_last()
        if self.is_loading:
            failpoint("client.load")
            with self._missable():
                yield from self._channel.retry_when_freed(self._wait_for_loads)

    def allocating(self, tokens: int) -> Steps[None]:
        """`Lease.allocate`."""
        self._await_last()
        tokens = check_number("tokens", tokens)
        if not self.granted:
            return
        with self._missable():
            yield from self._channel.retry_when_freed(lambda deadline_ns: self._grow(tokens, deadline_ns))

    def committing(self, computed_tokens: int, fence: FenceSequence) -> Steps[None]:
        """`Lease.commit`."""
        self._await_last()
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        with self._missable():
            named = self._note_fence(fence)
            yield from self._settle()
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
                yield from self._perform(request, self._blocks(stop))

    def finishing(self, computed_tokens: int, fence: FenceSequence, *, gives_back: bool = False) -> Steps[None]:
        """`Lease.finish`. With `gives_back` a commit that the daemon refuses releases the lease, and raises."""
        self._await_last()
        if not self.granted:
            return
        stop = self._commit_stop(computed_tokens)
        try:
            yield from self._finish(stop, fence)
        except RequestError:
            if gives_back:
                yield from self._give_back(fence)
            raise
        except DeadlineExceeded:
            self._give_back_unheard(gives_back=gives_back)
            raise
        self._give_back_unheard(gives_back=gives_back)

    def _give_back_unheard(self, *, gives_back: bool) -> None:
        """The daemon may refuse a commit later, when nobody listens: a release without it comes right behind."""
        if gives_back and self._is_release_unheard:
            channel, fence = self._channel, self._fence
            request = Release(id=channel.next_id(), epoch=channel.epoch, lease=self.id, fence=fence, reply=False)
            with suppress(KvcachedError):  # the daemon is gone, and the lease with it
                channel.post(request)

    def _finish(self, stop: int, fence: FenceSequence) -> Steps[None]:
        with self._missable():
            self._note_fence(fence)
            if not (yield from self._settle_release()):
                yield from self._settle()
                self._check_loaded()
                yield from self._release(self._blocks(stop) if stop > self.depth else ())
            return
        if not self._is_release_unheard:
            reason = self.reason
            yield from self._give_back(fence)
            self.reason = reason

    def releasing(self, fence: FenceSequence) -> Steps[None]:
        """`Lease.release`."""
        self._await_last()
        yield from self._give_back(fence)

    def declaration(self) -> Declaration | None:
        """What the next daemon must know of the lease; None if it is released or was never granted.

        A lease whose release was sent is over, heard or not: others may have written to its slots since.
        """
        self._await_last()
        if self._is_release_unheard:
            self._is_held = False  # slots from the reserve are then declared by nobody, and so are free
        if not self._is_held:
            return None
        there, own = (self.ready_blocks, self.hit_blocks) if self.loads else (self.depth, self.depth)
        held, exclusive = self._slots.section(0, there), self._slots.section(own, self._slots.count)
        frames = (self._chain.key_range(0, there), held, exclusive)
        return Declaration(self._name, self._chain.token_count, own, frames)

    def hold_only(self, slots: Slots) -> None:
        """Keep only these slots; other leases have the rest."""
        self._slots = SlotRanges.of(slots)

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """Continue over another connection, under another id. Requests without a reply have had no effect."""
        self._channel, self.id = channel, lease_id
        self._unsettled = self._unsettled_load = None
        self._borrowed = NOTHING.slots

    @contextmanager
    def parting(self, error: BaseException | None) -> Iterator[None]:
        """For the release at the end of a ``with`` statement that `error` has left, if any: it must not be hidden."""
        try:
            yield
        except (KvcachedError, RuntimeError) as failure:
            if error is None:
                raise
            _log.info("lease %d was not released: %s", self.id, failure)

    def _warn_of_drop(self) -> None:
        """Nobody has this lease any more. It is not given back: the engine may have work queued that writes to it."""
        channel = self._channel
        is_over = channel.is_ended or channel.is_stale or channel.is_forked or sys.is_finalizing()
        if self.is_held and not (is_over or self._name.startswith(RESERVE_REQUEST_PREFIX)):
            warnings.warn(
                f"lease {self.id} of request {self._name!r} was dropped without a release, and holds "
                f"{self._slots.count} slots until its client is closed; call finish or release",
                ResourceWarning,
                stacklevel=3,
                source=self,
            )

    def _await_last(self) -> None:
        self._channel.check_thread()
        if self._last_begun is not None:
            self._last_begun.wait()

    def _give_back(self, fence: FenceSequence) -> Steps[None]:
        if not self._is_held or self._channel.is_closed:
            return
        with self._missable():
            self._note_fence(fence)
            if not (yield from self._settle_release()):
                yield from self._release(())

    def _missable(self) -> NotedMisses:
        """With ``failures="miss"``, turn an error inside into a miss, and set `reason`."""
        return NotedMisses(self, self._channel.misses)

    def _commit_stop(self, computed_tokens: int) -> int:
        computed_tokens = check_number("computed_tokens", computed_tokens)
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

    def _wait_for_loads(self, deadline_ns: int) -> Steps[None]:
        yield from self._settle(deadline_ns)
        request = self._unsettled_load or Load(id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id)
        self._unsettled_load = request  # from before it is sent, as in `_send`; it may be repeated even if it was not
        self._channel.send(request, deadline_ns=deadline_ns)
        yield request
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
        replacements, before = ranges_of(packed, cut_blocks), self._slots
        if cut_blocks:
            ranges = before.section(0, hit) + replacements.packed + before.section(self.hit_blocks, before.count)
            self._slots = SlotRanges(ranges, before.count)
        self.hit_blocks = self.ready_blocks = self.depth = hit
        self.loads = ()

    def _grow(self, tokens: int, deadline_ns: int) -> Steps[None]:
        if self._channel.is_gone and self._grow_from_reserve(self._missing(tokens)):
            return
        yield from self._settle(deadline_ns)
        if (blocks := self._missing(tokens)) > 0:
            request = Allocate(id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, blocks=blocks)
            yield from self._perform(request, deadline_ns=deadline_ns)

    def _missing(self, tokens: int) -> int:
        return blocks_of(tokens, self._chain.block_size) - self._slots.count

    def _grow_from_reserve(self, blocks: int) -> bool:
        is_over = not self._is_held or self._is_release_unheard
        slots = None if self._reserve is None or is_over or blocks < 1 else self._reserve.take(blocks)
        if slots is None:
            return False
        borrowed = SlotRanges.of(slots)
        self._borrowed, self._slots = self._borrowed + borrowed, self._slots + borrowed
        return True

    def _blocks(self, stop: int) -> tuple[bytes, ...]:
        """Frames with keys and slots of the blocks [depth, stop), and their tokens where routers may know them."""
        frames = (self._chain.key_range(self.depth, stop), self._slots.section(self.depth, stop))
        tokens = self._chain.token_range(self.depth, stop) if self._channel.tells_tokens else None
        return frames if tokens is None else (*frames, tokens)

    def _note_fence(self, fence: FenceSequence) -> FenceSequence:
        """The fence as an int; the highest is kept for the release."""
        named = check_fence(fence)
        self._fence = max(self._fence, named)
        self._channel.named_fence = max(self._channel.named_fence, named)
        return named

    def _release(self, frames: tuple[bytes, ...]) -> Steps[None]:
        request = Release(
            id=self._channel.next_id(), epoch=self._channel.epoch, lease=self.id, start=self.depth, fence=self._fence
        )
        yield from self._perform(request, frames)

    def _settle_release(self) -> Steps[bool]:
        """Whether a release was sent before; if so, wait for its reply."""
        if self._unsettled is None or not self._is_release_unheard:
            return False
        try:
            if self._is_held:  # else it ended with its daemon
                yield from self._perform(*self._unsettled)
        except RequestError as error:
            if error.code is not ErrorCode.ALREADY_RELEASED:  # else it was done, and the daemon has forgotten its reply
                raise
        return True

    @property
    def _is_release_unheard(self) -> bool:
        """Whether a release was sent, with or without a commit, and its reply has not come."""
        return self._unsettled is not None and isinstance(self._unsettled[0], Release)

    def _settle(self, deadline_ns: int | None = None) -> Steps[None]:
        """Repeat a request without a reply, except for loads; the lease is held afterwards."""
        if self._unsettled is not None:
            yield from self._perform(*self._unsettled, deadline_ns=deadline_ns)
        if not self._is_held:
            raise request_error(ErrorCode.ALREADY_RELEASED, f"lease {self.id} is released", "acquire again")

    def _note_gone(self) -> None:
        """A release found no daemon: the lease is over, and is not declared to the next daemon."""
        if self._channel.is_gone and self._is_held:
            self._is_held, self._is_given_back = False, True
            if self._reserve is not None:
                self._reserve.give(self._borrowed.table, self._fence)

    def _note_refusal(self, error: RequestError) -> None:
        if isinstance(error, Stale) or error.code in _NOT_OURS:
            self._is_held = False
        self._is_given_back |= error.code in _NOT_OURS

    def _send(self, request: Allocate | Commit | Release, frames: tuple[bytes, ...], deadline_ns: int | None) -> None:
        """Send a request, which is unsettled from before it is sent: an interrupt may come right behind the sending."""
        before, self._unsettled = self._unsettled, (request, frames)
        try:
            self._channel.send(request, frames, deadline_ns=deadline_ns)
        except (KvcachedError, InUse):  # nothing was sent
            self._unsettled = before
            raise

    def _perform(
        self,
        request: Allocate | Commit | Release,
        frames: tuple[bytes, ...] = (),
        *,
        deadline_ns: int | None = None,
    ) -> Steps[None]:
        """Send a request and apply its reply."""
        try:
            self._send(request, frames, deadline_ns)
            failpoint("client.sent")
            yield request
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
            self._slots += ranges_of(reply_frames[0], reply.blocks)
        else:
            self._is_held, self._is_given_back = False, True
