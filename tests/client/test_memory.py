"""Mapping a pool: right views, no way to keep it in a child, nothing unsealed."""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import mmap
import os
import resource
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvcached_client import DaemonFailure, Layout, RequestError, map_pool
from kvcached_client.blocks.mapping import huge_pages, map_sealed
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol.attach import Joined
from tests.client.descriptors import held_here_and_in_a_child
from tests.client.fake_daemon import FakeDaemon
from tests.client.pools import LAYOUTS, SLOTS, mapped, offer
from tests.client.progress_page import SEALS, sealed_memory


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_views_cover_the_pool_without_overlap(daemon: FakeDaemon, layout: Layout, memory: list[int]) -> None:
    """The pages of all groups, layers and slots are disjoint and together the whole pool, in either order."""
    with mapped(daemon, layout, memory) as pool:
        number = 0
        for group_index, group in enumerate(layout.groups):
            for layer in range(group.layers):
                pages = pool.pages(layer, group_index)
                assert pages.shape == (SLOTS, group.page_bytes(layout.block_size))
                for slot in range(SLOTS):
                    number += 1
                    pages[slot] = number
        content = os.pread(memory[-1], layout.pool_bytes(SLOTS), 0)
        assert set(content) == set(range(1, number + 1))
        sizes = [group.page_bytes(4) for group in layout.groups for _ in range(group.layers * SLOTS)]
        assert sorted(content.count(value) for value in range(1, number + 1)) == sorted(sizes)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_keys_and_values_lie_where_the_layout_says(daemon: FakeDaemon, layout: Layout, memory: list[int]) -> None:
    """K opens its page, V follows it, tokens before heads before elements; a group without V has None."""
    with mapped(daemon, layout, memory) as pool:
        for group_index, group in enumerate(layout.groups):
            keys, values = pool.keys_values(group.layers - 1, group_index)
            page = pool.pages(group.layers - 1, group_index)[SLOTS - 1]
            assert keys.shape == (SLOTS, 4, group.kv_heads, group.head_dim)
            keys[SLOTS - 1] = np.arange(keys[0].size).reshape(keys[0].shape)
            assert page[: group.k_bytes(4)].tobytes() == np.arange(keys[0].size).astype(keys.dtype).tobytes()
            if not group.v_head_dim:
                assert values is None
                continue
            assert values is not None
            assert values.shape == (SLOTS, 4, group.kv_heads, group.v_head_dim)
            values[SLOTS - 1] = 9
            after_values = group.k_bytes(4) + group.v_bytes(4)
            assert page[group.k_bytes(4) : after_values].tobytes() == np.full(values[0].size, 9, values.dtype).tobytes()
            assert not page[after_values:].any()


@pytest.mark.parametrize("order", ["block_first", "layer_first"])
def test_strides_follow_the_page_order(daemon: FakeDaemon, order: str, memory: list[int]) -> None:
    """Slots are a block apart where blocks are contiguous, and a page apart where layers are."""
    layout = LAYOUTS[f"attention-{order}"]
    with mapped(daemon, layout, memory) as pool:
        step = layout.bytes_per_block() if order == "block_first" else layout.groups[0].page_bytes(4)
        keys, _ = pool.keys_values(1)
        assert keys.strides == (step, 32, 16, 2)
        assert pool.pages(1).strides == (step, 1)


def test_views_refuse_layers_and_groups_that_are_not_there(daemon: FakeDaemon, memory: list[int]) -> None:
    """An index beyond the layout, a negative one included, raises."""
    with mapped(daemon, LAYOUTS["attention-layer_first"], memory) as pool:
        for layer, group in ((3, 0), (-1, 0), (0, 1), (0, -1)):
            with pytest.raises(IndexError):
                pool.pages(layer, group)
            with pytest.raises(IndexError):
                pool.keys_values(layer, group)


def maps_of(descriptor: int) -> list[str]:
    inode = os.fstat(descriptor).st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f" {inode} " in line and "memfd:pool" in line]


def test_memory_is_unmapped_with_its_last_view(daemon: FakeDaemon, memory: list[int]) -> None:
    """A view outlives the closed pool; when it goes, the mapping goes."""
    pool = mapped(daemon, LAYOUTS["attention-layer_first"], memory)
    view = pool.pages(0)[1:, :8]
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.pages(0)
    del pool
    gc.collect()
    view[:] = 3
    assert os.pread(memory[-1], 8, LAYOUTS["attention-layer_first"].slot_stride_bytes(0)) == b"\3" * 8
    assert len(maps_of(memory[-1])) == 1
    del view
    gc.collect()
    assert maps_of(memory[-1]) == []


