"""What a forked child does with a mapping of its parent's: nothing."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os

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


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_that_drops_the_pool_keeps_its_own_memory(daemon: FakeDaemon, memory: list[int]) -> None:
    """The child's memory lies where its parent's pool is mapped, and is still there when the child drops the pool."""
    pools = [mapped(daemon, LAYOUTS["attention-layer_first"], memory)]
    pages = pools[0].pages(0)
    address = pages.ctypes.data // mmap.PAGESIZE * mmap.PAGESIZE
    del pages
    child = os.fork()
    if child == 0:
        status = 1
        try:
            status = drop_in_child(pools, address)
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 7
    pools[0].close()
