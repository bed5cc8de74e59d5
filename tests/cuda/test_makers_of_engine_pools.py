"""Why a maker has made no memory of an engine pool decides whether idle pools are given back for it."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable

import pytest

from kvcached.recovery.engine_pools import EnginePools
from kvcached.worker import cuda_maker
from kvcached.worker.cuda_maker import WantedMemory, make_cuda_memory, make_on_device
from kvcached_client.errors import RequestError
from kvcached_client.protocol.attach import ClaimPool
from tests.cuda_driver.device import GRANULE_BYTES
from tests.recovery.test_engine_pools import Clock, manager
from tests.recovery.test_engine_pools_on_devices import Process

__all__ = ["manager"]

NAMES = ("one", "two")


def claimed(pools: EnginePools, name: str, device: str) -> str:
    """An engine asks for memory, and is dead when it has it; returns what it was refused with."""
    wanted = ClaimPool(name=name, claim=name, ranks=1, rank=0, rank_bytes=GRANULE_BYTES, blocks=8, device=device)
    process = Process()
    try:
        asyncio.run(pools.claim_on_device(wanted, process))
    except RequestError as error:
        return str(error)
    process.has_ended = True
    return ""


@pytest.fixture
def idle(use_device: Callable[..., None], manager: object) -> tuple[EnginePools, str]:
    """Pools that no engine uses, on a device, and the device's UUID."""
    use_device()
    pools = EnginePools(1 << 30, Clock(), functools.partial(make_on_device, asyncio.Semaphore(4)))
    (made,) = asyncio.run(make_cuda_memory([WantedMemory(0, GRANULE_BYTES)]))
    os.close(made.descriptor)
    for name in NAMES:
        assert claimed(pools, name, made.device) == ""
    return pools, made.device


@pytest.mark.parametrize(
    ("driver", "why"),
    [
        ({"FAKE_CUDA_FAULTS": "refused_export=1"}, "cuMemExportToShareableHandle: CUDA_ERROR_NOT_PERMITTED"),
        ({"FAKE_CUDA_DEVICES": "0"}, "cuInit: CUDA_ERROR_NO_DEVICE"),
        ({}, "it made no memory within 0.001 s"),
    ],
)
def test_refusal_that_room_does_not_help_costs_no_pool(
    idle: tuple[EnginePools, str], monkeypatch: pytest.MonkeyPatch, driver: dict[str, str], why: str
) -> None:
    """A refused export, a driver without devices and a late maker are told, and idle pools stay."""
    pools, device = idle
    for name, value in driver.items():
        monkeypatch.setenv(name, value)
    if not driver:
        monkeypatch.setattr(cuda_maker, "DEADLINE_S", 0.001)
    refused = claimed(pools, "three", device)
    assert why in refused
    assert "(correct what is named, then start the engine again)" in refused
    assert [pool.name for pool in pools.stats()] == list(NAMES)
    pools.close()


def test_full_device_gets_room_from_idle_pools(idle: tuple[EnginePools, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has too little memory left, the oldest idle pool is given back; the others stay."""
    pools, device = idle
    monkeypatch.setenv("FAKE_CUDA_MEMORY_MIB", str(len(NAMES) * GRANULE_BYTES >> 20))
    assert claimed(pools, "three", device) == ""
    assert [pool.name for pool in pools.stats()] == ["two", "three"]
    pools.close()
