"""Addresses of the pages of a shard's blocks, in an engine's own KV tensors or in a device pool.

A *page* is the part of a block that belongs to one layer, one contiguous run of bytes. A block in the host pool is its
pages back to back, in the order of the layers.

The first dimension of an engine's tensors is the block, or the pair of K and V with the block as the second one. The
tensors are memory of this process, or all of one CUDA device. A device pool consists of *strips*, arrays of equal
pages, one page per slot: a block-first pool is one strip whose pages are whole blocks, a layer-first pool has a strip
per layer.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple, Protocol, Self, TypeGuard

import msgspec

from kvcached_client.blocks.overlaps import check_apart, without_contained
from kvcached_client.errors import RequestError, bad_value

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvcached_client.blocks.layout import Layout
    from kvcached_client.cuda.engine import EngineDevice

_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 46)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]

_DEVICES: Final = ("cpu", "cuda")
#: A tensor of so many dimensions, of which the first is of this size, holds K and V apart.
_PAIR_DIMENSIONS: Final = 5
_PAIR: Final = 2

#: One entry of a fingerprint: index of the pages, and the name, shape, strides and dtype of a tensor over them.
_Description = tuple[int, str, list[int], list[int], str]


class PageTensor(NamedTuple):
    """How a tensor lies in a page of a block.

    Attributes:
        layer: index of the pages.
        name: the tensor's.
        offset_bytes: where it begins in the page.
        shape, strides: of its part in a page, strides in elements.
        element_bytes, dtype: of its elements.
    """

    layer: int
    name: str
    offset_bytes: int
    shape: list[int]
    strides: list[int]
    element_bytes: int
    dtype: str


class Device(Protocol):
    """The part of a tensor's device that is used."""

    @property
    def type(self) -> str:
        """Kind of the device: "cpu" is this process's memory, "cuda" a CUDA device's."""


class Tensor(Protocol):
    """The part of a tensor that is used. `torch.Tensor` has it; torch itself is not imported."""

    @property
    def shape(self) -> Sequence[int]:
        """Elements in each dimension."""

    @property
    def dtype(self) -> object:
        """Type of the elements; its name is part of the fingerprint."""

    @property
    def device(self) -> Device:
        """Device that holds the elements."""

    def stride(self) -> Sequence[int]:
        """Elements from one index to the next, in each dimension."""

    def element_size(self) -> int:
        """Bytes of one element."""

    def data_ptr(self) -> int:
        """Address of the first element."""


class CudaTensor(Protocol):
    """Memory of a CUDA device, by the CUDA array interface: arrays of CuPy and numba, and those of `MappedPool`."""

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """See https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html."""


class LayerPages(NamedTuple):
    """The pages of one layer, or of its K or V: the page of block b is at ``address + b * stride_bytes``."""

    address: int
    page_bytes: int
    stride_bytes: int


class BlockPages(Protocol):
    """The pages of all blocks of a shard, in any kind of memory."""

    @property
    def layers(self) -> Sequence[LayerPages]:
        """Pages of each layer, in the order of the layers in a block of the host pool."""

    @property
    def blocks(self) -> int:
        """Number of blocks; indices of blocks are lower."""


