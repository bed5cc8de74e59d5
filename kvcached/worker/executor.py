"""When a worker carries out what: stores and loads in a lane each, reported as each is over.

What the failure of the device has ended is not reported: it fails with the worker. Else the daemon would give further
requests to a worker that is about to end, and take their failures for their own.
"""

from __future__ import annotations

import logging
import threading
from bisect import insort
from collections.abc import Callable
from typing import Final

from kvcached.worker.messages import (
    ERROR_SIZE_CHARS_MAX,
    REQUESTS_IN_FLIGHT_MAX,
    Done,
    Load,
    Probe,
    Request,
    Shutdown,
    Store,
)
from kvcached_client.errors import DeviceError
from kvcached_client.failpoints import failpoint

Task = Store | Load | Probe

#: So many stores that somebody waits for go before a store that nobody waits for; then it has its turn, for it holds
#: slots on the device and in the host pool until it is over.
PASSES_MAX: Final = 16

_log: Final = logging.getLogger(__name__)


class NotTaken(Exception):
    """The executor does not take a request; it will not be carried out."""


def failed(request: Request, error: BaseException) -> Done:
    """The report of a request that an error ended."""
    return Done(sequence=request.sequence, error=f"{type(error).__name__}: {error}"[:ERROR_SIZE_CHARS_MAX])


class Lane:
    """Requests that are carried out one after the other. Its methods are called under the executor's condition."""

    def __init__(self) -> None:
        # Each ordered by sequence number.
        self._waited_for: list[Request] = []
        self._others: list[Request] = []
        self._passed = 0  # requests that went before a store that nobody waits for

    def __len__(self) -> int:
        return len(self._waited_for) + len(self._others)

    def put(self, request: Request) -> None:
        """Queue a request."""
        is_waited_for = not isinstance(request.work, Store) or request.work.urgent
        (self._waited_for if is_waited_for else self._others).append(request)

    def hurry(self, transfer: int) -> None:
        """Somebody waits for a store now. Does nothing where it does not wait here."""
        for index, request in enumerate(self._others):
            if isinstance(request.work, Store) and request.work.transfer == transfer:
                insort(self._waited_for, self._others.pop(index), key=lambda other: other.sequence)
                return

    def take(self) -> Request:
        """The next request; there is one."""
        queue = self._waited_for or self._others
        if self._waited_for and self._others and self._passed == PASSES_MAX:
            queue = self._others
        self._passed = self._passed + 1 if queue is self._waited_for and self._others else 0
        return queue.pop(0)


class Executor:
    """Runs requests off the caller's thread and reports each as done exactly once while it lives, failed ones included.

    Stores have a lane, and loads and probes another one: a load does not wait for a store, and both directions are
    copied at once. (The daemon orders a load of what a store writes when that store is over.) Stores that somebody
    waits for come before others; inside each class the order is that of the sequence numbers. A store that becomes
    urgent takes its place by its own number. `Shutdown` comes last.

    The threads end after a `Shutdown`, when a report cannot be sent, or when the device has failed: then only another
    process can use it, and what the other lane is at is over with this one. Where the device has refused one request,
    and works, that request alone has failed.

    Args:
        carry_out: called in the thread of a lane; returns the corrupt blocks of a load.
        report: likewise, or by the last of the threads for a `Shutdown`. An error that it raises ends the executor.
        ended: called once, in one of the threads, when no further request will be carried out.
        device_works: called in the thread of a lane after the device has refused something.

    Attributes:
        device_error: by which the device has failed; None while it works.
    """

    def __init__(
        self,
        carry_out: Callable[[Task], tuple[int, ...]],
        report: Callable[[Done], None],
        ended: Callable[[], None],
        device_works: Callable[[], bool],
    ) -> None:
        self._carry_out = carry_out
        self._report = report
        self._ended = ended
        self._device_works = device_works
        self.device_error: DeviceError | None = None
        self._changed = threading.Condition()
        # Guarded by the condition. In the lanes wait at most REQUESTS_IN_FLIGHT_MAX.
        self._stores = Lane()
        self._loads = Lane()
        self._shutdown: Request | None = None
        self._is_over = False
        # A worker that ends does not wait for a copy that nobody will read.
        self._threads = [
            threading.Thread(target=self._run, args=(lane,), name=name, daemon=True)
            for lane, name in ((self._stores, "stores"), (self._loads, "loads"))
        ]
        self._running = len(self._threads)

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()

    def submit(self, request: Request) -> None:
        """Queue a `Task` or a `Shutdown`. Never waits.

        Raises:
            NotTaken: `REQUESTS_IN_FLIGHT_MAX` wait already, or a `Shutdown` came before.
        """
        with self._changed:
            if self._shutdown is not None:
                raise NotTaken("a shutdown was ordered before")
            if isinstance(request.work, Shutdown):
                self._shutdown = request
            elif len(self._stores) + len(self._loads) >= REQUESTS_IN_FLIGHT_MAX:
                raise NotTaken("too many requests wait")
            else:
                (self._stores if isinstance(request.work, Store) else self._loads).put(request)
            self._changed.notify_all()

    def hurry(self, transfer: int) -> None:
        """Somebody waits for a store now. Does nothing where it runs, is over, or is not known."""
        with self._changed:
            self._stores.hurry(transfer)

    def _run(self, lane: Lane) -> None:
        try:
            while (request := self._next(lane)) is not None:
                done = self._outcome(request)
                failpoint("worker.ack")
                if self.device_error is not None:
                    self._end()
                    break
                self._report(done)
        except OSError as error:
            _log.error("cannot report: %s", error)
            self._end()
        except BaseException:
            self._end()  # a worker that has lost a lane must not look as if it lived
            raise
        self._leave()

    def _next(self, lane: Lane) -> Request | None:
        """The next request of a lane; None where there will be none."""
        with self._changed:
            while not (self._is_over or self._shutdown or lane):
                self._changed.wait()
            return lane.take() if lane and not self._is_over else None

    def _outcome(self, request: Request) -> Done:
        """The report. Notes where the device has failed."""
        corrupt: tuple[int, ...] = ()
        try:
            if isinstance(request.work, Store | Load | Probe):
                corrupt = self._carry_out(request.work)
        except Exception as error:  # noqa: BLE001  whatever went wrong, the daemon waits for an answer
            _log.exception("request %d failed", request.sequence)
            if isinstance(error, DeviceError) and not self._device_works():
                self.device_error = self.device_error or error
            return failed(request, error)
        return Done(sequence=request.sequence, corrupt=corrupt)

    def _leave(self) -> None:
        """A lane's thread ends. The last one carries out the shutdown."""
        with self._changed:
            self._running -= 1
            shutdown = None if self._running or self._is_over else self._shutdown
        if shutdown is not None:
            try:
                self._report(Done(sequence=shutdown.sequence))
            except OSError as error:
                _log.error("cannot report: %s", error)
            finally:
                self._end()

    def _end(self) -> None:
        with self._changed:
            if self._is_over:
                return
            self._is_over = True
            self._changed.notify_all()
        self._ended()
