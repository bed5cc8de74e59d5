"""An engine in attached mode without an engine: a real daemon, session and shard, and tensors full of random blocks."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.programs import daemon
from kvcached.memory.sealed import SharedMemory, sealed_memfd
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.types import KEY_SIZE_BYTES

_BLOCK_SIZE: Final = 32
_SLAB_BYTES: Final = 64 << 20
#: Host pool: every round stores new blocks, and what it evicts is what older rounds stored.
_JOBS_IN_POOL: Final = 3
_DEADLINE_MS: Final = 10_000


class PageShape(NamedTuple):
    """What vLLM's CPU tensors are like: one for each layer, ``[blocks, KV heads, 32 tokens, 2 * head_dim]``.

    Attributes:
        name: as metrics spell it.
        layers: tensors.
        page_bytes: of one block in one of them.
        blocks: of one copy.
    """

    name: str
    layers: int
    page_bytes: int
    blocks: int

    @property
    def job_bytes(self) -> int:
        """Bytes of one copy."""
        return self.blocks * self.layers * self.page_bytes


#: Two layers, two KV heads of 32 in float32: the model that the tests run.
TINY: Final = PageShape("tiny", layers=2, page_bytes=16 << 10, blocks=2048)
#: 32 layers, eight KV heads of 128 in bfloat16.
LLAMA_8B: Final = PageShape("8b", layers=32, page_bytes=128 << 10, blocks=32)


class _Device(NamedTuple):
    type: str = "cpu"


@dataclass(frozen=True, slots=True)
class LayerTensor:
    """Bytes ``[blocks, page]``, in the words of a torch tensor."""

    address: int
    shape: tuple[int, int]
    dtype: str = "uint8"
    device: _Device = field(default=_Device())

    def stride(self) -> Sequence[int]:
        """See `kvcached_client.blocks.pages.Tensor`, as for the others."""
        return self.shape[1], 1

    def element_size(self) -> int:
        """Of a byte."""
        return 1

    def data_ptr(self) -> int:
        """Where the tensor begins."""
        return self.address


class AttachedRig(AbstractContextManager["AttachedRig"]):
    """One shard that stores scattered blocks of its tensors in the daemon's host pool and loads them to other blocks.

    Every round is: `prepare_store`, `store`, `prepare_load`, `load`. What prepares is the scheduler's part.

    Args:
        shape: of the pages.
        directory: for the daemon's files.
        verify: whether loads compare checksums.
        more: tables of the daemon's configuration besides.

    Attributes:
        shape: of the pages.
        run_dir: of the daemon.
        client: the engine's session.
        keys: of the blocks that were announced last.
    """

    def __init__(self, shape: PageShape, directory: Path, *, verify: bool, more: str = "") -> None:
        self.shape = shape
        self._random = random.Random("attached")
        self._rounds = 0
        self._engine_blocks = 2 * shape.blocks
        with ExitStack() as stack:
            self.run_dir = stack.enter_context(daemon(_config(shape, verify=verify) + more, directory))
            self._tensors = stack.enter_context(_mapped(shape.layers * self._layer_bytes))
            self._tensors_address = ctypes.addressof(ctypes.c_ubyte.from_buffer(self._tensors))
            self._beside = _shared(shape.job_bytes)
            stack.callback(self._beside.close)
            pages = EnginePages.of_tensors(dict(self._layers()))
            self._fill()
            self.client = stack.enter_context(_connect(self.run_dir, pages))
            self._shard = OffloadShard.join(self.client.session, 0, pages, deadline_ms=_DEADLINE_MS)
            stack.callback(self._shard.close)
            self._stack = stack.pop_all()

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # --- what a scheduler does --------------------------------------------------------------------------------------

    def prepare_store(self) -> None:
        """Announce new blocks, at new scattered places of the tensors."""
        self._rounds += 1
        places = np.array(self._random.sample(range(self._engine_blocks), self._engine_blocks))
        self._sources, self._targets = places[: self.shape.blocks], places[self.shape.blocks :]
        self.keys = self._random.randbytes(self.shape.blocks * KEY_SIZE_BYTES)
        tokens = self.shape.blocks * _BLOCK_SIZE
        self._lease = self.client.acquire(f"store-{self._rounds}", self.keys, tokens, full=True).lease
        plan = self.client.prepare_store(self._lease, 0, self.keys)
        assert len(plan.slots) == self.shape.blocks
        self._job = plan.job(self.keys, self._sources)

    def give_back(self) -> None:
        """Release the lease of `prepare_store`."""
        self.client.release(self._lease)

    @property
    def tokens(self) -> int:
        """Of a prompt of all announced blocks."""
        return self.shape.blocks * _BLOCK_SIZE

    def prepare_load(self) -> None:
        """Ask for the blocks that were stored last, into other places."""
        self.client.release(self._lease)
        tokens = self.shape.blocks * _BLOCK_SIZE
        hold = self.client.acquire(f"load-{self._rounds}", self.keys, tokens, full=True)
        assert hold.hit == self.shape.blocks
        plan = self.client.prepare_load(hold.lease, 0, hold.hit)
        self.client.release(hold.lease)
        self._job = plan.job(self.keys, self._targets)

    # --- what a shard does ------------------------------------------------------------------------------------------

    def store(self) -> None:
        """Headers, copies, checksums, and the word to the daemon."""
        self._shard.store(self._job)

    def load(self) -> None:
        """Headers, checksums unless the daemon does without, copies, and the word to the daemon."""
        assert not self._shard.load(self._job)

    def compare(self) -> None:
        """Refuse to report times of copies that do not arrive."""
        for layer in range(self.shape.layers):
            pages = self._pages(layer)
            assert np.array_equal(pages[self._sources], pages[self._targets])

    def forget_targets(self) -> None:
        """Overwrite what was loaded."""
        for layer in range(self.shape.layers):
            self._pages(layer)[self._targets] = 0

    # --- what it is compared with -----------------------------------------------------------------------------------

    def memcpy_to_host(self) -> None:
        """One copy of as many bytes from the tensors into shared memory."""
        ctypes.memmove(self._beside.address, self._tensors_address, self.shape.job_bytes)

    def memcpy_to_engine(self) -> None:
        """One copy of as many bytes back."""
        ctypes.memmove(self._tensors_address, self._beside.address, self.shape.job_bytes)

    def python_to_host(self) -> None:
        """A copy for each block and layer, the way an engine's script would write it."""
        beside = np.frombuffer(self._beside.view, np.uint8).reshape(
            self.shape.blocks, self.shape.layers, self.shape.page_bytes
        )
        layers = [self._pages(layer) for layer in range(self.shape.layers)]
        for place, block in enumerate(self._sources):
            for layer, pages in enumerate(layers):
                beside[place, layer] = pages[block]

    # --- steps ------------------------------------------------------------------------------------------------------

    @property
    def _layer_bytes(self) -> int:
        return self._engine_blocks * self.shape.page_bytes

    def _layers(self) -> list[tuple[str, LayerTensor]]:
        shape = self._engine_blocks, self.shape.page_bytes
        return [
            (f"layer.{layer}", LayerTensor(self._tensors_address + layer * self._layer_bytes, shape))
            for layer in range(self.shape.layers)
        ]

    def _pages(self, layer: int) -> npt.NDArray[np.uint8]:
        tensor = np.frombuffer(self._tensors, np.uint8, self._layer_bytes, layer * self._layer_bytes)
        return tensor.reshape(self._engine_blocks, self.shape.page_bytes)

    def _fill(self) -> None:
        """Random bytes in every page, and every byte of both sides resident."""
        everything = np.frombuffer(self._tensors, np.uint8)
        everything[:] = np.random.default_rng(0).integers(0, 256, len(everything), dtype=np.uint8)
        ctypes.memset(self._beside.address, 0, self.shape.job_bytes)


def _config(shape: PageShape, *, verify: bool) -> str:
    slabs = -(-_JOBS_IN_POOL * shape.job_bytes // _SLAB_BYTES) + 1
    return f"""
[host]
size_bytes = {slabs * _SLAB_BYTES}
slab_bytes = {_SLAB_BYTES}
verify = "{"always" if verify else "never"}"

[offload]
namespaces_max = 1
"""


def _mapped(size_bytes: int) -> mmap.mmap:
    return mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def _shared(size_bytes: int) -> SharedMemory:
    """Shared memory like the host pool's, for copies that it is compared with."""
    descriptor = sealed_memfd("benchmark-host", size_bytes)
    try:
        return SharedMemory(descriptor, size_bytes)
    finally:
        os.close(descriptor)


def _connect(run_dir: Path, pages: EnginePages) -> OffloadClient:
    layout = OffloadLayout(
        block_size=_BLOCK_SIZE, shards=1, block_bytes=pages.block_bytes, fingerprint=pages.fingerprint
    )
    return OffloadClient.connect(
        run_dir,
        engine="benchmark",
        instance=new_instance(),
        keyspace=bytes(32),
        label="benchmark",
        layout=layout,
        deadline_ms=_DEADLINE_MS,
    )
