"""Memory of a device passes between processes by descriptors, and what the driver refuses is told."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from enum import IntEnum
from types import SimpleNamespace
from unittest import mock

import pytest

from kvcached_client.cuda import device as cuda_device
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import CudaFailure, CudaMissing, Driver
from kvcached_client.cuda.engine_pool import MemoryUnknown, _Place
from tests.cuda.conftest import RunProgram
from tests.cuda_driver.trace import broken_rules


def test_descriptor_keeps_the_memory(run_program: RunProgram) -> None:
    """Memory that its maker has closed is there by its descriptor, at the address asked for, and goes with it."""
    done = run_program("shared", 100)

    assert done.said == ["5a" * 16, True, 2 << 20]
    assert broken_rules(done.records) == []
    assert done.granules == 0


def test_address_is_a_hint(run_program: RunProgram) -> None:
    """Where the driver maps memory elsewhere, the memory says where."""
    done = run_program("shared", 100, faults="ignored_hint=1")

    assert done.said == ["5a" * 16, False, 2 << 20]


def test_refusals_name_the_call_and_the_result(run_program: RunProgram) -> None:
    """A refused export and too much memory are errors with the driver's own words; nothing is left behind."""
    export = run_program("refused_export", faults="refused_export=1")
    memory = run_program("too_much", 1 << 40)

    assert export.said == "cuMemExportToShareableHandle: CUDA_ERROR_NOT_PERMITTED"
    assert memory.said == "CUDA_ERROR_OUT_OF_MEMORY"
    assert export.granules == memory.granules == 0


def test_device_that_does_not_exist(run_program: RunProgram) -> None:
    """An ordinal beyond the devices is refused with how many there are."""
    assert run_program("missing", 3, devices=2).said.startswith("device 3 of 2 (")


def test_device_that_several_processes_may_not_use(run_program: RunProgram) -> None:
    """Where the compute mode gives no further process a context, the error names the command that changes it."""
    assert run_program("missing", 0, compute_mode=2).said == (
        "cuDevicePrimaryCtxRetain: CUDA_ERROR_DEVICE_UNAVAILABLE "
        "(set the compute mode that lets several processes use the device: nvidia-smi -c DEFAULT)"
    )


def driver_of(**calls: object) -> Driver:
    """A driver whose bindings have these calls alone, and know one result beside success."""
    driver = object.__new__(Driver)
    driver._bindings = SimpleNamespace(CUresult=IntEnum("CUresult", {"CUDA_SUCCESS": 0, "CUDA_ERROR_A": 1}), **calls)
    return driver


def test_result_that_the_bindings_do_not_know_is_a_refusal() -> None:
    """A driver that is newer than the bindings gives results without a name: the error has their number."""

    def unknown(error: Exception) -> Callable[[], object]:
        def call() -> object:
            raise error

        return call

    driver = driver_of(
        told=unknown(ValueError("742 is not a valid CUresult")), brief=unknown(KeyError(742)),
        bug=unknown(ValueError("no argument")),
    )  # fmt: skip
    for name in ("told", "brief"):
        with pytest.raises(CudaFailure, match=f"^{name}: CUDA_ERROR_742$"):
            driver.call(name)
    with pytest.raises(ValueError, match="no argument"):
        driver.call("bug")
    for result, shown in ((1, "CUDA_ERROR_A"), (742, "CUDA_ERROR_742")):
        with pytest.raises(CudaFailure, match=f"^copies: {shown}$"):
            driver._check("copies", result)


@pytest.mark.parametrize("has_both", [True, False])
def test_instance_of_a_device_has_its_own_uuid(*, has_both: bool) -> None:
    """Of two calls the one is made that knows instances; bindings that have one call know them by that one."""
    instance, whole = (SimpleNamespace(bytes=bytes([each]) * 16) for each in (1, 2))
    calls = {"cuDeviceGet": lambda number: (0, number)}
    calls["cuDeviceGetUuid"] = lambda _: (0, whole if has_both else instance)
    if has_both:
        calls["cuDeviceGetUuid_v2"] = lambda _: (0, instance)
    with mock.patch.object(cuda_device, "Driver", return_value=driver_of(**calls)):
        assert cuda_device.uuid_of(0) == f"GPU-{uuid.UUID(bytes=instance.bytes)}"


@pytest.mark.parametrize("result", ["INVALID_VALUE", "NOT_SUPPORTED", "NOT_PERMITTED"])
def test_refused_memory_node_is_unknown(result: str) -> None:
    """A driver that does not tell the memory node is no reason to do without the device; a lost device is."""
    device = object.__new__(Device)
    with mock.patch.object(Device, "attribute", side_effect=CudaFailure("call", f"CUDA_ERROR_{result}")):
        assert device.host_node() == -1
    lost = CudaFailure("call", "CUDA_ERROR_UNKNOWN")
    with mock.patch.object(Device, "attribute", side_effect=lost), pytest.raises(CudaFailure):
        device.host_node()


def test_pool_on_a_device_that_the_process_does_not_see(run_program: RunProgram) -> None:
    """Memory of another device than this process's is refused by the device's UUID, with what to do."""
    done = run_program("elsewhere")

    assert "device GPU-00000000-0000-0000-0000-000000000000 is none of the 1 that this process sees" in done.said
    assert "CUDA_VISIBLE_DEVICES" in done.said
    assert done.granules == 0


def test_machine_without_a_driver() -> None:
    """Without a driver the error says so, and what to check."""
    try:
        Driver()
    except CudaMissing as error:
        assert "nvidia-smi" in error.fix or "pip install cuda-bindings" in error.fix
    else:
        pytest.skip("this machine has a CUDA driver")


def test_stream_values(run_program: RunProgram) -> None:
    """A stream waits for a value that another stream writes into registered memory."""
    done = run_program("stream_values", delay_us=2000)

    assert done.said == 7
    assert broken_rules(done.records) == []


@pytest.mark.parametrize(
    ("results", "outcome"),
    [
        (["INVALID_VALUE"] * 2, None),
        (["INVALID_VALUE"] * 3, MemoryUnknown),
        (["OUT_OF_MEMORY"], CudaFailure),
        (["UNKNOWN"], CudaFailure),
    ],
)
def test_kept_memory_is_unknown_after_three_refusals(results: list[str], outcome: type[Exception] | None) -> None:
    """Fewer may pass, and what says nothing about the memory is told as it is: neither costs the blocks in it."""
    place = object.__new__(_Place)
    refusals = [CudaFailure("cuMemImportFromShareableHandle", f"CUDA_ERROR_{each}") for each in results]
    place._device = mock.Mock(import_handle=mock.Mock(side_effect=[*refusals, "memory"]))
    if outcome is None:
        place.take(3)
        assert place._memory == "memory"
        return
    with pytest.raises(CudaFailure) as caught:
        place.take(3)
    assert type(caught.value) is outcome
