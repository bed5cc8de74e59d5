"""A replica's workers for as long as the daemon runs: what they are asked, what they report, and how they are replaced.

A request goes to every shard under one number and is over when no shard works on it any more: each has reported it as
done or is dead. So slots named by a failed request are as free of writers as those of a finished one. A worker that
misses a request's deadline is killed to make that true.

After a loss: every worker of the group is killed, and the kernel confirms their deaths; then the next group is started
on the same memory, at once after a healthy life, and after a pause otherwise. Pauses double with each try. After many
short lives in a row the replica is degraded: pauses are the longest from the next on, until a group has lived long.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from functools import partial
from typing import Final

from kvcached.core.messages import AbandonLoad, HurryTransfer, StartTransfer, TransferKind
from kvcached.process.backoff import BackOff
from kvcached.process.in_flight import InFlight
from kvcached.service.replica import Settled
from kvcached.worker.exits import DEVICE_LOST, MEMORY_GONE
from kvcached.worker.group import ReplicaPool, WorkerGroup
from kvcached.worker.lifecycle import FailedStarts, Lifecycle, WorkersState, breaker, in_a_line, restart_pauses
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    Done,
    Hurry,
    Probe,
    Request,
    Shutdown,
    Work,
    copy_of,
    encode,
)
from kvcached.worker.results import ShardResult, failure
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol.reports import HostRegistration
from kvcached_client.types import ShardIndex, Verify

#: A worker that gets on with none of its requests for this long is hung, and is killed.
PROGRESS_DEADLINE_S: Final = 30.0
STOP_DEADLINE_S: Final = 4.0
#: A loss is no news any more.
_ENDS: Final = (WorkersState.STOPPING, WorkersState.STOPPED)

_log: Final = logging.getLogger(__name__)


class WorkerPool:
    """The workers of one replica, group after group: `kvcached.service.replica.Workers`. Lives in one event loop.

    Args:
        pool: what the workers map.
        run_dir: where their logs and locks are; must exist.
        on_lost: called once per loss, with the first shard that was lost and why. Whoever waits for a request is told
            after that.
        on_restored: called when every shard has a worker again. Every request to the lost workers is over, and whoever
            waited for one has been told.
        on_memory_gone: called when a device works, and has lost the pool's memory.
        epoch: of the daemon.
        verify: which loaded blocks are compared with their checksums.
        deadline_s: how long workers may get on with none of their requests.
        back_off: pauses between tries.

    Attributes:
        generation: of the replica's namespace, for requests from now on.
        restarts: lost groups that were replaced, since the daemon's start.
        failed_starts: those since workers ran last.
        last_loss: how the last group that ran was lost; empty if none was.
    """

    def __init__(
        self,
        pool: ReplicaPool,
        run_dir: str,
        on_lost: Callable[[ShardIndex, str], None],
        on_restored: Callable[[], None],
        on_memory_gone: Callable[[], None] = lambda: None,
        *,
        epoch: int,
        generation: int,
        verify: Verify,
        deadline_s: float = PROGRESS_DEADLINE_S,
        back_off: BackOff | None = None,
    ) -> None:
        self.generation = generation
        self.restarts = 0
        self.failed_starts = FailedStarts()
        self.last_loss = ""
        self._pool = pool
        self._run_dir = run_dir
        self._on_lost = on_lost
        self._on_restored = on_restored
        self._on_memory_gone = on_memory_gone
        self._epoch = epoch
        self._verify = verify
        self._deadline_s = deadline_s
        self._back_off = back_off or restart_pauses()
        self._breaker = breaker(self._back_off.healthy_after_s)
        self._lifecycle = Lifecycle(pool.replica)
        self._loop = asyncio.get_running_loop()
        self._started_s = 0.0
        self._lost_s = self._loop.time()
        self._work: asyncio.Task[None] | None = None  #: burying or starting
        self._pause: asyncio.TimerHandle | None = None
        self._announcement: asyncio.Handle | None = None
        self._trust: asyncio.TimerHandle | None = None  #: when a group on probation has proved itself
        self._begin_group()

    @property
    def state(self) -> WorkersState:
        """What the workers do; the device pool serves while they are running or on probation."""
        return self._lifecycle.state

    @property
    def is_degraded(self) -> bool:
        """Whether the last lives were short, as many as make it no chance any more; the present one included."""
        return self._breaker.is_open

    @property
    def registered(self) -> tuple[HostRegistration, ...]:
        """How much of the host pool the devices of the shards reach, as the workers that live now have said."""
        return self._group.registered()

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: pool memory, progress page, eventfds."""
        return self._pool.memory[shard].for_engine

    def pid(self, shard: ShardIndex) -> int:
        """Process id of a shard's worker."""
        return self._group.workers[shard].pid

    # --- requests ---------------------------------------------------------------------------------------------------

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Order a copy on every shard. `settled` is called once per shard, never before this returns."""

        def tell(result: ShardResult) -> None:
            if result.is_lost:
                self._fail_load(transfer, result.shard)
            settled(result.shard, result.error, result.corrupt)

        try:
            failpoint("daemon.order")
            work = copy_of(transfer, epoch=self._epoch, generation=self.generation, verify=self._verify)
            self.order(work, tell)
        except RequestError as error:
            fields = {"transfer": transfer.transfer, "reason": error.message}
            _log.warning("transfer %(transfer)d was not ordered: %(reason)s", fields)
            self._fail(transfer, settled, error.message)
        except Exception as error:  # noqa: BLE001  whatever it was, the core has to hear that no shard copies
            _log.exception("transfer %(transfer)d was not ordered", {"transfer": transfer.transfer})
            self._fail(transfer, settled, f"{type(error).__name__}: {error}")

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started copy."""
        try:
            self.order(Hurry(transfer=transfer.transfer), lambda _: None)
        except RequestError as error:  # a group that does not run copies nothing; one that reads nothing is soon killed
            fields = {"transfer": transfer.transfer, "reason": error.message}
            _log.info("transfer %(transfer)d cannot be hurried: %(reason)s", fields)

    def abandon(self, load: AbandonLoad) -> None:
        """Tell the progress pages that a load failed which was never started, so that no worker writes its entry."""
        for memory in self._pool.memory:
            memory.progress.fail(load.progress, load.transfer)

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Run a probe on every shard.

        Raises:
            DaemonFailure: a worker is lost.
        """
        return self.submit(Probe(source=first, target=second, seed=secrets.randbits(32)))

    def unprobed(self) -> str:
        """See `kvcached.service.replica.Workers`."""
        probed = (any(isinstance(work, Probe) for _, work in each.requests()) for each in self._in_flight)
        return self._group.in_words(shard for shard, is_probed in enumerate(probed) if is_probed)

    def submit(self, work: Work, *, deadline_s: float | None = None) -> asyncio.Future[None]:
        """Send a request to every shard and join the results. As `order` otherwise.

        Returns:
            A future that is done when no shard works on the request any more. It fails with DaemonFailure where a
            shard failed or died. To cancel it stops nothing.
        """
        done: asyncio.Future[None] = self._loop.create_future()
        results: list[ShardResult] = []

        def join(result: ShardResult) -> None:
            results.append(result)
            if len(results) < self._pool.layout.shards or done.done():
                return
            error = failure(f"{type(work).__name__} on replica {self._pool.replica}", results)
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        self.order(work, join, deadline_s=deadline_s)
        return done

    def order(self, work: Work, on_settled: Callable[[ShardResult], None], *, deadline_s: float | None = None) -> None:
        """Send a request to every shard. Requests arrive in the order in which they were sent, and may end in another.

        Args:
            work: what to do.
            on_settled: called once per shard when it does not work on the request any more, never before this returns.
            deadline_s: a shard that has not reported the request by then is killed, unless it has reported another one
                since that was not carried out at once: then the time starts anew.

        Raises:
            BadRequest: the request is too large for one message.
            NoCapacity: `REQUESTS_IN_FLIGHT_MAX` are under way.
            DaemonFailure: a worker is lost, or the group is not running.
        """
        if (refusal := self._group.refusal()) is not None:
            raise refusal
        # Carried out when it is read, not in its turn: it does not show that the worker gets on with its copies.
        is_aside = isinstance(work, Hurry)
        if max(each.count(aside=is_aside) for each in self._in_flight) >= REQUESTS_IN_FLIGHT_MAX:
            raise request_error(
                ErrorCode.NO_CAPACITY, f"{REQUESTS_IN_FLIGHT_MAX} commands are in flight", "wait for one to end"
            )
        self._send(work, on_settled, self._deadline_s if deadline_s is None else deadline_s, is_aside=is_aside)

    def _send(
        self, work: Work, on_settled: Callable[[ShardResult], None], deadline_s: float, *, is_aside: bool = False
    ) -> None:
        message = encode(Request(sequence=self._in_flight[0].next_number, work=work))
        if len(message) > MESSAGE_SIZE_BYTES_MAX:
            raise request_error(
                ErrorCode.LIMIT, f"a command of {len(message)} bytes; {MESSAGE_SIZE_BYTES_MAX} are possible", "split it"
            )
        for worker, in_flight in zip(self._group.workers, self._in_flight, strict=True):
            in_flight.add(work, on_settled, deadline_s, aside=is_aside)
            worker.send(message)

    def _fail(self, transfer: StartTransfer, settled: Settled, error: str) -> None:
        """No worker was told of a copy."""
        for shard in map(ShardIndex, range(len(self._pool.memory))):
            self._fail_load(transfer, shard)
            self._loop.call_soon(settled, shard, error, ())

    def _fail_load(self, transfer: StartTransfer, shard: ShardIndex) -> None:
        """Tell who waits for layers that none will come; no worker writes the entry of the load."""
        if transfer.kind is TransferKind.LOAD:
            self._pool.memory[shard].progress.fail(transfer.progress, transfer.transfer)

    def _on_done(self, shard: ShardIndex, done: Done) -> None:
        """A shard's worker is through with a request."""
        if (request := self._in_flight[shard].done(done.sequence)) is not None:
            self._loop.call_soon(request.tell, ShardResult(shard, done.error, done.corrupt))
        else:
            self._group.workers[shard].kill(f"it acknowledged command {done.sequence}, which it was not given")

    def _on_dead(self, shard: ShardIndex, ending: str) -> None:
        """A shard's worker is dead: it works on nothing any more."""
        for request in self._in_flight[shard].clear():
            self._loop.call_soon(request.tell, ShardResult(shard, ending, is_lost=True))

    def _on_late(self, shard: ShardIndex, late: list[int]) -> None:
        deadline_s = self._in_flight[shard].deadline_s(late[0])
        self._group.workers[shard].kill(f"it had not acknowledged command {late[0]} after {deadline_s:g} s")

    # --- lives ------------------------------------------------------------------------------------------------------

    async def open(self, *, retries: bool = False) -> None:
        """Start the first group. If it `retries`, or a device is lost, one that fails is tried again as after a loss.

        Raises:
            BadRequest, DaemonFailure: as `WorkerGroup.start`; nothing is left, and nothing is tried again.
        """
        self._lifecycle.go(WorkersState.STARTING)
        try:
            await self._group.start()
        except RequestError as error:
            if not retries and DEVICE_LOST not in self._group.exits:
                raise
            self._on_lost(ShardIndex(0), error.message)
            self._on_failed_start(error)
        else:
            self._runs()

    async def close(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """End the workers, and start none again: what they were asked before is carried out, within the deadline.

        Workers of a lost group, and of one that was not started to the end, are killed at once. Requests that are still
        in flight then fail. The logs stay. Does nothing the second time.
        """
        if self.state in _ENDS:
            return
        self._lifecycle.go(WorkersState.STOPPING)
        for timer in (self._pause, self._trust):
            if timer is not None:
                timer.cancel()
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait([self._work])
        group, is_serving = self._group, self._group.refusal() is None
        group.is_running = False
        if is_serving:
            # The processes' ends are what counts, not this answer.
            self._send(Shutdown(), lambda _: None, deadline_s)
            await group.wind_down(deadline_s)
        await group.end()
        self._lifecycle.go(WorkersState.STOPPED)

    def kill(self) -> None:
        """End the workers by SIGKILL, now: for a daemon that has no time to stop them in order."""
        self._group.kill("the daemon ends at once")

    def _begin_group(self) -> None:
        """The next group. Nothing is in flight: all of the one before are dead."""
        self._group = WorkerGroup(self._pool, self._run_dir, self._on_done, self._on_dead, self._on_group_lost)
        self._in_flight: list[InFlight[Work, ShardResult]] = [
            InFlight(partial(self._on_late, ShardIndex(shard))) for shard in range(self._pool.layout.shards)
        ]

    def _runs(self) -> None:
        self._started_s = self._loop.time()
        self.failed_starts.end()
        if not self._breaker.is_open:
            self._lifecycle.go(WorkersState.RUNNING)
            return
        self._lifecycle.go(WorkersState.PROBATION)
        self._trust = self._loop.call_later(self._back_off.healthy_after_s, self._on_trusted)

    def _on_trusted(self) -> None:
        self._breaker.close()
        self._lifecycle.go(WorkersState.RUNNING)
        _log.info("replica %(replica)s: not degraded any more", {"replica": self._pool.replica})

    def _on_group_lost(self, shard: ShardIndex, reason: str) -> None:
        if self.state in _ENDS:
            return
        for handle in (self._announcement, self._trust):
            if handle is not None:
                handle.cancel()  # lost again before anybody was told, or before it was trusted
        self._lifecycle.go(WorkersState.LOST)
        self.last_loss = in_a_line(reason)
        self._lost_s = self._loop.time()
        lived_s = self._lost_s - self._started_s
        self._back_off.lived(lived_s)
        self._breaker.ended(lived_s)
        self._work = self._loop.create_task(self._bury())
        self._on_lost(shard, reason)

    async def _bury(self) -> None:
        await self._group.bury()
        fields = {"replica": self._pool.replica, "pause_s": self._plan()}
        _log.info("replica %(replica)s: all workers are dead; they are started again in %(pause_s)g s", fields)

    def _plan(self) -> float:
        """Plan the next start; returns when it will be."""
        pause_s = self._back_off.pause_s()
        if self._breaker.is_open:
            pause_s = self._back_off.longest_s
            self._lifecycle.go(WorkersState.DEGRADED)
            words = "replica %(replica)s is degraded: its workers have died again and again"
            _log.error(words, {"replica": self._pool.replica})
        else:
            self._lifecycle.go(WorkersState.WAITING)
        self._pause = self._loop.call_later(pause_s, self._start_next)
        return pause_s

    def _start_next(self) -> None:
        self._lifecycle.go(WorkersState.STARTING)
        self._work = self._loop.create_task(self._restore())

    def _on_failed_start(self, error: Exception) -> None:
        self._breaker.ended(0)
        fields = {"replica": self._pool.replica, "pause_s": self._plan(), "reason": str(error)}
        _log.error("replica %(replica)s: no workers, the next try is in %(pause_s)g s: %(reason)s", fields)
        if self.failed_starts.add(error, is_memory_gone=MEMORY_GONE in self._group.exits):
            self._on_memory_gone()

    async def _restore(self) -> None:
        self._begin_group()
        try:
            await self._group.start()
        except Exception as error:  # noqa: BLE001  whatever it is, the next try may succeed
            self._on_failed_start(error)
            return
        self.restarts += 1
        self._runs()
        self._announcement = self._loop.call_soon(self._on_restored)
        fields = {"replica": self._pool.replica, "seconds": self._started_s - self._lost_s}
        _log.info("replica %(replica)s: workers run again, after %(seconds).1f s", fields)
