"""An engine's tensors, a host pool and jobs between them, without torch."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.blocks.transfers import BlockTransfers
from kvcached_client.offload_shard import BlockJob, JobSpan
from kvcached_client.types import TransferId

NAMESPACE, FINGERPRINT, GENERATION, EPOCH = b"namespace-namesp", b"fingerprint-fing", 5, 11
SHARD, SHARDS = 1, 2


class HostTensor:
    """A view of memory that looks like a tensor of torch."""

    def __init__(self, array: npt.NDArray[np.uint8 | np.float32], device: str = "cpu") -> None:
        self.array = array
        self.shape = array.shape
        self.dtype = f"torch.{array.dtype}"
        self.device = SimpleNamespace(type=device)

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)

    def element_size(self) -> int:
        return self.array.itemsize

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)


def layer(blocks: int, page_bytes: int, *, gap_bytes: int = 0, seed: int = 0, alignment: int = 0) -> HostTensor:
    """Random pages, `gap_bytes` apart, whose first one is so many bytes behind a page boundary."""
    stride = page_bytes + gap_bytes
    content = np.frombuffer(random.Random(seed).randbytes(blocks * stride), np.uint8)
    memory = np.empty(len(content) + 4096 + alignment, np.uint8)
    start = -memory.ctypes.data % 4096 + alignment
    memory[start : start + len(content)] = content
    return HostTensor(memory[start : start + len(content)].reshape(blocks, stride)[:, :page_bytes])


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def span(blocks: Sequence[int], slots: Sequence[int], *, depth: int = 0) -> JobSpan:
    """Blocks of the one chain whose keys are 1, 2, 3, …, from `depth` on."""
    return JobSpan(
        depth=depth,
        parent=key_of(depth) if depth else b"",
        keys=b"".join(key_of(depth + index + 1) for index in range(len(blocks))),
        blocks=np.array(blocks, np.int64),
        slots=np.array(slots, np.int32),
    )


def job(*spans: JobSpan, transfer: int = 3, generation: int = GENERATION) -> BlockJob:
    return BlockJob(TransferId(transfer), generation, spans)


@dataclass
class EngineRig:
    """A shard of an engine and a host pool of its own process."""

    tensors: list[HostTensor]
    host: HostGeometry
    memory: ctypes.Array[ctypes.c_ubyte]
    transfers: BlockTransfers = field(init=False)

    def __post_init__(self) -> None:
        pages = EnginePages.of_tensors({f"layer{index}": tensor for index, tensor in enumerate(self.tensors)})
        self.transfers = BlockTransfers(
            pages, self.host, SHARD, self.memory, namespace=NAMESPACE, fingerprint=FINGERPRINT
        )

    @property
    def view(self) -> memoryview:
        """The host pool."""
        return memoryview(self.memory).cast("B")

    def block(self, index: int) -> bytes:
        """A block of the engine, layer after layer."""
        return b"".join(tensor.array[index].tobytes() for tensor in self.tensors)

    def blocks(self) -> list[bytes]:
        """All of them."""
        return [self.block(index) for index in range(len(self.tensors[0].array))]

    def fill(self, index: int, value: int) -> None:
        """Overwrite a block of the engine."""
        for tensor in self.tensors:
            tensor.array[index] = value

    def slot(self, slot: int) -> memoryview:
        """The block in a host slot."""
        place = self.host.block_offset(slot, SHARD)
        return self.view[place : place + self.host.block_bytes]

    def header(self, slot: int) -> memoryview:
        """Its header."""
        place = self.host.header_offset(slot, SHARD)
        return self.view[place : place + 128]


@contextmanager
def engine_rig(tensors: list[HostTensor], *, slots_per_slab: int = 3, slabs: int = 3) -> Iterator[EngineRig]:
    """A rig whose host pool is full of random bytes."""
    block_bytes = sum(tensor.array[0].nbytes for tensor in tensors)
    part = -(-(slots_per_slab * block_bytes + 4096) // 4096) * 4096
    host = HostGeometry(slabs=slabs, slab_bytes=SHARDS * part, shards=SHARDS, block_bytes=block_bytes)
    backing = np.empty(host.size_bytes + 4096, np.uint8)
    start = -backing.ctypes.data % 4096
    backing[:] = np.frombuffer(random.Random(1).randbytes(len(backing)), np.uint8)
    memory = (ctypes.c_ubyte * host.size_bytes).from_buffer(backing.data, start)
    yield EngineRig(tensors, host, memory)
