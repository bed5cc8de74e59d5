"""The daemon's own core behind the client's interface, with host memory that says what was written where."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import numpy as np

from kvcached.core.cache import Cache
from kvcached.core.insight.invariants import check
from kvcached.core.messages import TransferKind
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.refusals import Refusal
from kvcached.core.slots.ranges import Ranges, pairs
from kvcached.core.slots.states import SessionState
from kvcached.service.refusals import in_words
from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.errors import (
    DaemonUnreachable,
    DeadlineExceeded,
    ErrorCode,
    KvcachedError,
    RequestError,
    request_error,
)
from kvcached_client.offload import Hold, Offered, Piece, PreparedLoad, PreparedStore
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import LeaseId, TransferId

BLOCK = 4
#: What a shard holds of a block, as the host pool keeps it: its key, its generation, its bytes.
Stored = tuple[bytes, int, str]
SPEC = NamespaceSpec(b"n" * 32, "mini", BLOCK, 2, 4)


class MiniDaemon:
    """One run of a daemon; a restart is another one."""

    def __init__(self, rng: random.Random, *, slabs: int, block_size: int = BLOCK) -> None:
        self.cache = Cache([], epoch=1, session_ttl_ms=1000, host_slabs=slabs, namespaces_max=1)
        self.core = self.cache.offload
        self.spec = replace(SPEC, block_size=block_size)
        self.memory: list[dict[int, Stored]] = [{} for _ in range(SPEC.shards)]
        self.is_dead = False
        self.is_slow = False
        self.storage = random.Random(0)  #: says when a prefetch ends, and how
        self._rng = rng

    def check(self) -> None:
        """What must hold at any time."""
        self.cache.effects.clear()
        assert check(self.cache) == []

    def store(self, shard: int, job: BlockJob, blocks: list[str]) -> None:
        """A worker's copy into the host pool."""
        at = 0
        for span in job.spans:
            for index, slot in enumerate(span.slots.tolist()):
                key = span.keys[16 * index : 16 * index + 16]
                self.memory[shard][slot] = (key, job.generation, blocks[at])
                at += 1

    def load(self, shard: int, job: BlockJob) -> list[str | None]:
        """A worker's copy out of it; None for a block that is not what was stored, or was damaged."""
        found: list[str | None] = []
        for span in job.spans:
            for index, slot in enumerate(span.slots.tolist()):
                key, generation, content = self.memory[shard].get(slot, (b"", 0, ""))
                is_good = (key, generation) == (span.keys[16 * index : 16 * index + 16], job.generation)
                found.append(content if is_good else None)
        return found

    def damage(self) -> None:
        """A bit flips somewhere."""
        memory = self._rng.choice(self.memory)
        if memory:
            slot = self._rng.choice(list(memory))
            memory[slot] = (b"damaged", 0, "")


class MiniPrefetch:
    """A prefetch that ends when it likes, well or not."""

    def __init__(self, client: MiniClient) -> None:
        self._client = client

    @property
    def is_over(self) -> bool:
        if self._client.daemon.is_dead:
            raise DaemonUnreachable("gone")
        return self._client.daemon.storage.random() < 0.3

    def result(self) -> PrefetchResult:
        self._client._check()
        ends = ("fetched", "nothing", "unavailable", "waiting")
        reason = self._client.daemon.storage.choice(ends)
        return PrefetchResult(0, 0, is_over=reason != "waiting", reason=reason)

    def abandon(self) -> None:
        pass


class MiniAsked:
    """A request that the daemon has served by the time that its answer is fetched."""

    def __init__(self, serve: Callable[[], Any]) -> None:
        self._answer: Any = None
        self._error: KvcachedError | None = None
        try:
            self._answer = serve()
        except KvcachedError as error:
            self._error = error

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._answer


