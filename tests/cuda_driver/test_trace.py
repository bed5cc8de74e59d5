from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from tests.cuda_driver.calls import CudaError, Driver
from tests.cuda_driver.conftest import StartDriver
from tests.cuda_driver.trace import broken_rules, calls, ran, read


def test_each_call_has_a_record(driver: Driver, tmp_path: Path) -> None:
    """A record names the process, the thread, the stream, the arguments and the result of its call."""
    stream, host = driver.stream(), driver.host()
    device = driver.memory()
    driver.copy(device, host, 100, stream)
    (copy,) = calls(read(tmp_path / "trace"), "cuMemcpyAsync")
    assert (copy.process, copy.thread, copy.stream) == (os.getpid(), threading.get_native_id(), stream)
    assert (copy.result, copy.rule) == ("CUDA_SUCCESS", "")
    assert copy.arguments == {"destination": device, "source": host, "bytes": 100}


def test_operation_is_recorded_when_it_is_done(driver: Driver, tmp_path: Path) -> None:
    """What a stream did stands in the trace after the call that queued it, with its place in the stream."""
    stream = driver.stream()
    driver.launch(stream, lambda: None)
    assert ran(read(tmp_path / "trace")) == []
    driver.finish(stream)
    records = read(tmp_path / "trace")
    (done,) = ran(records)
    assert (done.name, done.stream, done.arguments["sequence"]) == ("host function", stream, 1)
    assert calls(records, "cuLaunchHostFunc")[0].order < done.order < calls(records, "cuStreamSynchronize")[0].order


def test_refusal_says_which_rule_was_broken(driver: Driver, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A refused call leaves one line on stderr and its rule in the trace."""
    with pytest.raises(CudaError):
        driver.create(4096)
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"fake cuda: process {os.getpid()}: cuMemCreate: CUDA_ERROR_INVALID_VALUE: 4096 bytes")
    rules = broken_rules(read(tmp_path / "trace"))
    assert rules == ["cuMemCreate: 4096 bytes are no multiple of the granularity of 2 MiB"]


def test_orders_count_all_that_happens_on_a_device(start_driver: StartDriver, tmp_path: Path) -> None:
    """Records of several drivers of one device have one order."""
    drivers = [start_driver() for _ in range(3)]
    for each in drivers * 2:
        each.stream()
    orders = [record.order for record in read(tmp_path / "trace")]
    assert len(set(orders)) == len(orders)
    assert orders == list(range(orders[0], orders[0] + len(orders)))
