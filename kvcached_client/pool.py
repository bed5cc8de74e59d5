"""A shard's pool, mapped into this process.

The daemon reuses slots once this process is dead (see the attach section of docs/protocol.md). Therefore:

* No child may keep the memory: the mapping is `MADV_DONTFORK`, and its descriptor is closed as soon as it is mapped.
* The memory cannot change its size under a reader: its seals are checked before it is mapped.
* The mapping lives as long as its last view, in whatever order things are closed.

A pool on a CUDA device is mapped by the driver; it gives arrays by `MappedPool.cuda_keys_values`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self, cast

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.blocks.mapping import Buffer, map_sealed, prefer_huge_pages, unusable
from kvcached_client.blocks.progress import ProgressReader
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.protocol.grants import check_number
from kvcached_client.transport.attach import JoinedMemory, SessionGrant, close_all, join

if TYPE_CHECKING:
    from kvcached_client.cuda.mapping import CudaArray, CudaBuffer

#: numpy has no bfloat16 and no float8: views show these as unsigned integers of the same size.
_NUMPY_DTYPE: Final[dict[str, str]] = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float8_e4m3fn": "u1",
    "float8_e5m2": "u1",
    "int8": "i1",
    "uint8": "u1",
}


_KINDS: Final = ("memfd", "cuda")


class _Place(NamedTuple):
    """An array in the pool: offset and strides are in bytes."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset_bytes: int
    strides: tuple[int, ...]