class MiniClient:
    """`OffloadClient` of one session.

    Of a slow daemon: what is asked for is given back by the client when the answer comes, what is given back is given
    back though nobody hears the answer.
    """

    def __init__(self, daemon: MiniDaemon, now_ms: int) -> None:
        if daemon.is_dead:
            _gone()
        self.daemon = daemon
        self.id = daemon.cache.open_offload(daemon.spec, now_ms).id
        self.tells_tokens = False
        self.session = SessionGrant(id=self.id, token=bytes(32), run_dir="/run/kvcached")

    @property
    def is_alive(self) -> bool:
        session = self.daemon.core.sessions.get(self.id)
        return not self.daemon.is_dead and session is not None and session.state is SessionState.ACTIVE

    def acquire(
        self, request: str, keys: bytes, tokens: int, *, full: bool, priority: int, tenant: str, load_from: int | None
    ) -> Hold:
        self._check()
        core = self.daemon.core
        lease = core.acquire(
            self.id, request, keys, tokens, full=full, priority=priority, tenant=tenant, load_from=load_from
        )
        plan = core.announced_load(self.id, lease)
        load = (
            None if plan is None else PreparedLoad(plan.transfer, plan.generation, _slots(plan.slots), load_from or 0)
        )
        return Hold(lease.id, lease.hit, load=load)

    def begin_prefetch(
        self,
        keys: bytes,
        tokens: int,
        *,
        stop: str = "",
        deadline_ms: int | None = None,
        prefill_tokens_per_s: float = 0.0,
        tenant: str = "",
        token_ids: bytes | None = None,
    ) -> MiniPrefetch:
        if not self.is_alive:
            _gone()
        return MiniPrefetch(self)

    def listen(self, wake: int, timeout_s: float) -> bool:
        return True

    def begin_match(self, keys: bytes, tokens: int, *, full: bool) -> MiniAsked:
        return MiniAsked(lambda: self.match(keys, tokens, full=full))

    def begin_acquire(self, request: str, keys: bytes, tokens: int, **options: Any) -> MiniAsked:
        return MiniAsked(lambda: self.acquire(request, keys, tokens, **options))

    def begin_prepare_load(self, lease: LeaseId, start: int, blocks: int) -> MiniAsked:
        return MiniAsked(lambda: self.prepare_load(lease, start, blocks))

    def begin_prepare_stores(self, offers: Sequence[Offered], releases: Sequence[LeaseId]) -> MiniAsked:
        return MiniAsked(lambda: self.prepare_stores(offers, releases))

    def match(self, keys: bytes, tokens: int, *, full: bool) -> int:
        self._check()
        return self.daemon.core.match(self.id, keys, tokens, full=full)

    def prepare_load(self, lease: LeaseId, start: int, blocks: int) -> PreparedLoad:
        self._check()
        plan = self.daemon.core.prepare_load(self.id, lease, start, blocks)
        return PreparedLoad(plan.transfer, plan.generation, _slots(plan.slots), start)

    def cancel_load(self, transfer: TransferId) -> None:
        self._check(is_slow=False)
        self.daemon.core.transfer_done(self.id, TransferKind.LOAD, transfer, -1, "", ())
        self._check()

    def prepare_stores(
        self, offers: Sequence[Offered], releases: Sequence[LeaseId]
    ) -> list[PreparedStore | RequestError]:
        self._check()
        plans: list[PreparedStore | RequestError] = []
        for offer in offers:
            try:
                plans.append(self._prepare_store(offer.lease, offer.start, offer.keys))
            except Refusal as refusal:
                plans.append(in_words(refusal))
        for lease in releases:
            with contextlib.suppress(Refusal):
                self.daemon.core.release(self.id, lease)
        return plans

    def _prepare_store(self, lease: LeaseId, start: int, keys: bytes) -> PreparedStore:
        plan = self.daemon.core.prepare_store(self.id, lease, start, keys)
        pieces = tuple(Piece(piece.start, piece.end - piece.start) for piece in plan.pieces)
        return PreparedStore(plan.transfer, plan.depth, plan.generation, pieces, _slots(plan.slots))

    def cancel_store(self, transfer: TransferId, why: str) -> None:
        self._check(is_slow=False)
        self.daemon.core.transfer_done(self.id, TransferKind.STORE, transfer, -1, why)
        self._check()

    def post_release(self, lease: LeaseId) -> None:
        self._check(is_slow=False)
        self.daemon.core.release(self.id, lease)

    def pin(self, keys: bytes, *, ttl_ms: int) -> int:
        self._check()
        tree = self.daemon.core.sessions[self.id].namespace.tree
        return self.daemon.cache.pins.pin(tree, None, keys, ttl_ms).host.depth

    def clear(self) -> int:
        self._check()
        return self.daemon.core.clear(self.id)[0]

    def close(self) -> None:
        """As a bye while workers still copy: what they may write is set aside until they have joined the next."""
        if self.is_alive:
            self.daemon.core.expire(self.daemon.core.sessions[self.id])

    def end(self) -> None:
        """All workers are through with it."""
        session = self.daemon.core.sessions.get(self.id)
        if session is not None:
            self.daemon.core.end(session)

    def settle(self, shard: int, job: BlockJob, *, is_load: bool, bad: list[int], failed: bool) -> None:
        """A worker says that it is through with a copy.

        Raises:
            KvcachedError: the session is over, or the daemon slow: it hears it all the same.
        """
        self._check(is_slow=False)
        error = "it failed" if failed else ""
        if is_load:
            depths = [depth for span in job.spans for depth in range(span.depth, span.depth + len(span.blocks))]
            corrupt = tuple(depths[index] for index in bad)
            self.daemon.core.transfer_done(self.id, TransferKind.LOAD, job.transfer, shard, error, corrupt)
        else:
            self.daemon.core.transfer_done(self.id, TransferKind.STORE, job.transfer, shard, error)
        self._check()

    def _check(self, *, is_slow: bool = True) -> None:
        if not self.is_alive:
            _gone()
        if is_slow and self.daemon.is_slow:
            raise DeadlineExceeded("slow")


def _gone() -> NoReturn:
    raise request_error(ErrorCode.SESSION_EXPIRED, "the session is over", "connect again")


def _slots(ranges: Ranges[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([slot for first, count in pairs(ranges) for slot in range(first, first + count)], np.int32)
