"""A worker's side of the connector: one thread waits for copies, so that neither forward pass nor scheduler does.

A process of its own makes them where it can reach the tensors, on CUDA devices; else the thread itself does (`Shards`).

Loads go before stores; each kind is carried out in order. Small stores that wait are copied and reported together,
because a call and a report cost as much as some blocks. Rules:

* After `PASSES_MAX` loads that went before a waiting store, the store is next, because it holds blocks of vLLM's pool.
* Every load is reported, with its bad blocks, and every store, in success or failure. No request and no block waits
  without end, even if the daemon is dead or silent, or if the session is over or could not be joined.
* Copies of a session end before the next session is joined, because joining tells the daemon that they have ended.
* After a missed deadline of the daemon, and between processes that fail at their first copy, orders fail without a try.
* After an internal error of this thread, or once the device has failed, all orders fail; vLLM then computes the blocks.
* Copies of tensors on a CUDA device begin after what vLLM's stream had when their orders came: the kernels that wrote
  the blocks of stores, and those that still use the blocks that loads overwrite. The device waits, not vLLM's thread.
* The host pool of a session that is over is unmapped at once, unless orders of the session wait.
* While the worker's KV memory is asleep, nothing is copied into or out of it: all orders fail.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.copy_process.shards import AnyMark, CopiesPaused
from kvcached_client.errors import DeviceError, KvcachedError, RequestError, Stale, TransportError
from kvcached_client.offload_shard import STORES_PER_REPORT_MAX
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.vllm.orders import CopyCounts, LoadOrder, SessionNote, StepOrders, StoreOrder, StoreReport

#: How long orders fail without a try after a failed join or a missed deadline.
QUIET_S: Final = 5.0
#: Upper bound of the loads that go before a waiting store, as in the daemon's workers.
PASSES_MAX: Final = 16
#: Upper bounds of the blocks and the stores that are copied together: a load waits as long as that takes.
BLOCKS_TOGETHER_MAX: Final = 128
STORES_TOGETHER_MAX: Final = STORES_PER_REPORT_MAX
#: How long `close` waits for the copy in progress.
CLOSE_S_MAX: Final = 5.0

#: Below vLLM's own logger, for its handlers and format.
log = logging.getLogger("vllm.kvcached")


class Shard(Protocol):
    """What `Shards.join` gives, with marks of its own kind. `store_all` and `load` raise `KvcachedError`."""

    def fileno(self) -> int:
        """A descriptor that becomes readable when the session is over or the daemon is gone."""

    def store_all(self, jobs: Sequence[BlockJob], *, after: Any) -> None:  # noqa: ANN401 - of its own kind
        """Copy blocks of several stores into the host pool, and report their ends together."""

    def load(self, job: BlockJob, *, after: Any) -> list[int]:  # noqa: ANN401
        """Copy blocks out of the host pool; returns the bad blocks, counted in the order of the job."""

    def close(self) -> None:
        """Leave the session, and unmap the host pool."""


class ShardSource(Protocol):
    """The part of `Shards` that is used."""

    def prepare(self) -> None:
        """Get ready for the next session."""

    def join(self, grant: SessionGrant) -> Shard:
        """Join a session, or raise `KvcachedError`."""

    def mark(self) -> AnyMark:
        """The mark behind which copies begin that are ordered now; or raise `DeviceError`, or `RequestError`."""

    def abort(self) -> None:
        """End copies that may never end by themselves. Any thread may call this."""

    def close(self) -> None:
        """Nothing is copied any more."""


class _Queued(NamedTuple):
    """Orders that are carried out together: one load, or stores of one session. Copies begin behind the mark."""

    orders: tuple[LoadOrder] | tuple[StoreOrder, ...]
    after: AnyMark


class _WaitingStore(NamedTuple):
    """An order, its number of blocks, and the mark behind which its copy begins."""

    order: StoreOrder
    blocks: int
    after: AnyMark


class WorkerSide:
    """Copies blocks for one worker. All methods are for the worker's thread.

    Args:
        shards: where copies are made.
        clock: returns seconds.
    """

    def __init__(self, shards: ShardSource, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._shards = shards
        self._clock = clock
        self._lock = threading.Lock()
        # Guarded by the lock. The scheduler's side limits the number of orders.
        self._loads: deque[_Queued] = deque()
        self._stores: deque[_WaitingStore] = deque()
        self._passed = 0  #: loads that went before the waiting store
        self._note: SessionNote | None = None
        self._is_closing = False
        self._loaded: set[str] = set()
        self._bad_blocks: set[int] = set()
        self._failed: set[str] = set()
        self._report = StoreReport({}, set())
        self._counts = CopyCounts()
        # Used by the worker's thread only:
        self._taken_bad_blocks: set[int] = set()
        self._taken_failed: set[str] = set()
        # Used by the copying thread only:
        self._shard: Shard | None = None
        self._session = 0  #: number of the session that was joined last
        self._quiet = (0, 0.0)  #: a session that is not tried, and until when
        self._is_asleep = False  #: set by the worker's thread
        self._is_idle = threading.Event()  #: every order is carried out, or has failed
        self._is_idle.set()
        # Set by either thread:
        self._is_broken = False  #: all orders fail from now on
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="kvcached-copy", daemon=True)
        self._thread.start()

    def begin(self, orders: StepOrders) -> None:
        """Accept the orders of a step, in the thread that has launched the kernels before it."""
        after = self._marked() if orders.loads or orders.stores else None
        with self._lock:
            is_joined = orders.session is None or (self._note is not None and orders.session == self._note)
            if not is_joined:
                self._note = orders.session
            if orders.loads or orders.stores:
                self._is_idle.clear()
            self._loads.extend(_Queued((order,), after) for order in orders.loads)
            self._stores.extend(_WaitingStore(order, _block_count(order.job), after) for order in orders.stores)
        if not is_joined or orders.loads or orders.stores:
            os.eventfd_write(self._wake, 1)

    def take_loaded(self) -> set[str]:
        """Requests whose loads have ended since the last call. `take_bad_blocks` then returns their bad blocks."""
        with self._lock:
            taken, self._loaded = self._loaded, set()
            self._taken_bad_blocks |= self._bad_blocks
            self._bad_blocks = set()
            self._taken_failed, self._failed = self._failed, set()
            return taken

    def take_failed(self) -> set[str]:
        """The requests that `take_loaded` returned last whose loads had bad blocks."""
        taken, self._taken_failed = self._taken_failed, set()
        return taken

    def take_bad_blocks(self) -> set[int]:
        """Bad blocks of the loads that `take_loaded` returned."""
        taken, self._taken_bad_blocks = self._taken_bad_blocks, set()
        return taken

    def take_stored(self) -> StoreReport | None:
        """Stores that have ended since the last call; None if there are none."""
        with self._lock:
            if not self._report.done:
                return None
            taken, self._report = self._report, StoreReport({}, set())
            return taken

    def take_counts(self) -> CopyCounts | None:
        """Counts of copies since the last call; None if nothing was copied."""
        with self._lock:
            if self._counts == CopyCounts():
                return None
            taken, self._counts = self._counts, CopyCounts()
            return taken

    def fall_asleep(self) -> None:
        """Wait for the copy in progress; all other orders fail, because their memory is taken away. May be repeated.

        Raises:
            RuntimeError: the copy does not end. The memory must stay.
        """
        self._is_asleep = True
        if not self._is_idle.wait(CLOSE_S_MAX):
            self._is_asleep = False
            raise RuntimeError(f"kvcached still copies blocks after {CLOSE_S_MAX:.0f} s: this vLLM cannot sleep now")

    def wake_up(self) -> None:
        """Copy again: the memory is back, at its old addresses. May be repeated."""
        self._is_asleep = False

    def close(self) -> None:
        """End the copy in progress, drop waiting orders, and leave the session, in a bounded time. May be repeated."""
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join(CLOSE_S_MAX)
        if self._thread.is_alive():
            self._shards.abort()
            self._thread.join(CLOSE_S_MAX)
        if not self._thread.is_alive():
            os.close(self._wake)
            self._shards.close()

    def _marked(self) -> AnyMark:
        try:
            return self._shards.mark()
        except DeviceError as error:
            log.error("kvcached: no more copies by this worker: %s", error)  # noqa: TRY400 - vLLM tells where it failed
            self._is_broken = True
            self._shards.abort()
        except RequestError as error:
            log.warning("kvcached: the orders of this step will fail: %s", error)
        return None

    # --- the copying thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        has_failed = False
        while not self._is_closing:
            try:
                queued = self._next()
                if queued is not None:
                    self._carry_out(*queued)
                elif not self._follow_session():
                    self._wait()
            except Exception:
                if has_failed:
                    raise
                log.exception("kvcached: no more copies by this worker, a fault of kvcached; vLLM goes on without")
                has_failed = self._is_broken = True
                self._leave()
        self._leave()

    def _next(self) -> _Queued | None:
        with self._lock:
            if self._loads and not (self._stores and self._passed >= PASSES_MAX):
                self._passed = self._passed + 1 if self._stores else 0
                return self._loads.popleft()
            self._passed = 0
            if not self._stores:
                self._is_idle.set()
                return None
            return self._next_stores()

    def _next_stores(self) -> _Queued:
        """The oldest store, and those behind it that fit. A mark is behind all earlier ones."""
        order, blocks, after = self._stores.popleft()
        orders = [order]
        while self._stores and len(orders) < STORES_TOGETHER_MAX:
            following = self._stores[0]
            blocks += following.blocks
            is_alike = following.order.session == order.session and (following.after is None) == (after is None)
            if blocks > BLOCKS_TOGETHER_MAX or not is_alike:
                break
            orders.append(following.order)
            after = following.after
            self._stores.popleft()
        return _Queued(tuple(orders), after)

    def _wait(self) -> None:
        """Wait for orders, or for the end of the session, which is then left."""
        poller = select.poll()
        poller.register(self._wake, select.POLLIN)
        if self._shard is not None:
            try:
                poller.register(self._shard.fileno(), select.POLLIN)
            except KvcachedError:
                self._leave()
                return
        ready = [descriptor for descriptor, _ in poller.poll()]
        if self._wake in ready:
            os.eventfd_read(self._wake)
        else:
            # No warning: the daemon's thread warns if no session follows.
            log.info("kvcached: the daemon has ended the session, or is gone")
            self._leave()

    def _carry_out(self, orders: tuple[LoadOrder] | tuple[StoreOrder, ...], after: AnyMark) -> None:
        began = time.perf_counter()
        bad: list[int] | None = None
        try:
            bad = self._copy(orders, after)
        finally:  # a fault of kvcached loses no orders: vLLM would wait for them without end
            self._end(orders, bad, time.perf_counter() - began)

    def _end(self, orders: tuple[LoadOrder] | tuple[StoreOrder, ...], bad: list[int] | None, seconds: float) -> None:
        """Note the end of orders for vLLM; `bad` is what `_copy` has returned."""
        blocks = [block for order in orders for span in order.job.spans for block in span.blocks.tolist()]
        lost = blocks if bad is None else [blocks[index] for index in bad]
        with self._lock:
            counts = self._counts
            for order in orders:
                if isinstance(order, LoadOrder):
                    self._loaded.add(order.request)
                    self._failed.update([order.request] if lost else [])
                else:
                    self._report.done[order.id] = 1
                    self._report.failed.update([order.id] if lost else [])
            if isinstance(orders[0], LoadOrder):
                self._bad_blocks.update(lost)
                counts.loaded_blocks += len(blocks) - len(lost)
                counts.load_failed_blocks += len(lost)
                counts.load_seconds += seconds
            else:
                counts.stored_blocks += len(blocks) - len(lost)
                counts.store_failed_blocks += len(lost)
                counts.store_seconds += seconds

    def _copy(self, orders: tuple[LoadOrder] | tuple[StoreOrder, ...], after: AnyMark) -> list[int] | None:
        """The bad blocks of a load, by their index in the job; none of stores. None if the copy failed completely."""
        first = orders[0]
        shard = None if self._is_asleep else self._shard_of(first.session)
        if shard is None:
            return None
        try:
            if isinstance(first, LoadOrder):
                return shard.load(first.job, after=after)
            shard.store_all([order.job for order in orders], after=after)
        except Stale as error:
            log.warning("kvcached: left the session: %s", error)
            self._leave()
        except TransportError as error:
            self._keep_quiet(first.session, error)
        except Exception:
            log.exception("kvcached: transfer %d failed", first.job.transfer)
        else:
            return []
        return None

    # --- sessions ---------------------------------------------------------------------------------------------------

    def _shard_of(self, session: int) -> Shard | None:
        """The shard for the orders of a session; None if the session is over or cannot be joined now."""
        if self._is_broken or self._is_quiet(session):
            return None
        if self._note is not None and self._note.number == session:
            self._follow_session()
        return self._shard if session == self._session else None

    def _follow_session(self) -> bool:
        """Join the latest session, if it is not joined yet; returns whether that was tried."""
        note = self._note
        if note is None or note.number == self._session or self._is_broken or self._is_quiet(note.number):
            return False
        self._leave()
        try:
            shard = self._shards.join(SessionGrant.from_bytes(note.grant))
        except KvcachedError as error:
            self._keep_quiet(note.number, error)
        except Exception as error:
            log.exception("kvcached: could not join the session")
            self._keep_quiet(note.number, error)
        else:
            self._shard, self._session = shard, note.number
            log.info("kvcached: joined the session")
        return True

    def _is_quiet(self, session: int) -> bool:
        return session == self._quiet[0] and self._clock() < self._quiet[1]

    def _keep_quiet(self, session: int, why: Exception) -> None:
        seconds = why.seconds if isinstance(why, CopiesPaused) else QUIET_S
        log.warning("kvcached: no copies for %.0f s: %s", seconds, why)
        self._quiet = session, self._clock() + seconds

    def _leave(self) -> None:
        shard, self._shard = self._shard, None
        if shard is not None:
            try:
                shard.close()
            except Exception:
                log.exception("kvcached: could not leave the session cleanly")
            if not (self._is_closing or self._is_broken):
                try:
                    self._shards.prepare()
                except Exception:
                    log.exception("kvcached: could not prepare for the next session, and tries again when it comes")


def _block_count(job: BlockJob) -> int:
    return sum(len(span.blocks) for span in job.spans)
