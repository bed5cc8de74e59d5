"""Waits of an engine's CUDA streams for the layers of loads: the host launches a whole step and waits for none."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
import time
from collections.abc import Iterable
from types import TracebackType
from typing import Final, Self

from kvcached_client.cuda.device import RegisteredMemory
from kvcached_client.cuda.driver import CudaFailure
from kvcached_client.cuda.engine import EngineDevice
from kvcached_client.pool import MappedPool
from kvcached_client.protocol.engine import LoadTicket

_log = logging.getLogger(__name__)

#: Where the driver says one of these, streams cannot wait for host memory: the host waits before it launches.
_CANNOT_WAIT: Final = frozenset(
    f"CUDA_ERROR_{each}" for each in ("NOT_SUPPORTED", "NOT_FOUND", "NOT_PERMITTED", "OUT_OF_MEMORY")
)
_GATE_BYTES: Final = 4


class LayerGates:
    """One gate for each layer of a pool: a number in host memory for which streams wait. Used by one thread at a time.

    A gate lets a stream pass when its layer of the step's loads has arrived. It also lets it pass when that will not
    happen: a load failed, the worker or the daemon is gone, or the step's deadline passed. So a stream never waits
    longer than the deadline, and what it computes may be worthless: `GatedStep.check` tells, and no step begins before
    the last one was checked.

    Gates stay at their addresses as long as this object lives, but each step waits for another number. Capture the
    kernels between two waits into CUDA graphs, not the waits: a graph would wait for the number of an earlier step,
    which is no wait at all.

    Nobody else may wait for loads of the pool (`MappedPool.wait_layer`) during a step.

    Attributes:
        waits_on_stream: whether streams wait. Otherwise the device or its driver cannot, and `GatedStep.wait` itself
            returns when the layer is there or the deadline has passed.
    """

    def __init__(self, pool: MappedPool) -> None:
        """Make the gates of a pool on a CUDA device. Close them before the pool.

        Raises:
            DeviceError: this process has no driver, does not see the device, or the driver refused.
        """
        self._pool = pool
        self._layers = [(layer, index) for index, each in enumerate(pool.layout.groups) for layer in range(each.layers)]
        self._owner = EngineDevice.of_uuid(pool.device)
        self._memory = mmap.mmap(-1, -(-len(self._layers) * _GATE_BYTES // mmap.PAGESIZE) * mmap.PAGESIZE)
        self._words = memoryview(self._memory).cast("I")
        self._registered = self._register()
        self.waits_on_stream = self._registered is not None
        self._number = 0
        self._step: GatedStep | None = None

    def begin(self, tickets: Iterable[LoadTicket], *, deadline_ms: int) -> GatedStep:
        """Begin a step that reads loading blocks; use it in a ``with`` statement, or call its `check`.

        Args:
            tickets: `Lease.loads` of all leases in the step.
            deadline_ms: no stream waits longer.

        Raises:
            ValueError: the step before was not checked.
        """
        if self._step is not None and not self._step.is_checked:
            raise ValueError("the step before was not checked: whether its hits could be read is not known")
        self._number = self._number % 0xFFFF_FFFF + 1
        self._step = GatedStep(self, self._number, tuple(tickets), deadline_ms)
        return self._step

    def close(self) -> None:
        """Wait until no stream needs the gates, at most until the step's deadline, and give them up.

        Does nothing the second time. Where the device has failed, the memory stays registered.
        """
        if self._step is not None:
            self._step.end()
        registered, self._registered = self._registered, None
        if registered is not None:
            try:
                with self._owner.device.current():
                    self._owner.device.driver.call("cuCtxSynchronize")
                    registered.close()
            except CudaFailure as error:
                _log.warning("the gates of layers are left, but not unregistered: %s", error)

    def open_by_layer(self, number: int, tickets: tuple[LoadTicket, ...], deadline_ns: int, step: GatedStep) -> None:
        """Open each gate when its layer is there. Raises what `MappedPool.wait_layer` does."""
        for index, (layer, group) in enumerate(self._layers):
            remaining_ms = max(0, (deadline_ns - time.monotonic_ns()) // 1_000_000)
            self._pool.wait_layer(tickets, layer, group, deadline_ms=remaining_ms)
            self._words[index] = number
            step.passed(index + 1)

    def open_all(self, number: int, step: GatedStep) -> None:
        """Let every stream pass, whatever has arrived."""
        for index in range(len(self._layers)):
            self._words[index] = number
        step.passed(len(self._layers))

    def index_of(self, layer: int, group: int) -> int:
        """The gate of a layer.

        Raises:
            IndexError: there is no such layer or group.
        """
        try:
            return self._layers.index((layer, group))
        except ValueError:
            raise IndexError(f"layer {layer} of group {group}") from None

    def queue_wait(self, stream: int, index: int, number: int) -> bool:
        """Let a stream wait at a gate; False if streams cannot.

        Raises:
            DeviceError: the driver refused.
        """
        if self._registered is None:
            return False
        with self._owner.device.current():
            self._wait_value(stream, self._registered.device_address + index * _GATE_BYTES, number)
        return True

    def _register(self) -> RegisteredMemory | None:
        """The gates as the device sees them; None if streams cannot wait for them, which is tried."""
        device, registered = self._owner.device, None
        address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._memory))
        try:
            with device.current():
                registered = device.register(address, len(self._memory))
                stream = device.make_stream()
                try:
                    self._wait_value(stream.handle, registered.device_address, 0)
                    stream.synchronize()
                finally:
                    stream.close()
        except CudaFailure as error:
            if registered is not None:  # whoever has no gates frees their memory
                with device.current():
                    registered.close()
            if error.result not in _CANNOT_WAIT:
                raise
            _log.info("streams cannot wait for layers, so the host does: %s", error)
            return None
        return registered

    def _wait_value(self, stream: int, address: int, number: int) -> None:
        driver = self._owner.device.driver
        reached = driver.names.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        driver.call("cuStreamWaitValue32", driver.names.CUstream(stream), address, number, reached)


class GatedStep:
    """One step of the engine that computes on blocks which are loading. Made by `LayerGates.begin`.

    Queue `wait` before the kernels of each layer, for each stream that reads it. What was computed is valid only if
    `check` returns and `Lease.wait_loaded` then gives the whole hit: otherwise discard it, and compute again from the
    token that `wait_loaded` returns. A ``with`` statement checks at its end.

    Attributes:
        is_checked: whether `check` was called.
    """

    def __init__(self, gates: LayerGates, number: int, tickets: tuple[LoadTicket, ...], deadline_ms: int) -> None:
        self.is_checked = False
        self._gates = gates
        self._number = number
        self._passed = 0
        self._failure: BaseException | None = None
        self._news = threading.Condition()
        # Not a daemon: an interpreter that ends opens the gates first, so that nothing waits for the stream forever.
        arguments = (tickets, time.monotonic_ns() + deadline_ms * 1_000_000)
        self._thread = threading.Thread(target=self._open, args=arguments, name="layer-gates")
        self._thread.start()

    def wait(self, stream: int, layer: int, group: int = 0) -> None:
        """What is queued on the stream from now on begins when the layer is there, or will not come.

        Args:
            stream: the stream's handle, as ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream.
            layer: index of the layer in its group.
            group: index of the layer's group in the layout.

        Raises:
            IndexError: there is no such layer or group.
            DeviceError: the driver refused.
        """
        index = self._gates.index_of(layer, group)
        if not self._gates.queue_wait(stream, index, self._number):
            with self._news:
                self._news.wait_for(lambda: self._passed > index)

    def check(self) -> None:
        """Wait until all gates are open; the streams may still be busy.

        If it raises, the step is worthless, even if `Lease.wait_loaded` gives the whole hit later.

        Raises:
            LoadFailed: a load failed, or was cut short.
            DeadlineExceeded: a load did not end within the step's deadline.
            DaemonUnreachable: the daemon or the pool is gone.
            ValueError: the pool was closed.
        """
        self.end()
        self.is_checked = True
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        """Wait until all gates are open."""
        self._thread.join()

    def passed(self, layers: int) -> None:
        """Tell who waits on the host that so many gates are open."""
        with self._news:
            self._passed = layers
            self._news.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if kind is None:
            self.check()
        else:
            self.end()
            self.is_checked = True

    def _open(self, tickets: tuple[LoadTicket, ...], deadline_ns: int) -> None:
        try:
            self._gates.open_by_layer(self._number, tickets, deadline_ns, self)
        except Exception as error:  # noqa: BLE001 - raised by check
            self._failure = error
        finally:
            self._gates.open_all(self._number, self)
