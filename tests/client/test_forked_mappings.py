"""What a forked child does with a mapping of its parent's: nothing. It is refused."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
from collections.abc import Callable

import pytest

from kvcached_client import MappedPool
from tests.client.fake_daemon import FakeDaemon
from tests.client.pools import LAYOUTS, mapped

_libc = ctypes.CDLL(None)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]


def page_at(address: int) -> ctypes.c_ubyte:
    """New memory of this process, at an address where it has none."""
    kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    at = _libc.mmap(address, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE, kind, -1, 0)
    assert at == address
    return ctypes.c_ubyte.from_address(at)


def drop_in_child(pools: list[MappedPool], address: int) -> int:
    """Map memory where the pool was, drop the pool, use the memory; what is in it then."""
    own = page_at(address)
    pools.clear()
    gc.collect()
    own.value = 7
    return own.value


FORKS = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def in_child(work: Callable[[], int]) -> int:
    """What `work` returns in a forked child: 0 to 255; 1 if it raises."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = work()
        finally:
            os._exit(status)
    _, ended = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(ended)


@FORKS
def test_forked_child_that_drops_the_pool_keeps_its_own_memory(daemon: FakeDaemon, memory: list[int]) -> None:
    """The child's memory lies where its parent's pool is mapped, and is still there when the child drops the pool."""
    pools = [mapped(daemon, LAYOUTS["attention-layer_first"], memory)]
    pages = pools[0].pages(0)
    address = pages.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    del pages
    assert in_child(lambda: drop_in_child(pools, address)) == 7
    pools[0].close()


@FORKS
def test_forked_child_is_given_no_view(daemon: FakeDaemon, memory: list[int]) -> None:
    """Its parent's pool refuses every call in it, also after `close`; the parent's views stay good."""
    pool = mapped(daemon, LAYOUTS["both-block_first"], memory)
    calls: list[Callable[[], object]] = [
        lambda: pool.pages(0),
        lambda: pool.keys_values(0),
        lambda: pool.cuda_keys_values(0),
        lambda: pool.wait_layer((), 0, deadline_ms=1),
    ]

    def refusals() -> int:
        count = 0
        for call in calls * 2:
            with pytest.raises(RuntimeError, match=r"belongs to process .*; a forked child calls map_pool itself"):
                call()
            count += 1
            if count == len(calls):
                pool.close()
        return count

    assert in_child(refusals) == 2 * len(calls)
    pool.pages(0)[:] = 5
    assert pool.keys_values(0)[0].shape[0] == pool.slots
    pool.close()