class MappedPool:
    """One shard's slots as arrays that share the pool's memory. Made by `map_pool`.

    Views stay valid after `close`; the memory is unmapped with the last of them. Then, or when the process exits
    normally, the daemon is told that this process no longer uses the pool. On a CUDA device both wait for the work that
    is queued there: kernels may use the pool until they have run. A process that ends without `close` counts
    as dead: its session is over.

    In a forked child every method but `close` raises `RuntimeError`. The child does not have the memory of its parent's
    views, and must not touch them.

    Attributes:
        layout: shape of a block.
        slots: number of slots.
        shard: index of this shard.
        epoch: epoch of the pool when it was mapped.
        device: UUID of the CUDA device that has the pool; empty where it is memory of this machine.
    """

    def __init__(self, memory: JoinedMemory, buffer: Buffer | CudaBuffer, progress: ProgressReader) -> None:
        joined = memory.joined
        self.device: str = joined.device
        self.layout: Layout = joined.layout
        self.slots: int = joined.slots
        self.shard: int = joined.shard
        self.epoch: int = joined.epoch
        self._connection = memory.connection
        self._process_id = os.getpid()
        self._buffer: Buffer | CudaBuffer | None = buffer
        self._progress: ProgressReader | None = progress

    def __repr__(self) -> str:
        place = f"device={self.device!r}" if self.device else "on the CPU"
        state = "" if self._buffer is not None else ", closed"
        return f"MappedPool(shard={self.shard}, slots={self.slots}, {place}{state})"

    def pages(self, layer: int, group: int = 0) -> npt.NDArray[np.uint8]:
        """The pages of one layer as bytes, scales included: uint8 ``[slots, page_bytes]``.

        Args:
            layer: index of the layer in its group.
            group: index of the layer's group in `layout`.

        Raises:
            IndexError: there is no such layer or group.
            ValueError: the pool is closed, or on a CUDA device.
            RuntimeError: this process is a fork of the one that mapped the pool.
        """
        self._check_process()
        page_bytes = self._group(layer, group).page_bytes(self.layout.block_size)
        offset, stride = self._place(layer, group)
        return self._view(np.dtype(np.uint8), (self.slots, page_bytes), offset, (stride, 1))

    def keys_values(self, layer: int, group: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any] | None]:
        """K and V of one layer.

        K has the shape ``[slots, block_size, kv_heads, head_dim]`` and V ``[slots, block_size, kv_heads, v_head_dim]``;
        V is None in a group without V (MLA). float32, float16, int8 and uint8 have numpy's type; bfloat16 is shown as
        uint16 and float8 as uint8, bit for bit (`kvcached_client.tensors` returns their real types).

        Raises:
            IndexError: there is no such layer or group.
            ValueError: the pool is closed, or on a CUDA device.
            RuntimeError: this process is a fork of the one that mapped the pool.
        """
        self._check_process()
        keys, values = self._heads(layer, group)
        return self._view(*keys), None if values is None else self._view(*values)

    def cuda_keys_values(self, layer: int, group: int = 0) -> tuple[CudaArray, CudaArray | None]:
        """As `keys_values`, of a pool on a CUDA device: arrays by the CUDA array interface.

        Raises:
            IndexError: there is no such layer or group.
            ValueError: the pool is closed, or not on a CUDA device.
            RuntimeError: this process is a fork of the one that mapped the pool.
        """
        self._check_process()
        if self._buffer is None:
            raise ValueError("the mapped pool is closed")
        if not self.device:
            raise ValueError("the pool is not on a CUDA device: use keys_values")
        keys, values = self._heads(layer, group)
        return self._cuda_array(keys), None if values is None else self._cuda_array(values)

    def wait_layer(self, tickets: Iterable[LoadTicket], layer: int, group: int = 0, *, deadline_ms: int) -> None:
        """Wait until one layer of the loading blocks has arrived on this shard. Without tickets it returns at once.

        A result computed from such a layer is valid only if `Lease.wait_loaded` then returns the whole hit: a load
        whose progress entry was reused counts as done here, however it ended. Only one thread may wait at a time.

        Args:
            tickets: `Lease.loads`, of one or more leases.
            layer: index of the layer in its group.
            group: index of the layer's group in `layout`.
            deadline_ms: limit for this call.

        Raises:
            LoadFailed: a load failed, or was cut short. Do not read its slots.
            DeadlineExceeded: a load has not reached the layer yet; you may wait again.
            DaemonUnreachable: the daemon or the pool is gone.
            IndexError: there is no such layer or group.
            ValueError: the pool is closed.
            RuntimeError: this process is a fork of the one that mapped the pool.
        """
        self._check_process()
        self._group(layer, group)
        if self._progress is None:
            raise ValueError("the mapped pool is closed")
        layers_before = sum(each.layers for each in self.layout.groups[:group])
        self._progress.wait_layer(tickets, layers_before + layer, deadline_ms=deadline_ms)

    def close(self) -> None:
        """Give out no more views and stop waiting; the session is left with the last view.

        Does nothing the second time.
        """
        self._progress = None
        buffer, self._buffer = self._buffer, None
        if buffer is None:
            return
        if isinstance(buffer, ctypes.Array):
            weakref.finalize(buffer, self._connection.leave)
        else:
            buffer.when_unused(self._connection.leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_process(self) -> None:
        """Refuse a forked child: it has not inherited the mapping, and other memory of its own may be in its place."""
        if os.getpid() != self._process_id:
            raise RuntimeError(
                f"this mapped pool belongs to process {self._process_id}; a forked child calls map_pool itself"
            )

    def _group(self, layer: int, group: int) -> KvGroup:
        if not 0 <= group < len(self.layout.groups):
            raise IndexError(f"group {group} of {len(self.layout.groups)}")
        chosen = self.layout.groups[group]
        if not 0 <= layer < chosen.layers:
            raise IndexError(f"layer {layer} of {chosen.layers} in group {group}")
        return chosen

    def _place(self, layer: int, group: int) -> tuple[int, int]:
        return self.layout.page_offset(self.slots, group, layer), self.layout.slot_stride_bytes(group)

    def _cuda_array(self, place: _Place) -> CudaArray:
        from kvcached_client.cuda.mapping import CudaArray  # noqa: PLC0415 - only pools on a device need the driver

        # torch has signed integers of 16 bits, and views them as bfloat16.
        dtype = place.dtype.str.replace("<u2", "<i2")
        return CudaArray(cast("CudaBuffer", self._buffer), dtype, place.shape, place.offset_bytes, place.strides)

    def _heads(self, layer: int, group: int) -> tuple[_Place, _Place | None]:
        """Where K and V of one layer are."""
        found = self._group(layer, group)
        offset, stride = self._place(layer, group)
        keys = _place(self, found, found.head_dim, offset, stride)
        if not found.v_head_dim:
            return keys, None
        return keys, _place(self, found, found.v_head_dim, offset + found.k_bytes(self.layout.block_size), stride)

    def _view(
        self, dtype: np.dtype[Any], shape: tuple[int, ...], offset: int, strides: tuple[int, ...]
    ) -> npt.NDArray[Any]:
        if self._buffer is None:
            raise ValueError("the mapped pool is closed")
        if self.device:
            raise ValueError("the pool is on a CUDA device: use cuda_keys_values, or kvcached_client.tensors")
        return np.ndarray(shape, dtype, memoryview(cast("Buffer", self._buffer)), offset, strides)


def _place(pool: MappedPool, group: KvGroup, head_dim: int, offset: int, stride: int) -> _Place:
    dtype = np.dtype(_NUMPY_DTYPE[group.dtype])
    head_bytes = head_dim * dtype.itemsize
    shape = (pool.slots, pool.layout.block_size, group.kv_heads, head_dim)
    return _Place(dtype, shape, offset, (stride, group.kv_heads * head_bytes, head_bytes, dtype.itemsize))


def map_pool(grant: SessionGrant, shard: int = 0, *, deadline_ms: int = 5000) -> MappedPool:
    """Join a session as one of its shards and map that shard's slots, readable and writable.

    Call it in the process that uses the memory: a forked child does not inherit the mapping.

    Raises:
        DaemonUnreachable: nothing listens in the session's run directory.
        DaemonSilent: no reply came in time.
        Refused: the socket belongs to another user, who is not root.
        RequestError: the daemon refused.
        DaemonFailure: the memory is not sealed, not of the right size, or cannot be mapped.
        DeviceError: this process has no CUDA driver, does not see the device, or the driver refused to map it.
    """
    memory = join(grant, check_number("shard", shard), deadline_ms=deadline_ms)
    try:
        return _map(memory)
    except BaseException:
        memory.connection.close()
        close_all(memory.events)
        raise
    finally:
        close_all((memory.pool, memory.progress))


def _map(memory: JoinedMemory) -> MappedPool:
    joined = memory.joined
    if joined.kind not in _KINDS or (joined.kind == "cuda") != bool(joined.device):
        raise request_error(
            ErrorCode.UNSUPPORTED_VERSION,
            f"pool memory of kind {joined.kind!r} on device {joined.device!r}",
            f"this client maps {' and '.join(_KINDS)}",
        )
    joined.layout.check()
    size_bytes = joined.layout.pool_bytes(joined.slots)
    if joined.kind == "cuda":
        return MappedPool(
            memory, _cuda_buffer(memory, size_bytes), ProgressReader(memory.progress, memory.events, memory.connection)
        )
    actual_bytes = os.fstat(memory.pool).st_size
    if not size_bytes == joined.pool_bytes == actual_bytes or size_bytes <= 0:
        raise unusable(f"{actual_bytes} bytes, announced as {joined.pool_bytes}, but the layout takes {size_bytes}")
    buffer = map_sealed(memory.pool, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    prefer_huge_pages(ctypes.addressof(buffer), size_bytes)
    # Last, because it takes over the eventfds.
    return MappedPool(memory, buffer, ProgressReader(memory.progress, memory.events, memory.connection))


def _cuda_buffer(memory: JoinedMemory, size_bytes: int) -> CudaBuffer:
    from kvcached_client.cuda.mapping import CudaBuffer  # noqa: PLC0415 - only such pools need the driver

    if not 0 < size_bytes == memory.joined.pool_bytes:
        raise unusable(f"announced as {memory.joined.pool_bytes} bytes, but the layout takes {size_bytes}")
    return CudaBuffer(memory.pool, size_bytes, memory.joined.device)
