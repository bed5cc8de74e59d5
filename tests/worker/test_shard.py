from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator

import msgspec
import pytest

from kvcached.worker.geometry import pool_geometry
from kvcached.worker.memory import SharedMemory, sealed_memfd
from kvcached.worker.messages import Load, Probe, Store, WorkerConfig
from kvcached.worker.progress import PROGRESS_ENTRIES
from kvcached.worker.shard import Shard
from tests.worker.groups import SLOTS, open_descriptors, tiny_layout
from tests.worker.host_rigs import FINGERPRINT, HOST, NAMESPACE, SHARDS, load_of, span_of, store_of

CONFIG = WorkerConfig(
    replica="default",
    shard=1,
    device="cpu",
    geometry=pool_geometry(tiny_layout("layer_first", SHARDS), SLOTS),
    socket_path="",
    pretouch_bytes=0,
    grace_ms=0,
    daemon_pidfd=0,
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


def test_blocks_outlive_the_worker_that_stored_them(host: int) -> None:
    """What one worker stored, another one that is handed the same host pool loads, be its own pool empty."""
    span = span_of([(3, 2)], [(6, 2)])
    Shard(CONFIG, [os.dup(host)]).carry_out(store_of(span))
    second = Shard(CONFIG, [os.dup(host)])

    assert second.carry_out(load_of(span)) == ()
    assert second.carry_out(load_of(span_of([(3, 2)], [(7, 2)]))) == (0, 1)
    assert Shard(msgspec.structs.replace(CONFIG, shard=0), [os.dup(host)]).carry_out(load_of(span)) == (0, 1)


def test_shard_hands_out_what_engines_map_and_keeps_nothing_else_open(host: int) -> None:
    """A shard keeps its pool, its page and the events open; the host pool's descriptor is closed once it is mapped."""
    before = open_descriptors()

    shard = Shard(CONFIG, [os.dup(host)])

    # One more: Python's mapping of the page keeps a descriptor of its own.
    assert open_descriptors() == before + len(shard.descriptors) + 1
    assert len(shard.descriptors) == 2 + PROGRESS_ENTRIES
    assert os.fstat(shard.descriptors[0]).st_size == CONFIG.geometry.size_bytes


@pytest.mark.parametrize("work", [store_of(span_of([(0, 1)], [(0, 1)])), load_of(span_of([(0, 1)], [(0, 1)]))])
def test_shard_without_host_pool_refuses_transfers(work: Store | Load) -> None:
    """Without a host pool a transfer is an error, a load is failed in the page, and a probe still works."""
    shard = Shard(WITHOUT_HOST, [])

    with pytest.raises(ValueError, match="this worker has no host pool"):
        shard.carry_out(work)
    assert shard.carry_out(Probe(source=0, target=1, seed=0)) == ()

    state = os.pread(shard.progress.descriptor, 4, 4 * 64 + 12)
    assert int.from_bytes(state, "little") == (2 if isinstance(work, Load) else 0)


def test_host_pool_that_is_not_what_was_said_is_refused(host: int) -> None:
    """A host pool that is missing, unexpected, too small, or free to shrink is refused before it is used."""
    small = sealed_memfd("test-small", HOST.size_bytes - 4096)
    unsealed = os.memfd_create("test-unsealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, HOST.size_bytes)
    fcntl.fcntl(unsealed, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    for config, descriptors, reason in [
        (CONFIG, [], "0 descriptors for a host pool"),
        (WITHOUT_HOST, [os.dup(host)], "1 descriptors for no host pool"),
        (CONFIG, [small], "shared memory of 45056 bytes, 49152 expected"),
        (CONFIG, [unsealed], "not sealed against shrinking"),
    ]:
        with pytest.raises(ValueError, match=reason):
            Shard(config, descriptors)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptors[0] if descriptors else -1)


def test_shared_memory_is_unmapped_once(host: int) -> None:
    """Mapped memory shows what others write, and is gone after it was closed, also twice."""
    memory = SharedMemory(host, HOST.size_bytes)
    os.pwrite(host, b"there", 4096)

    assert bytes(memory.view[4096:4101]) == b"there"
    memory.close()
    memory.close()
    with pytest.raises(ValueError, match="released"):
        memory.view[0]
