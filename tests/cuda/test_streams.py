"""Engines that queue their work on CUDA streams: engine, worker and daemon are processes on the late fake driver."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.cuda.test_pool import OnDevice, ended, on_device
from tests.daemon.conftest import LineProcess

__all__ = ["on_device"]

PROMPTS = 48


@contextmanager
def stream_engine(on_device: OnDevice, name: str = "StreamEngine") -> Iterator[LineProcess]:
    """An engine whose kernels are much later than the daemon's replies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CUDA_DELAY_US", "200000")
        started = LineProcess("tests.cuda.stream_engine", str(on_device.daemon.run_dir), name)
    with ended(started) as engine:
        assert engine.hear() == "ready"
        yield engine


@pytest.mark.parametrize("on_device", [1, 2, 3], indirect=True)
def test_slots_under_a_fence_keep_their_bytes(on_device: OnDevice) -> None:
    """Blocks are committed and released before their kernels run: no kernel and no later reader sees a wrong byte."""
    with stream_engine(on_device) as engine:
        assert engine.ask(f"serve {PROMPTS}") == "wrong 0"
        looks = [engine.ask(f"look {number}") for number in range(PROMPTS)]
    assert all(each.endswith(" wrong 0") for each in looks)
    assert sum(each.startswith("hit 3") for each in looks) >= PROMPTS // 4


@pytest.mark.parametrize("mistake", ["EarlyEvents", "Unfenced"])
@pytest.mark.parametrize("on_device", [1], indirect=True)
def test_mistakes_about_fences_are_seen(on_device: OnDevice, mistake: str) -> None:
    """An engine whose fences do not cover its kernels reads wrong bytes, or leaves some to later readers."""
    with stream_engine(on_device, mistake) as engine:
        seen = [engine.ask(f"serve {PROMPTS}"), *(engine.ask(f"look {number}") for number in range(PROMPTS))]
    assert not all(each.endswith("wrong 0") for each in seen)


def test_failed_device_signals_no_fence(on_device: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a kernel has failed for good, every call says so, and no fence signals."""
    monkeypatch.setenv("FAKE_CUDA_FAULTS", "launch_failure=@9")
    monkeypatch.delenv("FAKE_CUDA_TRACE")  # of the engine: calls after the failure break the rule that there are none
    with stream_engine(on_device) as engine:
        said = engine.ask(f"serve {PROMPTS}")
    assert said == "failed CUDA_ERROR_LAUNCH_FAILED again CUDA_ERROR_LAUNCH_FAILED"
