"""Stand-ins for the daemon and the copy threads of an engine in offload mode."""

from __future__ import annotations

from collections import deque
from typing import cast

import numpy as np

from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.messages import CopyDone, CopyOrder, JoinSession
from kvcached_client.offload import Hold, OffloadClient, Piece, PreparedLoad, PreparedStore
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId


class FakePipes:
    """`CopyPipes` to shards that finish orders when the test says so, or at once when somebody waits."""

    def __init__(self, shards: int = 1) -> None:
        self.shards = shards
        self.orders: list[CopyOrder] = []
        self.joins: list[SessionGrant] = []
        self.bad: dict[int, list[int]] = {}  # shard → what it finds bad in the next load
        self._said: deque[CopyDone] = deque()
        self._due: deque[tuple[int, CopyOrder]] = deque()

    def __len__(self) -> int:
        return self.shards

    def order(self, order: JoinSession | CopyOrder) -> None:
        if isinstance(order, JoinSession):
            self.joins.append(order.session)
            return
        self.orders.append(order)
        self._due.extend((shard, order) for shard in range(self.shards))

    def finish(self, answers: int = 1) -> None:
        """So many answers arrive."""
        for _ in range(answers):
            shard, order = self._due.popleft()
            self._said.append(CopyDone(order.id, [] if order.is_store else self.bad.pop(shard, [])))

    def done(self, *, wait: bool) -> list[CopyDone]:
        if wait and not self._said:
            self.finish()
        said = list(self._said)
        self._said.clear()
        return said

    def as_pipes(self) -> CopyPipes:
        return cast("CopyPipes", self)


class FakePrefetch:
    """A prefetch that is over at once, or as soon as somebody waits for it; then the host pool has its blocks."""

    def __init__(self, client: FakeOffloadClient, keys: bytes) -> None:
        self.is_over = not client.is_storage_slow
        self._client, self._keys = client, keys

    def result(self) -> PrefetchResult:
        self._client.calls.append("fetched")
        self.is_over = True
        blocks = [key for key in _split(self._keys) if key in self._client.on_disk]
        self._client.stored.update(dict.fromkeys(blocks, 1))
        reason = "fetched" if self._client.on_disk else "unavailable"
        return PrefetchResult(len(blocks), len(blocks), is_over=True, reason=reason)


class FakeOffloadClient:
    """What the example uses of `OffloadClient`: a dictionary as the host pool, where every store succeeds at once."""

    def __init__(self, stored: dict[bytes, int], errors: dict[str, Exception] | None = None) -> None:
        self.session = SessionGrant(id=1, token=bytes(32), run_dir="")
        self.stored = stored
        self.errors = errors or {}  # verb → what it raises, once
        self.calls: list[str] = []
        self.on_disk: set[bytes] = set()  # none = it has no storage
        self.is_storage_slow = False
        self.rates: list[float] = []  # that prefetches were told of
        self.is_alive = True
        self.is_closed = False
        self._last = 0

    def acquire(self, request: str, keys: bytes, tokens: int, *, load_from: int) -> Hold:
        self._called("acquire")
        hit = 0
        for key in _split(keys):
            if key not in self.stored:
                break
            hit += 1
        return Hold(LeaseId(self._next()), hit)

    def begin_prefetch(
        self, keys: bytes, tokens: int, *, deadline_ms: int, prefill_tokens_per_s: float
    ) -> FakePrefetch:
        self._called("prefetch")
        self.rates.append(prefill_tokens_per_s)
        return FakePrefetch(self, keys)

    def prepare_load(self, lease: LeaseId, start: int, blocks: int) -> PreparedLoad:
        self._called(f"load {start} {blocks}")
        return PreparedLoad(TransferId(self._next()), 0, np.arange(blocks, dtype=np.int32), start)

    def prepare_store(self, lease: LeaseId, start: int, keys: bytes, _: bytes | None = None) -> PreparedStore:
        self._called(f"store {start} {len(_split(keys))}")
        new = [index for index, key in enumerate(_split(keys), start) if key not in self.stored]
        self.stored.update(dict.fromkeys(_split(keys), 1))
        pieces = (Piece(new[0], len(new)),) if new else ()
        transfer = TransferId(self._next() if new else 0)
        depth = start + len(_split(keys))
        return PreparedStore(transfer, depth, 0, pieces, np.arange(len(new), dtype=np.int32))

    def release(self, lease: LeaseId) -> None:
        self._called("release")

    def close(self) -> None:
        self.is_closed = True

    def as_client(self) -> OffloadClient:
        return cast("OffloadClient", self)

    def _called(self, call: str) -> None:
        self.calls.append(call)
        if error := self.errors.pop(call.split(maxsplit=1)[0], None):
            raise error

    def _next(self) -> int:
        self._last += 1
        return self._last


def _split(keys: bytes) -> list[bytes]:
    return [keys[at : at + KEY_SIZE_BYTES] for at in range(0, len(keys), KEY_SIZE_BYTES)]
