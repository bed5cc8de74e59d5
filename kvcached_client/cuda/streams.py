"""Fences behind the work of an engine's CUDA streams, for `Lease.commit`, `Lease.release` and `Client.signal_fence`."""

from __future__ import annotations

import weakref
from collections import deque
from typing import NamedTuple

from kvcached_client.cuda.driver import CudaFailure, Event
from kvcached_client.cuda.engine import EngineDevice, destroy_events
from kvcached_client.protocol.grants import check_fence
from kvcached_client.types import NO_FENCE, FenceSequence


class _UnderWay(NamedTuple):
    """A fence whose work may not be done yet."""

    fence: FenceSequence
    event: Event


class StreamFences:
    """The fences of one engine process: one sequence for all its streams on one device. Used by one thread at a time.

    A fence counts as signalled only when all fences before it have, whichever stream they are in. After the first
    failure of the device no fence is given or signalled any more: slots that wait for one stay in use until the session
    ends. Close the client then; the blocks whose fence has not signalled are dropped.

    Do not call `next` while the stream is captured into a graph: the event would become part of the graph.
    """

    def __init__(self, device: str, *, after: FenceSequence = NO_FENCE) -> None:
        """Fences for a pool's device.

        Args:
            device: `MappedPool.device`.
            after: the highest fence that the session has named so far; the first fence is one higher.

        Raises:
            BadRequest: `after` is no fence.
            DeviceError: this process has no driver, does not see the device, or the driver refused.
        """
        self._last = self._signalled = check_fence(after)
        self._owner = EngineDevice.of_uuid(device)
        self._queued: deque[_UnderWay] = deque()
        self._free: list[Event] = []
        self._events: list[Event] = []
        self._failure: CudaFailure | None = None
        # At exit the driver releases events anyway.
        weakref.finalize(self, destroy_events, self._owner, self._events).atexit = False

    def next(self, stream: int) -> FenceSequence:
        """A fence behind all work that a stream has now: launch the kernels first, then call this. It never waits.

        Args:
            stream: the stream's handle, as ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream.

        Raises:
            DeviceError: the device has failed, now or earlier. Neither commit nor release what the stream was to write.
        """
        self._collect()
        handle = self._owner.device.driver.names.CUstream(stream)
        try:
            with self._owner.device.current():
                event = self._record(handle)
        except CudaFailure as error:
            self._failure = error
            raise
        self._last = FenceSequence(self._last + 1)
        self._queued.append(_UnderWay(self._last, event))
        return self._last

    def signalled(self) -> FenceSequence:
        """The highest fence whose work, and that of all fences before it, is done; for `Client.signal_fence`.

        It never waits: call it once in each step of the scheduler.

        Raises:
            DeviceError: the device has failed, now or earlier.
        """
        self._collect()
        return self._signalled

    def wait(self) -> FenceSequence:
        """Wait until all fences have signalled; returns the last one. Other threads of the interpreter go on.

        Raises:
            DeviceError: the device has failed, now or earlier.
        """
        while self._queued:
            self._check()
            try:
                with self._owner.device.current():
                    self._queued[0].event.synchronize()
            except CudaFailure as error:
                self._failure = error
                raise
            self._pass_first()
        return self.signalled()

    def _record(self, stream: object) -> Event:
        """An event behind the work that the stream has now. Events whose fence has signalled are used again."""
        if self._free:
            event = self._free.pop()
            event.record(stream)
            return event
        event = Event(self._owner.device.driver, stream)
        self._events.append(event)
        return event

    def _collect(self) -> None:
        self._check()
        try:
            with self._owner.device.current():
                while self._queued and self._queued[0].event.is_over():
                    self._pass_first()
        except CudaFailure as error:
            self._failure = error
            raise

    def _pass_first(self) -> None:
        self._signalled, event = self._queued.popleft()
        self._free.append(event)

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure
