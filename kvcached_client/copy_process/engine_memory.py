"""An engine's memory as its copy process gets it: descriptors, handles, and where in them each layer lies."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from kvcached_client.blocks.mapping import why_unfit
from kvcached_client.blocks.pages import EnginePages, LayerPages
from kvcached_client.copy_process.messages import OnDevice, PackedLayer, PoolClaim
from kvcached_client.errors import bad_value

if TYPE_CHECKING:
    from kvcached_client.cuda.marks import MarkWriter


class EngineMemory(NamedTuple):
    """One piece of memory of which all of an engine's tensors are a part.

    On the CPU it is sealed memory: the engine's own, or what the daemon keeps for it. On a CUDA device it is memory
    that the engine has exported (``cuMemExportToShareableHandle``, a POSIX descriptor), all of which is mapped at
    `address`; or memory that the daemon keeps for the engine.

    Attributes:
        descriptor: of the memory; the caller's. If it is the one that `lock_memory` has returned, the lock holds until
            the copy process is dead, too: nobody else gets the memory while that may write it. -1 if there is a claim.
        address: where it is mapped in this process.
        size_bytes: how much of it is mapped.
        claim: how the copy process asks the daemon for memory of a CUDA device. The daemon then gives nobody else the
            memory while that process lives.
    """

    descriptor: int
    address: int
    size_bytes: int
    claim: PoolClaim | None = None


class SharedMemory(NamedTuple):
    """What the copy process is told.

    Attributes:
        descriptor, size_bytes: of memory that is shared as a whole; -1 = the process asks the daemon for it, and -1
            and 0 = there is none.
        device: None for memory of this machine.
        layers: where each layer lies.
    """

    descriptor: int
    size_bytes: int
    device: OnDevice | None
    layers: tuple[PackedLayer, ...]

    @property
    def descriptors(self) -> tuple[int, ...]:
        """What the process inherits."""
        marks = () if self.device is None else (self.device.marks,)
        return (*marks, *((self.descriptor,) if self.descriptor >= 0 else ()))


def shared(pages: EnginePages, memory: EngineMemory | None, marks: MarkWriter | None) -> SharedMemory:
    """How a copy process reaches an engine's tensors.

    Args:
        pages: of the tensors.
        memory: what they are in; None = allocations of ``cudaMalloc``.
        marks: of tensors on a device.

    Raises:
        BadRequest: the tensors are not all in the memory; or they are on the CPU, and there is none, or it is not
            sealed.
        DeviceError: the driver does not share the allocations.
    """
    if memory is not None:
        if marks is None and (why := why_unfit(memory.descriptor, memory.size_bytes)):
            raise bad_value(
                f"the memory of the tensors, descriptor {memory.descriptor}: {why}",
                "make it by memfd_create with MFD_ALLOW_SEALING, give it its size by ftruncate, and add the seals "
                "F_SEAL_SHRINK, F_SEAL_GROW and F_SEAL_SEAL",
            )
        whole = (range(memory.address, memory.address + memory.size_bytes),)
        device = None if marks is None else OnDevice(pages.device.device.uuid, marks.descriptor, (), memory.claim)
        return SharedMemory(memory.descriptor, memory.size_bytes, device, _layers_in(pages, whole))
    if marks is None:
        raise bad_value("tensors on the CPU in memory of this process alone", "let them be in memory of the daemon")
    found = pages.device.share([layer.address for layer in pages.layers])
    places = tuple(range(each.address, each.address + each.size_bytes) for each in found)
    device = OnDevice(pages.device.device.uuid, marks.descriptor, tuple(each.handle for each in found))
    return SharedMemory(-1, 0, device, _layers_in(pages, places))


def _layers_in(pages: EnginePages, places: Sequence[range]) -> tuple[PackedLayer, ...]:
    """Each layer's place; the parts of the memory are in the order of their addresses."""
    return tuple(_layer_in(layer, pages.blocks, places) for layer in pages.layers)


def _layer_in(layer: LayerPages, blocks: int, places: Sequence[range]) -> PackedLayer:
    part = bisect.bisect_right(places, layer.address, key=lambda place: place.start) - 1
    end = layer.address + (blocks - 1) * layer.stride_bytes + layer.page_bytes
    if part < 0 or end > places[part].stop:
        raise bad_value("some of the tensors are not in the memory", "give the memory that all of them are in")
    return PackedLayer(part, layer.address - places[part].start, layer.page_bytes, layer.stride_bytes)