class Strip(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Pages of one size, back to back: slot s has its page at ``offset_bytes + s * page_bytes`` of the device pool."""

    offset_bytes: _Offset
    page_bytes: _Size


class PoolGeometry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A device pool of `slots` slots on one shard. The strips lie back to back and fill it."""

    slots: _Size
    strips: tuple[Strip, ...]

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block."""
        return sum(strip.page_bytes for strip in self.strips)

    @property
    def size_bytes(self) -> int:
        """Bytes of the pool."""
        return self.slots * self.slot_bytes

    def at(self, address: int) -> PoolPages:
        """The pages of the pool if it is mapped at `address`."""
        return PoolPages(
            tuple(
                LayerPages(address + strip.offset_bytes, strip.page_bytes, strip.page_bytes) for strip in self.strips
            ),
            self.slots,
        )


def pool_geometry(layout: Layout, slots: int) -> PoolGeometry:
    """The strips of a device pool of `slots` slots."""
    if layout.order == "block_first":
        return PoolGeometry(slots=slots, strips=(Strip(0, layout.bytes_per_block()),))
    strips = [
        Strip(layout.page_offset(slots, index, layer), group.page_bytes(layout.block_size))
        for index, group in enumerate(layout.groups)
        for layer in range(group.layers)
    ]
    return PoolGeometry(slots=slots, strips=tuple(strips))


class PoolPages(NamedTuple):
    """All pages of a device pool: a `BlockPages`. The memory must stay mapped while it is used."""

    layers: tuple[LayerPages, ...]
    blocks: int


@dataclass(frozen=True)
class EnginePages:
    """All pages of an engine's shard.

    Attributes:
        layers: pages of each layer, in the order of the layers in a block of the host pool.
        blocks: number of the engine's blocks on this shard.
        fingerprint: 16 bytes that two shards share only if their blocks are interchangeable byte for byte, in whatever
            kind of memory.
        owners: objects that keep the memory alive as long as this object lives.
        is_on_cuda: whether the tensors are memory of a CUDA device.
        tensors: how they lie in the pages; K and V are two if they are apart. Empty if the pages are of no tensors.
    """

    layers: tuple[LayerPages, ...]
    blocks: int
    fingerprint: bytes
    owners: tuple[object, ...]
    is_on_cuda: bool = False
    tensors: tuple[PageTensor, ...] = ()

    def __repr__(self) -> str:
        place = "on a CUDA device" if self.is_on_cuda else "on the CPU"
        return f"EnginePages(blocks={self.blocks}, block_bytes={self.block_bytes}, layers={len(self.layers)}, {place})"

    @classmethod
    def of_tensors(
        cls, tensors: Mapping[str, Tensor | CudaTensor | npt.NDArray[Any]], blocks: int | None = None
    ) -> Self:
        """The pages of tensors ``[blocks, …]``, one tensor for each layer, by layer name.

        They are tensors of torch, arrays of NumPy, or arrays of a CUDA device with ``__cuda_array_interface__``.

        Tensors ``[2, blocks, block_size, heads, dim]`` hold K and V apart; each of them has its own page of a block.
        Layers that share one tensor share its pages, which are copied once; also a layer whose pages are parts of
        another's, as a state may be part of a page that is as large as those of attention.

        Args:
            tensors: by layer name.
            blocks: number of the engine's blocks. A tensor may have several rows for each of them, back to back, as
                attention kernels that take fewer tokens than a block has want it.

        Raises:
            BadRequest: there is no tensor, tensors are neither on the CPU nor on CUDA devices, have no memory, may not
                be written, blocks are not contiguous or share bytes with other blocks, or the tensors differ in their
                number of blocks.
        """
        if not (tensors and isinstance(tensors, Mapping)):
            raise _unusable("there is no tensor with a name", "register a dict of the engine's KV tensors, by layer")
        views = {name: _view(name, tensor) for name, tensor in tensors.items()}
        found = [(name, _of_blocks(part, blocks)) for name, view in views.items() for part in _parts(name, view)]
        parts = [(name, part, *_pages(name, part)) for name, part in found]
        whole = without_contained([pages for _, _, pages, _, _ in parts])
        places: dict[LayerPages, int] = {}
        described: list[_Description] = []
        lying: list[PageTensor] = []
        numbers, kinds = set(), {view.device for view in views.values()}
        for name, part, pages, shape, strides in parts:
            of_page = whole[pages]
            offset = pages.address - of_page.address
            name_at = f"{name} at {offset}" if offset else name
            place = places.setdefault(of_page, len(places))
            described.append((place, name_at, shape, strides, part.dtype))
            lying.append(PageTensor(place, name, offset, shape, part.strides[1:], part.element_bytes, part.dtype))
            numbers.add(part.shape[0])
        if len(numbers) > 1:
            raise _unusable(
                f"tensors of {' and '.join(map(str, sorted(numbers)))} blocks", "use one block pool for all layers"
            )
        if len(kinds) > 1:
            raise _unusable("some are on the CPU, others on a CUDA device", "register the tensors of one device")
        check_apart(list(places), next(iter(numbers)))
        digest = hashlib.blake2b(msgspec.json.encode(described), digest_size=16, person=b"kvcached pages 1")
        owners = tuple(tensors.values())
        return cls(tuple(places), numbers.pop(), digest.digest(), owners, "cuda" in kinds, tuple(lying))

    @cached_property
    def device(self) -> EngineDevice:
        """The CUDA device of the tensors, which need to be on one.

        Raises:
            BadRequest: they are on several devices.
            DeviceError: this process cannot use it.
        """
        from kvcached_client.cuda.engine import EngineDevice  # noqa: PLC0415 - only tensors on a device need the driver

        return EngineDevice.of_layers(self.layers)

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block with all its layers."""
        return sum(layer.page_bytes for layer in self.layers)


class _View(NamedTuple):
    """A tensor. Strides are in elements."""

    device: str
    address: int
    shape: list[int]
    strides: list[int]
    element_bytes: int
    dtype: str


def _view(name: str, tensor: Tensor | CudaTensor | npt.NDArray[Any]) -> _View:
    try:
        if _is_array(tensor):
            view = _array_view(tensor)
        else:
            view = _interface_view(tensor) if _has_interface_only(tensor) else _tensor_view(tensor)
    except (AttributeError, KeyError, TypeError, ValueError, RuntimeError) as error:  # as torch, of a sparse tensor
        raise _unusable(
            f"{name} is no tensor that can be used: {error}",
            "register a tensor of torch, an array of NumPy, or one with __cuda_array_interface__ for each layer",
        ) from None
    if view.device not in _DEVICES:
        raise _unusable(f"{name} is on device {view.device!r}", "run the engine on the CPU or on CUDA devices")
    if not view.address and 0 not in view.shape:
        raise _unusable(f"{name} has no memory", "register tensors once they are allocated, and before they are freed")
    return view


def _has_interface_only(tensor: Any) -> bool:  # noqa: ANN401 - whatever a caller registers
    return hasattr(tensor, "__cuda_array_interface__") and not hasattr(tensor, "data_ptr")


def _tensor_view(tensor: Any) -> _View:  # noqa: ANN401 - checked by what it has
    place, elements = (tensor.data_ptr(), list(tensor.shape), list(tensor.stride())), tensor.element_size()
    return _View(tensor.device.type, *place, elements, str(tensor.dtype))


def _is_array(tensor: object) -> TypeGuard[npt.NDArray[Any]]:
    numpy = sys.modules.get("numpy")  # which whoever has an array has imported
    return numpy is not None and isinstance(tensor, numpy.ndarray)


def _array_view(array: npt.NDArray[Any]) -> _View:
    if not array.flags.writeable:
        raise ValueError("it may only be read, and loads write it")
    if array.dtype.hasobject:
        raise ValueError("its elements are objects of Python")
    if any(step % array.itemsize for step in array.strides):
        raise ValueError(f"strides {array.strides} of elements of {array.itemsize} bytes")
    steps = [step // array.itemsize for step in array.strides]
    return _View("cpu", array.ctypes.data, list(array.shape), steps, array.itemsize, str(array.dtype))


def _interface_view(tensor: Any) -> _View:  # noqa: ANN401 - checked by what it has
    interface = tensor.__cuda_array_interface__
    if interface["data"][1]:
        raise ValueError("it may only be read, and loads write it")
    if interface.get("mask") is not None:
        raise ValueError("some of its elements are masked")
    shape, dtype = list(interface["shape"]), str(interface["typestr"])
    element_bytes = int(dtype[2:])
    strides = interface.get("strides")
    steps = [step / element_bytes for step in strides] if strides else _row_major(shape)
    if any(step != int(step) for step in steps):
        raise ValueError(f"strides {strides} of elements of {element_bytes} bytes")
    return _View("cuda", interface["data"][0], shape, [int(step) for step in steps], element_bytes, dtype)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [prod(shape[dimension + 1 :]) for dimension in range(len(shape))]


def _parts(name: str, view: _View) -> tuple[_View, ...]:
    """A tensor ``[blocks, …]``; of ``[2, blocks, …]`` its K and its V."""
    if len(view.shape) != _PAIR_DIMENSIONS or view.shape[0] != _PAIR:
        return (view,)
    apart, step = view.strides[0], view.strides[1]
    page = _contiguous_elements(view.shape[2:], view.strides[2:]) or 0
    if not page <= apart <= step - page and apart < step * (view.shape[1] - 1) + page:
        raise _unusable(
            f"K and V of {name} overlap: shape {view.shape}, strides {view.strides}",
            "use a layout that keeps them apart",
        )
    keys = view._replace(shape=view.shape[1:], strides=view.strides[1:])
    return keys, keys._replace(address=view.address + apart * view.element_bytes)


def _of_blocks(view: _View, blocks: int | None) -> _View:
    """A tensor with several rows for each block, as ``[blocks, rows of a block, …]``; any other as it is."""
    if not blocks or not view.shape or view.shape[0] <= blocks or view.shape[0] % blocks:
        return view
    rows, step = view.shape[0] // blocks, view.strides[0]
    return view._replace(shape=[blocks, rows, *view.shape[1:]], strides=[rows * step, step, *view.strides[1:]])


def _pages(name: str, view: _View) -> tuple[LayerPages, list[int], list[int]]:
    """The pages of one tensor, and the shape and the strides of a page."""
    shape, strides, page_shape = view.shape, view.strides, view.shape[1:]
    if not page_shape or 0 in shape or shape[0] == _PAIR:
        raise _unusable(
            f"{name} has the shape {shape}",
            "use a layout [blocks, …], or [2, blocks, block_size, heads, dim] for K and V, and more than two blocks",
        )
    elements = _contiguous_elements(page_shape, strides[1:])
    if elements is None or strides[0] < elements:
        raise _unusable(
            f"blocks of {name} are not contiguous: shape {shape}, strides {strides}",
            "use a layout whose blocks are one run of bytes in every layer",
        )
    # The stride of a dimension with one element has no meaning, so the fingerprint leaves it out.
    known = [stride if size > 1 else 0 for size, stride in zip(page_shape, strides[1:], strict=True)]
    return LayerPages(view.address, elements * view.element_bytes, strides[0] * view.element_bytes), page_shape, known


def _contiguous_elements(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """Number of elements of a page without gaps, whatever the order of its dimensions; None if the page has gaps."""
    elements = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1:
            if stride != elements:
                return None
            elements *= size
    return elements


def _unusable(message: str, fix: str) -> RequestError:
    return bad_value(f"KV tensors: {message}", fix)
