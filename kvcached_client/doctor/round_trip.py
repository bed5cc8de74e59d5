"""The last check of `kvcached_client.doctor`: stores real bytes in the daemon's host pool and loads them again.

The check uses its own namespace and clears it at the end. It runs only if no cached block must be evicted for it.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvcached_client.admin import Admin
from kvcached_client.blocks.host_layout import slots_per_slab
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.doctor.checks import DEADLINE_MS, Finding
from kvcached_client.errors import ErrorCode, KvcachedError, RequestError
from kvcached_client.offload import OffloadClient, OffloadLayout, PreparedStore, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.engine import OffloadInfo, StatsReport

_NAME: Final = "doctor"
_BLOCK_SIZE: Final = 32
_LAYERS: Final = 2
_PAGE_BYTES: Final = 4096
_BLOCKS: Final = 4
_FIX: Final = "see the daemon's log; report it with the output of kvcached doctor --json"


@dataclass(frozen=True, slots=True)
class _Cpu:
    """The device of numpy arrays."""

    type: str = "cpu"


@dataclass(frozen=True, slots=True)
class _Layer:
    """An array with the interface of an engine's tensor: one page of bytes for each block."""

    pages: npt.NDArray[np.uint8]
    dtype: str = "uint8"
    device: _Cpu = _Cpu()

    @property
    def shape(self) -> Sequence[int]:
        """Number of blocks, and bytes of a page."""
        return self.pages.shape

    def stride(self) -> Sequence[int]:
        """Strides in elements; an element is a byte."""
        return self.pages.strides

    def element_size(self) -> int:
        """Bytes of an element."""
        return 1

    def data_ptr(self) -> int:
        """Address of the first page."""
        return int(self.pages.ctypes.data)


def round_trip(run_dir: Path, offered: OffloadInfo) -> Iterator[Finding]:
    """Store blocks as an engine does, match them, load them, and compare the bytes."""
    try:
        with Admin.connect(run_dir, deadline_ms=DEADLINE_MS) as admin:
            reason = _why_not(admin.stats(), offered)
        if reason:
            yield Finding("round trip", "warn", f"not tried: {reason}", "try it on a daemon that has just been started")
            return
        yield _round_trip(run_dir)
    except KvcachedError as error:
        if isinstance(error, RequestError) and error.code is ErrorCode.FORBIDDEN:
            yield Finding("round trip", "warn", f"not tried: {error.message}", f"{error.fix}, for this check")
            return
        yield Finding("round trip", "fail", str(error), _FIX)


def _why_not(stats: StatsReport, offered: OffloadInfo) -> str:
    """What the check's namespace would displace; "" for nothing."""
    if not slots_per_slab(offered.slab_bytes, _LAYERS * _PAGE_BYTES, 1):
        return f"a slab of {offered.slab_bytes} bytes holds no block of {_LAYERS * _PAGE_BYTES}"
    attached = [host for host in stats.hosts if not host.replicas and host.label != _NAME]
    if len(attached) >= offered.namespaces_max:
        return f"all {offered.namespaces_max} namespaces are in use, and one of them might be forgotten for it"
    free = offered.slabs - sum(host.slabs for host in stats.hosts)
    held_back = sum(not host.slabs for host in stats.hosts)
    if free <= held_back:
        return f"the host pool has no slab left of {offered.slabs}, and cached blocks would be evicted for it"
    return ""


def _round_trip(run_dir: Path) -> Finding:
    layers = [np.zeros((2 * _BLOCKS, _PAGE_BYTES), np.uint8) for _ in range(_LAYERS)]
    source = np.frombuffer(os.urandom(_LAYERS * _BLOCKS * _PAGE_BYTES), np.uint8)
    for layer, part in zip(layers, source.reshape(_LAYERS, _BLOCKS, _PAGE_BYTES), strict=True):
        layer[:_BLOCKS] = part
    tensors: dict[str, Any] = {f"layer.{number}": _Layer(layer) for number, layer in enumerate(layers)}
    pages = EnginePages.of_tensors(tensors)
    with OffloadClient.connect(
        run_dir,
        engine=_NAME,
        instance=new_instance(),
        keyspace=hashlib.blake2b(_NAME.encode(), digest_size=32).digest(),
        label=_NAME,
        layout=OffloadLayout(_BLOCK_SIZE, 1, pages.block_bytes, pages.fingerprint),
        deadline_ms=DEADLINE_MS,
    ) as client:
        if client.read_only:
            text = "not tried: engines of this user only load, by read_only in [[access.engine]]"
            return Finding("round trip", "warn", text, "try it as a user whose engines store blocks")
        try:
            with OffloadShard.join(client.session, 0, pages, deadline_ms=DEADLINE_MS) as shard:
                problem = _store_and_load(client, shard)
        finally:
            client.clear()
    same = all(np.array_equal(layer[:_BLOCKS], layer[_BLOCKS:]) for layer in layers)
    if not problem and not same:
        problem = "loaded bytes differ from those that were stored"
    if problem:
        return Finding("round trip", "fail", problem, _FIX)
    size = len(source)
    said = f"{_BLOCKS} blocks, {size} bytes: stored, found, loaded, equal, cleared"
    return Finding("round trip", "ok", f"{said}; reports list the empty namespace {_NAME!r} from now on")


def _store_and_load(client: OffloadClient, shard: OffloadShard) -> str:
    """Store blocks 0 to n and load them as blocks n to 2n; returns the problem, "" if there is none."""
    keys = os.urandom(16 * _BLOCKS)
    tokens = _BLOCK_SIZE * _BLOCKS
    held = client.acquire("doctor-1", keys, tokens, full=True)
    if held.hit:
        return f"{held.hit} blocks of random keys were found"
    store: PreparedStore = client.prepare_store(held.lease, 0, keys)
    if store.depth != _BLOCKS:
        return f"the host pool has room for {store.depth} of {_BLOCKS} blocks"
    own = np.arange(_BLOCKS, dtype=np.int32)
    shard.store(store.job(keys, own))
    client.release(held.lease)
    held = client.acquire("doctor-2", keys, tokens, full=True)
    if held.hit != _BLOCKS:
        return f"{held.hit} of {_BLOCKS} stored blocks are found"
    load = client.prepare_load(held.lease, 0, _BLOCKS)
    bad = shard.load(load.job(keys, own + _BLOCKS))
    client.release(held.lease)
    return f"{len(bad)} of {_BLOCKS} blocks are not what was stored" if bad else ""