def test_mapping_is_shared_and_kept_from_forks_and_core_dumps(daemon: FakeDaemon, memory: list[int]) -> None:
    """The kernel lists the mapping as shared, not copied on fork, not dumped, and as one that takes huge pages."""
    with mapped(daemon, LAYOUTS["attention-layer_first"], memory):
        (line,) = maps_of(memory[-1])
        entry = Path("/proc/self/smaps").read_text().split(line.split()[0], 1)[1]
        flags = next(row for row in entry.splitlines() if row.startswith("VmFlags:")).split()
        assert line.split()[1] == "rw-s"
        assert {"sh", "dc", "dd", *(["hg"] if huge_pages() != "none" else [])} <= set(flags)


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("always within_size advise [never] deny force\n", "never"),
        ("always within_size [advise] never deny force\n", "advise"),
        ("\n", "none"),
        (None, "none"),
    ],
)
def test_kernel_tells_of_huge_pages(tmp_path: Path, text: str | None, word: str) -> None:
    """The chosen word counts; a kernel without the setting has no huge pages of shared memory."""
    if text is not None:
        (tmp_path / "shmem_enabled").write_text(text)

    assert huge_pages(tmp_path / "shmem_enabled") == word


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_cannot_write_the_pool(daemon: FakeDaemon, memory: list[int]) -> None:
    """A child that touches the parent's view dies, and the parent's bytes are as they were."""
    with mapped(daemon, LAYOUTS["attention-layer_first"], memory) as pool:
        view = pool.pages(0)
        view[:] = 1
        child = os.fork()
        if child == 0:
            faulthandler.disable()  # the child's death is the point, not a crash to report
            view[:] = 2
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status)
        assert os.WTERMSIG(status) == signal.SIGSEGV
        assert (view == 1).all()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_holds_no_descriptor_of_the_pool(daemon: FakeDaemon, memory: list[int]) -> None:
    """Neither this process nor its child has a descriptor of the memory once it is mapped."""
    layout = LAYOUTS["attention-layer_first"]
    descriptor = sealed_memory(layout.pool_bytes(SLOTS))
    inode = os.fstat(descriptor).st_ino
    pool = map_pool(offer(daemon, layout, descriptor))
    os.close(descriptor)
    with pool:
        assert held_here_and_in_a_child(inode) == (0, 0)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SEAL])
def test_unsealed_memory_is_refused(daemon: FakeDaemon, memory: list[int], missing: int) -> None:
    """Memory that could still change its size, or lose the promise, is not mapped."""
    layout = LAYOUTS["attention-layer_first"]
    memory.append(sealed_memory(layout.pool_bytes(SLOTS), SEALS & ~missing))
    with pytest.raises(DaemonFailure, match="seals"):
        map_pool(offer(daemon, layout, memory[-1]))
    assert maps_of(memory[-1]) == []


def test_memory_that_cannot_be_sealed_is_refused(daemon: FakeDaemon, memory: list[int]) -> None:
    """A file of the right size is no pool."""
    layout = LAYOUTS["attention-layer_first"]
    memory.append(os.open(daemon.run_dir / "file", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC))
    os.ftruncate(memory[-1], layout.pool_bytes(SLOTS))
    with pytest.raises(DaemonFailure):
        map_pool(offer(daemon, layout, memory[-1]))


@pytest.mark.parametrize("difference", [-1, 1, 4096])
def test_memory_of_another_size_is_refused(daemon: FakeDaemon, memory: list[int], difference: int) -> None:
    """The descriptor's own size must be exactly what layout and slots take."""
    layout = LAYOUTS["attention-layer_first"]
    memory.append(sealed_memory(layout.pool_bytes(SLOTS) + difference))
    with pytest.raises(DaemonFailure, match="bytes"):
        map_pool(offer(daemon, layout, memory[-1]))


def test_lack_of_addresses_is_told_with_the_limit() -> None:
    """Memory that a process has no addresses for is refused with the limit to raise; no worker is spoken of."""
    size_bytes = 1 << 30
    descriptor = sealed_memory(size_bytes)
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used_bytes + size_bytes // 2, before[1]))
    try:
        with pytest.raises(DaemonFailure, match="mmap: Cannot allocate memory") as refused:
            map_sealed(descriptor, size_bytes, mmap.PROT_READ)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        os.close(descriptor)

    assert refused.value.fix == "raise this process's limit of addresses: ulimit -v"


@pytest.mark.parametrize("joined", [{"kind": "cuda"}, {"shard": 1}])
def test_join_reply_that_does_not_fit_is_refused(daemon: FakeDaemon, memory: list[int], joined: dict[str, Any]) -> None:
    """Another kind of memory or another shard's is not mapped."""
    layout = LAYOUTS["attention-layer_first"]
    memory.append(sealed_memory(layout.pool_bytes(SLOTS)))
    grant = offer(daemon, layout, memory[-1])
    told: dict[str, Any] = {
        "kind": "memfd",
        "shard": 0,
        "epoch": 5,
        "slots": SLOTS,
        "pool_bytes": layout.pool_bytes(SLOTS),
    }
    daemon.joined = Joined(layout=layout, **{**told, **joined})
    with pytest.raises(RequestError) as caught:
        map_pool(grant)
    assert caught.value.code in {ErrorCode.UNSUPPORTED_VERSION, ErrorCode.MALFORMED}


def test_join_reply_without_descriptor_is_refused(daemon: FakeDaemon) -> None:
    """A promise of memory without the memory is an error."""
    grant = offer(daemon, LAYOUTS["attention-layer_first"], -1)
    daemon.memory = None
    with pytest.raises(RequestError, match="0 descriptors"):
        map_pool(grant)
