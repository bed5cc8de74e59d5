from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import msgspec
import pytest

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.sealed import SharedMemory, sealed_memfd
from kvcached.worker.messages import Load, Probe, Store, WorkerConfig
from kvcached.worker.shard import Shard
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.types import PROGRESS_SLOTS
from tests.worker.groups import SLOTS, open_descriptors, tiny_layout
from tests.worker.host_rigs import FINGERPRINT, HOST, NAMESPACE, SHARDS, load_of, span_of, store_of

CONFIG = WorkerConfig(
    replica="default",
    shard=1,
    geometry=pool_geometry(tiny_layout("layer_first", SHARDS), SLOTS),
    pretouch_bytes=0,
    host=HOST,
    namespace=NAMESPACE,
    fingerprint=FINGERPRINT,
)
WITHOUT_HOST = msgspec.structs.replace(CONFIG, host=None)


@pytest.fixture
def host() -> Iterator[int]:
    descriptor = sealed_memfd("test-host", HOST.size_bytes)
    yield descriptor
    os.close(descriptor)


def given(host: int | None = None) -> list[int]:
    """New memory for a shard, and the host pool's."""
    memory = ShardMemory.make("test", CONFIG.geometry.size_bytes)
    descriptors = [os.dup(each) for each in memory.for_worker]
    memory.close()
    return descriptors if host is None else [*descriptors, os.dup(host)]


def test_blocks_outlive_the_worker_that_stored_them(host: int) -> None:
    """What one worker stored, another one that is handed the same host pool loads, be its own pool empty."""
    span = span_of([(3, 2)], [(6, 2)])
    Shard(CONFIG, given(host)).carry_out(store_of(span))
    second = Shard(CONFIG, given(host))

    assert second.carry_out(load_of(span)) == ()
    assert second.carry_out(load_of(span_of([(3, 2)], [(7, 2)]))) == (0, 1)
    assert Shard(msgspec.structs.replace(CONFIG, shard=0), given(host)).carry_out(load_of(span)) == (0, 1)


def test_shard_keeps_nothing_open_but_its_page(host: int) -> None:
    """What is mapped needs no descriptor any more; those of the page and its events stay open."""
    descriptors = given(host)
    before = open_descriptors()

    shard = Shard(CONFIG, descriptors)

    # The two that were mapped are closed; Python's mapping of the page keeps a descriptor of its own.
    assert (open_descriptors(), shard.progress.descriptor) == (before - 2 + 1, -1)


def test_worker_finds_what_the_pool_had() -> None:
    """A pool's bytes are those that were there before a worker mapped it, pre-touched or not."""
    memory = ShardMemory.make("test", CONFIG.geometry.size_bytes)
    os.pwrite(memory.descriptor, b"there", 100)
    config = msgspec.structs.replace(WITHOUT_HOST, pretouch_bytes=CONFIG.geometry.size_bytes)
    Shard(config, [os.dup(each) for each in memory.for_worker])

    assert os.pread(memory.descriptor, 5, 100) == b"there"
    memory.close()


@pytest.mark.parametrize("work", [store_of(span_of([(0, 1)], [(0, 1)])), load_of(span_of([(0, 1)], [(0, 1)]))])
def test_shard_without_host_pool_refuses_transfers(work: Store | Load) -> None:
    """Without a host pool a transfer is an error, a load is failed in the page, and a probe still works."""
    shard = Shard(WITHOUT_HOST, given())

    with pytest.raises(ValueError, match="this worker has no host pool"):
        shard.carry_out(work)
    assert shard.carry_out(Probe(source=0, target=1, seed=0)) == ()

    state = os.pread(shard.progress.writable[0], 4, 4 * 64 + 12)
    assert int.from_bytes(state, "little") == (2 if isinstance(work, Load) else 0)


def test_memory_that_is_not_what_was_said_is_refused(host: int) -> None:
    """Memory that is missing, unexpected, too small, or free to shrink is refused before it is used."""
    small = sealed_memfd("test-small", HOST.size_bytes - 4096)
    unsealed = os.memfd_create("test-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, HOST.size_bytes)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    for config, descriptors, reason in [
        (CONFIG, given(), f"{2 + PROGRESS_SLOTS} descriptors, and a host pool"),
        (WITHOUT_HOST, given(host), f"{3 + PROGRESS_SLOTS} descriptors, and no host pool"),
        (CONFIG, [*given(), small], "shared memory of 45056 bytes, 49152 expected"),
        (CONFIG, [*given(), unsealed], "not sealed against shrinking"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Shard(config, descriptors)


def test_shared_memory_is_unmapped_once(host: int) -> None:
    """Mapped memory shows what others write, and is gone after it was closed, also twice."""
    memory = SharedMemory(host, HOST.size_bytes)
    os.pwrite(host, b"there", 4096)

    assert bytes(memory.view[4096:4101]) == b"there"
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="released"):
        memory.view[0]
