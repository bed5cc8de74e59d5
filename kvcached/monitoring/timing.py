"""How long requests and copies take, counted in buckets. It costs each request less than a microsecond."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from enum import StrEnum
from time import perf_counter_ns
from typing import Final, NamedTuple, TypeVar

from kvcached.core.messages import (
    BackupSettled,
    Event,
    FetchSettled,
    StartBackup,
    StartFetch,
    StartTransfer,
    StorageLost,
    TransferKind,
)
from kvcached.core.slots.states import TransferState
from kvcached_client.types import KEY_SIZE_BYTES, SessionId, TransferId

#: Upper bounds. An acquire takes some tens of microseconds; what waits (loads, health) takes up to seconds.
REQUEST_BOUNDS_NS: Final = tuple(
    int(seconds * 1e9)
    for seconds in (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2, 1e-1, 1.0, 10.0)
)  # fmt: skip
#: A copy of one block in memory takes a fraction of a millisecond, one to a slow disk seconds.
COPY_BOUNDS_NS: Final = tuple(
    int(seconds * 1e9) for seconds in (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1, 2e-1, 5e-1, 1.0, 5.0)
)


A = TypeVar("A")


class Durations:
    """A histogram.

    Attributes:
        bounds_ns: upper bounds of the buckets; the last bucket has none.
        counts: of each bucket.
        sum_ns: of all durations.
    """

    __slots__ = ("bounds_ns", "counts", "sum_ns")

    def __init__(self, bounds_ns: tuple[int, ...]) -> None:
        self.bounds_ns = bounds_ns
        self.counts = [0] * (len(bounds_ns) + 1)
        self.sum_ns = 0

    def note(self, duration_ns: int) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
        self.sum_ns += duration_ns


class RequestTimes:
    """How long the daemon takes for requests: from a decoded request until its reply is handed to the socket.

    Args:
        verbs: the types of all requests.

    Attributes:
        by_verb: by type of request.
    """

    def __init__(self, verbs: Iterable[type]) -> None:
        self.by_verb = {verb: Durations(REQUEST_BOUNDS_NS) for verb in verbs}

    def timed(self, respond: Callable[[A], None], verb: type, began_ns: int) -> Callable[[A], None]:
        """`respond`, for a reply that may come later: the time until then counts."""

        def respond_late(answer: A) -> None:
            respond(answer)
            self.by_verb[verb].note(perf_counter_ns() - began_ns)

        return respond_late


class Executor(StrEnum):
    """Who makes a copy."""

    WORKER = "worker"
    ENGINE = "engine"
    STORAGE = "storage"


class Copy(NamedTuple):
    """A copy that is under way."""

    executor: Executor
    kind: TransferKind  #: seen from the tier above
    blocks: int
    block_bytes: int  #: of all shards
    began_ns: int
    session: SessionId | None  #: of the engine that makes it


class CopyTimes:
    """How long copies between tiers take, and how much they have copied.

    Attributes:
        durations: by executor and kind.
        copied_bytes: by executor and kind; nothing of copies that have failed, as far as they have.
        under_way: those that have begun and not ended.
    """

    def __init__(self, now_ns: Callable[[], int] = perf_counter_ns) -> None:
        kinds = [(executor, kind) for executor in Executor for kind in TransferKind]
        self.durations = {each: Durations(COPY_BOUNDS_NS) for each in kinds}
        self.copied_bytes = dict.fromkeys(kinds, 0)
        self.under_way: dict[TransferId, Copy] = {}
        self._now_ns = now_ns

    def ordered(self, effect: StartTransfer | StartFetch | StartBackup, block_bytes: int) -> None:
        """The core orders a copy from workers, or from storage."""
        match effect:
            case StartTransfer():
                executor, kind, spans = Executor.WORKER, effect.kind, effect.spans
            case StartFetch():
                executor, kind, spans = Executor.STORAGE, TransferKind.LOAD, (effect.span,)
            case StartBackup():
                executor, kind, spans = Executor.STORAGE, TransferKind.STORE, effect.spans
        blocks = sum(len(span.keys) for span in spans) // KEY_SIZE_BYTES
        self.begin(effect.transfer, executor, kind, blocks, block_bytes)

    def begin(
        self,
        transfer: TransferId,
        executor: Executor,
        kind: TransferKind,
        blocks: int,
        block_bytes: int,
        session: SessionId | None = None,
    ) -> None:
        """A copy has been ordered."""
        self.under_way[transfer] = Copy(executor, kind, blocks, block_bytes, self._now_ns(), session)

    def reported(self, transfer: TransferId, state: TransferState | None) -> None:
        """A shard is through with a copy, which is in this state now."""
        if state is TransferState.DONE or state is TransferState.FAILED:
            self._end(transfer, None if state is TransferState.DONE else 0)

    def heard(self, event: Event) -> None:
        """An event that may be about copies of storage."""
        match event:
            case FetchSettled():
                self._end(event.transfer, event.good)
            case BackupSettled():
                self._end(event.transfer, event.written)
            case StorageLost():
                self._forget(lambda copy: copy.executor is Executor.STORAGE)

    def session_over(self, session: SessionId) -> None:
        """An engine has gone: nobody will tell of the end of its copies."""
        self._forget(lambda copy: copy.session == session)

    def count(self, executor: Executor, kind: TransferKind) -> int:
        """How many are under way."""
        return sum(copy[:2] == (executor, kind) for copy in self.under_way.values())

    def _end(self, transfer: TransferId, blocks: int | None) -> None:
        """So many blocks were copied; None: all."""
        copy = self.under_way.pop(transfer, None)
        if copy is not None:
            place = (copy.executor, copy.kind)
            self.durations[place].note(self._now_ns() - copy.began_ns)
            self.copied_bytes[place] += (copy.blocks if blocks is None else blocks) * copy.block_bytes

    def _forget(self, is_gone: Callable[[Copy], bool]) -> None:
        for transfer in [number for number, copy in self.under_way.items() if is_gone(copy)]:
            del self.under_way[transfer]
