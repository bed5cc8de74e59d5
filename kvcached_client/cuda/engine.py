"""The device of an engine's own KV tensors: marks in the engine's streams, and copies that are ordered after them.

Everything is in the device's primary context, which torch uses as well. A thread of the engine that calls this module
keeps the context that is current to it.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, Self

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import LayerPages
from kvcached_client.cuda.copier import CudaCopier
from kvcached_client.cuda.device import Device, SharedAllocation, own_context
from kvcached_client.cuda.driver import CudaFailure, Driver, Event, Stream
from kvcached_client.cuda.host import HostPool, shard_ranges
from kvcached_client.errors import bad_value

_log = logging.getLogger(__name__)


class EngineDevice:
    """The device of an engine's tensors. May be used by several threads.

    Attributes:
        device: its context is held as long as this object lives.
    """

    def __init__(self, device: Device) -> None:
        """Use `of_layers`."""
        self.device = device
        # At exit other threads may still use it, and the driver releases the context anyway.
        weakref.finalize(self, device.close).atexit = False

    @classmethod
    def of_layers(cls, layers: Sequence[LayerPages]) -> Self:
        """The device that has the pages of all layers.

        Raises:
            BadRequest: the layers are on several devices.
            CudaMissing: this process has no driver, or cannot call it.
            CudaFailure: an address is none of a device, or the driver refused one of the steps.
        """
        driver = Driver()
        ordinal = driver.names.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
        with own_context(driver):
            found = {int(driver.call("cuPointerGetAttribute", ordinal, layer.address)) for layer in layers}
            if len(found) > 1:
                raise bad_value(
                    f"KV tensors: on CUDA devices {' and '.join(map(str, sorted(found)))}",
                    "a shard is one device: register the tensors of each device as a shard of its own",
                )
            return cls(Device(driver, found.pop()))

    @classmethod
    def of_uuid(cls, wanted: str) -> Self:
        """The device that has a pool, by `MappedPool.device`.

        Raises:
            CudaMissing: this process has no driver, or does not see the device.
            CudaFailure: the driver refused one of the steps.
        """
        driver = Driver()
        with own_context(driver):
            return cls(Device.of_uuid(driver, wanted))

    @property
    def ordinal(self) -> int:
        """The device's number in this process, which torch uses as well."""
        return self.device.ordinal

    def share(self, addresses: Iterable[int]) -> list[SharedAllocation]:
        """The allocations of ``cudaMalloc`` that addresses are in, each once, in the order of their addresses.

        Raises:
            CudaFailure: one of the addresses is in none, or the driver refused.
        """
        with self.device.current():
            return sorted({self.device.share(address) for address in addresses})

    def mark(self, stream: int) -> EventMark:
        """A mark behind all work that a stream has now. Call it in the thread that queues the work; it does not wait.

        Args:
            stream: the stream's handle, as ``torch.cuda.current_stream().cuda_stream``; 0 is the default stream.

        Raises:
            CudaFailure: the driver refused.
        """
        return EventMark(self, stream)

    def open_host(
        self, address: int, host: HostGeometry, shard: int, *, read_only: bool = False, memory: object = None
    ) -> EngineCopies:
        """Copies of a shard between the device and the host pool.

        Args:
            address: where the host pool is mapped.
            host: its layout.
            shard: whose copies they are.
            read_only: it is mapped read-only.
            memory: what keeps it mapped; held until nothing of it is registered. None = the caller keeps it so long.

        Raises:
            CudaFailure: the driver refused.
        """
        return EngineCopies(self, address, host, shard, read_only=read_only, memory=memory)


class Mark(Protocol):
    """A point in the work of one of the engine's streams."""

    def hold(self, stream: Stream) -> None:
        """Let work that is queued on a stream from now on begin when the work before the mark is over."""


class EventMark:
    """A `Mark` in a stream of this process. Made by `EngineDevice.mark`.

    Attributes:
        event: over once the work before the mark is.
    """

    def __init__(self, owner: EngineDevice, stream: int) -> None:
        with owner.device.current():
            self.event = Event(owner.device.driver, owner.device.driver.names.CUstream(stream))
        # Work that is queued behind the event still begins after it.
        weakref.finalize(self, destroy_events, owner, [self.event]).atexit = False

    def hold(self, stream: Stream) -> None:
        """See `Mark.hold`."""
        stream.wait(self.event)


def destroy_events(owner: EngineDevice, events: list[Event]) -> None:
    """Destroy events that nobody waits for any more; if the device has failed, its driver does so at exit."""
    try:
        with owner.device.current():
            for event in events:
                event.close()
    except CudaFailure as error:
        _log.debug("events of a device that has failed: %s", error)


class EngineCopies:
    """The copier of an engine's shard, and the host pool as its device reaches it. Used by one thread.

    One that is dropped is closed, since a device must not reach memory that is not mapped any more.

    Attributes:
        copier: for `BlockTransfers`, within `after`.
    """

    def __init__(
        self, owner: EngineDevice, address: int, host: HostGeometry, shard: int, *, read_only: bool, memory: object
    ) -> None:
        """Use `EngineDevice.open_host`."""
        self._owner = owner
        with owner.device.current():
            self.copier = CudaCopier(owner.device, range(address, address + host.size_bytes))
        self._pool = HostPool(owner.device, address, shard_ranges(host, shard), read_only=read_only)
        parts = (owner, self.copier, self._pool, memory, os.getpid())
        self._end = weakref.finalize(self, _end_copies, *parts)
        self._end.atexit = False  # the driver ends all of it anyway
        self._pool.start()

    @contextmanager
    def after(self, mark: Mark) -> Iterator[None]:
        """Copies that are made in here begin, on the device, when the work before the mark is over.

        Raises:
            CudaFailure: the driver refused.
        """
        with self._owner.device.current():
            self.copier.wait(mark)
            yield

    def close(self) -> None:
        """End the registration of the host pool, which may be unmapped then. No copy may be in flight.

        Where the device has failed it does nothing more for this process; the memory may go all the same. Does nothing
        the second time, nor in a forked child, which cannot use the device.
        """
        self._end()


def _end_copies(owner: EngineDevice, copier: CudaCopier, pool: HostPool, memory: object, process_id: int) -> None:
    """Close a copier and end the registration of memory, which is held until then."""
    if os.getpid() != process_id:
        return
    if pool.is_own_thread:  # it has collected the last reference, and cannot wait for itself
        parts = (owner, copier, pool, memory, process_id)
        threading.Thread(target=_end_copies, args=parts, name="host-registration-end", daemon=True).start()
        return
    try:
        with owner.device.current():
            try:
                copier.close()
            finally:
                pool.close()
    except CudaFailure as error:
        _log.warning("the host pool is left, but not unregistered: %s", error)
