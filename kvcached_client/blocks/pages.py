"""Addresses of the pages of a shard's blocks, in an engine's own KV tensors or in a device pool.

A *page* is the part of a block that belongs to one layer, one contiguous run of bytes. A block in the host pool is its
pages back to back, in the order of the layers.

The first dimension of an engine's tensors is the block. A device pool consists of *strips*, arrays of equal pages, one
page per slot: a block-first pool is one strip whose pages are whole blocks, a layer-first pool has a strip per layer.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, NamedTuple, Protocol, Self

import msgspec

from kvcached_client.errors import RequestError, bad_value

if TYPE_CHECKING:
    from kvcached_client.blocks.layout import Layout

_Size = Annotated[int, msgspec.Meta(gt=0, le=1 << 46)]
_Offset = Annotated[int, msgspec.Meta(ge=0, le=1 << 46)]

#: One entry of a fingerprint: index of the pages, and the name, shape, strides and dtype of a tensor over them.
_Description = tuple[int, str, list[int], list[int], str]


class Device(Protocol):
    """The part of a tensor's device that is used."""

    @property
    def type(self) -> str:
        """Kind of the device: "cpu" is this process's memory."""


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


class LayerPages(NamedTuple):
    """The pages of one layer: the page of block b is at ``address + b * stride_bytes``."""

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
        fingerprint: 16 bytes that two shards share only if their blocks are interchangeable byte for byte.
        owners: objects that keep the memory alive as long as this object lives.
    """

    layers: tuple[LayerPages, ...]
    blocks: int
    fingerprint: bytes
    owners: tuple[object, ...]

    @classmethod
    def of_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The pages of tensors ``[blocks, …]``, one tensor for each layer, by layer name.

        Layers that share one tensor share its pages, which are copied once.

        Raises:
            BadRequest: there is no tensor, a tensor is not on the CPU, blocks are not the first dimension or not
                contiguous, or the tensors differ in their number of blocks.
        """
        if not tensors:
            raise _unusable("there is no tensor", "register the engine's KV tensors first")
        places: dict[LayerPages, int] = {}
        described: list[_Description] = []
        for name, tensor in tensors.items():
            layer, shape, strides = _pages(name, tensor)
            described.append((places.setdefault(layer, len(places)), name, shape, strides, str(tensor.dtype)))
        numbers = {tensor.shape[0] for tensor in tensors.values()}
        if len(numbers) > 1:
            raise _unusable(
                f"tensors of {' and '.join(map(str, sorted(numbers)))} blocks", "use one block pool for all layers"
            )
        digest = hashlib.blake2b(msgspec.json.encode(described), digest_size=16, person=b"kvcached pages 1")
        return cls(tuple(places), numbers.pop(), digest.digest(), tuple(tensors.values()))

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block with all its layers."""
        return sum(layer.page_bytes for layer in self.layers)


def _pages(name: str, tensor: Tensor) -> tuple[LayerPages, list[int], list[int]]:
    """The pages of one tensor, and the shape and the strides of a page."""
    try:
        device, shape, strides = tensor.device.type, list(tensor.shape), list(tensor.stride())
        address, element_bytes = tensor.data_ptr(), tensor.element_size()
    except AttributeError as error:
        raise _unusable(f"{name} is no tensor: {error}", "register one tensor for each layer") from None
    if device != "cpu":
        raise _unusable(
            f"{name} is on device {device!r}", "this version copies CPU tensors only: run the engine on CPU"
        )
    page_shape = shape[1:]
    if len(shape) < 2 or 0 in shape or shape[0] == 2:  # noqa: PLR2004 - a pair is K and V, and no pool of blocks
        raise _unusable(
            f"{name} has the shape {shape}",
            "use a layout [blocks, …] that has K and V of a block side by side, and more than two blocks",
        )
    elements = _contiguous_elements(page_shape, strides[1:])
    if elements is None or strides[0] < elements:
        raise _unusable(
            f"blocks of {name} are not contiguous: shape {shape}, strides {strides}",
            "use a layout whose blocks are one run of bytes in every layer",
        )
    # The stride of a dimension with one element has no meaning, so the fingerprint leaves it out.
    known = [stride if size > 1 else 0 for size, stride in zip(page_shape, strides[1:], strict=True)]
    return LayerPages(address, elements * element_bytes, strides[0] * element_bytes), page_shape, known


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
