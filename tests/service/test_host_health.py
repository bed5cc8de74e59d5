"""What `health` proves of the host pool that engines with their own device memory use."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from kvcached.memory.host_pool import HostHeaders, HostMemory, create_host_memory
from kvcached.service.health import CHECKED_BYTES
from kvcached.service.pending import Answer
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.protocol import engine as wire
from tests.service.office import FakePeer
from tests.service.offload_office import BLOCK_BYTES, OffloadOffice

SLABS, SLAB_BYTES = 4, 1 << 17


@pytest.fixture
def memory() -> Iterator[HostMemory]:
    made = create_host_memory(SLABS, SLAB_BYTES)
    yield made
    made.close()


class Tried:
    """Headers that note what a check writes, and say what they are told to."""

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        self.wrong = ""

    def clear_slab(self, *_: object) -> None:
        """Nothing is kept."""

    def claim(self, *_: object) -> None:
        """Nothing is kept."""

    def trim(self) -> None:
        """Nothing lies behind the last slab."""

    def try_end(self, slab: int, size_bytes: int) -> str:
        self.places.append((slab, size_bytes))
        return self.wrong


def part(office: OffloadOffice) -> wire.HealthPart:
    """What `health` says of the host pool."""

    async def ask() -> wire.Header:
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        office.service.submit(b"cli", wire.Health(id=1), [], answered.set_result)
        return (await answered).header

    report = asyncio.run(ask())
    assert isinstance(report, wire.HealthReport)
    (found,) = [each for each in report.parts if each.part == "host/memory"]
    assert report.ok is all(each.ok for each in report.parts)
    return found


def test_health_writes_into_a_slab_that_holds_nothing() -> None:
    """A check's bytes go into a slab without blocks, before any engine has come and beside one."""
    tried = Tried()
    office = OffloadOffice(headers=tried)

    assert (part(office).ok, tried.places) == (True, [(0, CHECKED_BYTES)])

    office.attach(FakePeer(1))
    host = office.cache.offload.namespaces.trees[0].host
    assert host is not None
    assert host.grow()
    host.empty.clear()  # as if it held a block
    part(office)
    assert tried.places[1][0] not in host.slabs


@pytest.mark.parametrize("rest", [512, 1 << 20, 0])
def test_health_of_a_full_pool_writes_behind_the_last_block_and_evicts_nothing(
    rest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where every slab holds blocks a check's bytes go behind the last of them; where nothing is there, it says so."""
    monkeypatch.setattr(HostGeometry, "rest_bytes", rest)
    tried = Tried()
    office = OffloadOffice(headers=tried)
    office.attach(FakePeer(1))
    for pool in office.cache.slab_allocator.pools:
        while pool.grow():
            pool.empty.clear()  # as if each held a block
    before = [list(pool.counts) for pool in office.cache.slab_allocator.pools]

    found = part(office)

    assert [list(pool.counts) for pool in office.cache.slab_allocator.pools] == before
    assert [size for _, size in tried.places] == ([min(CHECKED_BYTES, rest)] if rest else [])
    assert (found.ok, found.detail.startswith("skipped: ")) == (True, not rest)


def test_health_tells_memory_that_does_not_hold_what_is_written() -> None:
    """Where the bytes come back as others the part fails, and so does the report."""
    tried = Tried()
    tried.wrong = "what was read is not what was written"

    found = part(OffloadOffice(headers=tried))

    assert (found.ok, found.detail) == (False, tried.wrong)


def test_a_check_of_memory_leaves_it_as_it_was(memory: HostMemory) -> None:
    """The bytes are put back: nothing of a slab is another one after a check."""
    before = os.urandom(SLAB_BYTES)
    os.pwrite(memory.descriptor, before, SLAB_BYTES)

    assert HostHeaders(memory).try_end(1, 4096) == ""
    assert HostHeaders(memory).try_end(1, 2 * SLAB_BYTES) == ""

    assert os.pread(memory.descriptor, SLAB_BYTES, SLAB_BYTES) == before


def test_a_check_of_memory_sees_what_is_wrong(memory: HostMemory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that do not arrive, and a kernel that refuses, are told."""
    headers = HostHeaders(memory)
    monkeypatch.setattr("kvcached.memory.host_pool.os", SimpleNamespace(**{**vars(os), "pwrite": lambda *_: 0}))
    assert headers.try_end(0, 4096) == "what was read is not what was written"

    def refuse(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("kvcached.memory.host_pool.os", SimpleNamespace(**{**vars(os), "pwrite": refuse}))
    assert headers.try_end(0, 4096) == "cannot be written: No space left on device"


def test_rest_of_a_slab_is_behind_its_last_block() -> None:
    """What `rest_bytes` says is what lies between the last block's end and the next slab."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    geometry = office.service._offload_admission.geometry(welcome.namespace)
    last = geometry.slots_per_slab - 1

    end = geometry.block_offset(last, geometry.parts - 1) + BLOCK_BYTES

    assert geometry.rest_bytes == geometry.slab_bytes - end
