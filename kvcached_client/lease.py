"""What one request holds: the cached blocks of its prompt, and slots of its own for everything else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from operator import index
from typing import Final, Literal, Self, get_args

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.block_table import compress_slots
from kvcached_client.errors import DaemonUnreachable, ErrorCode, RequestError, Stale, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.grants import NOTHING, Declaration, Grant, Slots, blocks_of, grant_of, slots_of
from kvcached_client.keys import KeyChain
from kvcached_client.protocol.engine import (
    INTEGER_MAX,
    Acquire,
    Acquired,
    Allocate,
    Allocated,
    Commit,
    Committed,
    Load,
    Loaded,
    Release,
    Released,
)
from kvcached_client.protocol.fields import PRIORITY_MAX, PRIORITY_MIN
from kvcached_client.reserve import Reserve
from kvcached_client.transport.channel import SessionChannel
from kvcached_client.transport.misses import MissReason
from kvcached_client.transport.retry_when_freed import with_vacancies
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


class Lease:
    """Slots of one request, from `Client.acquire` until `finish` or `release`. A context manager that releases.

    With ``failures="miss"`` a lease may be not granted: it has no slots, and its methods do nothing. A request that got
    no answer in time is remembered and sent again, with its id, before the next one of this lease, so that nothing is
    done twice and nothing is left out.

    Some of the hit may still be on its way from host memory. Until `wait_loaded` has said what became of that, nothing
    can be committed, for a hit that turns out shorter leaves blocks to compute before whatever was computed after it.

    The slots are in use until the highest fence that any call named has signalled: a release with a lower one, or none,
    goes out with that.

    Attributes:
        granted: whether there is a lease at all.
        reason: why the last call of it did nothing, where failures are misses; None if it did what it says.
        id: the daemon's name for it; 0 if not granted.
        hit_blocks: leading blocks that were cached; never written by their reader. `wait_loaded` may shorten it.
        ready_blocks: so many of them can be read now; the others when the loads have ended, or layer by layer before.
        loads: the loads that the others depend on, for `MappedPool.wait_layer`; none once `wait_loaded` has returned.
        depth: leading blocks that are committed or were cached: where the next commit starts.
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
        """Use `Client.acquire`. Without a grant the lease is not granted.

        `reserve` is where slots may come from while the daemon is away; a lease without id has all of its own there.
        """
        self.granted = grant is not None
        self.reason: MissReason | None = None
        self.id, self.hit_blocks, self.ready_blocks, self.loads, table = grant or NOTHING
        self.depth = self.hit_blocks
        self._channel = channel
        self._name = name
        self._reserve = reserve
        #: Slots that came from the reserve since the daemon is away.
        self._borrowed = table if grant is not None and not self.id else NOTHING.table
        self._chain = chain
        self._cacheable_blocks = {"all": None, "prompt": chain.token_count // chain.block_size, "nothing": 0}[cache]
        self._set_table(table)
        self._is_held = self.granted
        self._fence = NO_FENCE  #: the highest that was named
        #: Sent, and not answered in time: whether it took effect is unknown.
        self._unsettled: tuple[Allocate | Commit | Release, tuple[bytes, ...]] | None = None
        #: The same, for the question of `wait_loaded` alone: its answer may shorten the hit, which nobody else expects.
        self._unsettled_load: Load | None = None

    @property
    def hit_tokens(self) -> int:
        """Leading tokens that need no computing, those of blocks that are still loading included."""
        return self.hit_blocks * self._chain.block_size

    @property
    def is_loading(self) -> bool:
        """Whether some of the hit has to be waited for, with `wait_loaded`."""
        return bool(self.loads)

    @property
    def block_table(self) -> npt.NDArray[np.int32]:
        """Slots by position of the block in the request: int32 ``[blocks]``, read-only. `allocate` makes another."""
        return self._table

    @property
    def capacity_tokens(self) -> int:
        """Tokens that have a slot, those of the hit included."""
        return len(self._table) * self._chain.block_size

    def wait_loaded(self) -> int:
        """Wait until every load that the lease depends on has ended; the tokens that need no computing then.

        Where a load failed the hit is shorter afterwards, and `block_table` has slots of the lease's own for the blocks
        that were cut off: compute from the returned token on, also what was computed before on top of them.

        Without loads, and the second time, it returns at once. Where it raises, asking again is fine, and so is giving
        the lease back. Where failures are misses it then returns the tokens that are there for sure, and `is_loading`
        stays True: the slots of the rest of the hit may be neither read nor written.

        Raises:
            DeadlineExceeded: the loads have not ended in time.
            NoCapacity: the hit is shorter, and there are no slots for the blocks that were cut off.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if self.is_loading:
            failpoint("client.load")
            with self._missable():
                with_vacancies(self._channel, self._wait_for_loads)
        return self.ready_blocks * self._chain.block_size

    def allocate(self, tokens: int) -> None:
        """Get slots until `capacity_tokens` is at least `tokens`. Does nothing if it is already.

        Raises:
            NoCapacity: nothing free and nothing evictable; the lease is as before.
            RequestError, TransportError: see `kvcached_client.errors`.
        """
        if not self.granted:
            return
        with self._missable():
            with_vacancies(self._channel, lambda deadline_ns: self._grow(tokens, deadline_ns))

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
            Refused: the lease is loading (`STILL_LOADING`): `wait_loaded` first.
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
            BadRequest, RequestError, TransportError: as `commit`. The lease is then still held, unless failures are
                misses: then it is released without the commit.
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
        """Give slots and pins back; what was not committed is lost.

        Does nothing if they are already back, or the client is closed: then its session is over, and with it the lease.

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
        """What a daemon that was started anew has to know of it; None where it is given back, or never was granted."""
        if not self._is_held:
            return None
        there, own = (self.ready_blocks, self.hit_blocks) if self.loads else (self.depth, self.depth)
        held, exclusive = compress_slots(self._table[:there]), compress_slots(self._table[own:])
        frames = (self._chain.key_range(0, there), held, exclusive)
        return Declaration(self._name, self._chain.token_count, own, frames)

    def hold_only(self, slots: Slots) -> None:
        """Other leases have the rest of its slots."""
        self._set_table(slots)

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """It goes on over another connection, under another id. What was not answered before has not happened."""
        self._channel, self.id = channel, lease_id
        self._unsettled = self._unsettled_load = None
        self._borrowed = NOTHING.table

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    @contextmanager
    def _missable(self) -> Iterator[None]:
        """What fails in here is a miss, where failures are, and `reason` says why."""
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
            raise request_error(
                ErrorCode.BAD_VALUE,
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
        """Take over what became of the loads: the hit, and the slots of what is no longer part of it."""
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
        """Frames that name the blocks [depth, stop)."""
        return self._chain.key_range(self.depth, stop), compress_slots(self._table[self.depth : stop])

    def _note_fence(self, fence: FenceSequence) -> FenceSequence:
        """The fence as an int, remembered if it is the highest so far."""
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
        """Whether a release was sent before; then its answer is in now."""
        if self._unsettled is None or not isinstance(self._unsettled[0], Release):
            return False
        self._perform(*self._unsettled)
        return True

    def _settle(self, deadline_ns: int | None = None) -> None:
        """Get the answer to what was left unsettled, loads apart; the lease is held afterwards."""
        if self._unsettled is not None:
            self._perform(*self._unsettled, deadline_ns=deadline_ns)
        if not self._is_held:
            raise request_error(ErrorCode.ALREADY_RELEASED, f"lease {self.id} is released", "acquire again")

    def _note_gone(self) -> None:
        """A release finds no daemon: there is nothing to give back to. The next one is not told of the lease."""
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
        """Ask, and take over what the answer says."""
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


def check_fence(fence: FenceSequence) -> FenceSequence:
    """A fence as an int.

    Raises:
        BadRequest: no message can carry it.
    """
    named = FenceSequence(index(fence))
    if not 0 <= named <= INTEGER_MAX:
        raise request_error(ErrorCode.BAD_VALUE, f"fence {named}", f"fences are numbers from 0 to {INTEGER_MAX}")
    return named


def acquire_lease(
    channel: SessionChannel,
    name: str,
    chain: KeyChain,
    *,
    reserve_tokens: int,
    cache: CachePolicy,
    full: bool,
    priority: int = 0,
    reserve: Reserve | None = None,
) -> Lease:
    """A lease for a request whose prompt is what `chain` holds now. See `Client.acquire`."""
    tokens = chain.token_count
    is_valued = PRIORITY_MIN <= priority <= PRIORITY_MAX
    if tokens < 1 or reserve_tokens < 0 or cache not in get_args(CachePolicy) or not is_valued:
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"a prompt of {tokens} tokens, a reserve of {reserve_tokens}, cache {cache!r}, priority {priority}",
            f"at least one token; cache is one of {', '.join(get_args(CachePolicy))}; priorities go from"
            f" {PRIORITY_MIN} to {PRIORITY_MAX}",
        )
    prompt_blocks = blocks_of(tokens, chain.block_size)
    more = blocks_of(tokens + reserve_tokens, chain.block_size) - prompt_blocks

    def attempt(deadline_ns: int) -> Grant:
        request = Acquire(
            id=channel.next_id(),
            epoch=channel.epoch,
            request=name,
            tokens=tokens,
            reserve=more,
            full=full,
            priority=priority,
        )
        reply, frames = channel.ask(request, Acquired, (chain.keys,), deadline_ns=deadline_ns)
        return grant_of(reply, frames, prompt_blocks + more)

    with channel.misses:
        try:
            grant = with_vacancies(channel, attempt)
        except DaemonUnreachable:
            slots = reserve.take(prompt_blocks + more) if reserve is not None and channel.is_gone else None
            if slots is None:
                raise
            grant = NOTHING._replace(table=slots)
        failpoint("client.acquired")
        return Lease(channel, chain, cache, grant, name, reserve)
    lease = Lease(channel, chain, cache, None, name)
    lease.reason = channel.misses.last_reason
    return lease
