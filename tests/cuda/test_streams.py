"""Engines that queue their work on CUDA streams: engine, worker and daemon are processes on the late fake driver."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path

import pytest

from tests.cuda.test_pool import BLOCKS, SLOTS, OnDevice, ended, on_device, stored_prompts
from tests.cuda_driver import trace
from tests.line_process import LineProcess

__all__ = ["on_device"]

PROMPTS = 48
#: Of a step that meets a worker which does nothing; and how much later a busy machine may notice what has happened.
DEADLINE_MS, BUSY_S = 700, 5.0


@contextmanager
def stream_engine(on_device: OnDevice, name: str = "StreamEngine", delay_us: int = 200_000) -> Iterator[LineProcess]:
    """An engine whose kernels are much later than the daemon's replies."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FAKE_CUDA_DELAY_US", str(delay_us))
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


def only_in_host(on_device: OnDevice, engine: LineProcess) -> None:
    """Prompt 0 is in the host pool, and its slots on the device have been given to others."""
    stored_prompts(on_device, engine, range(1))
    stored_prompts(on_device, engine, range(100, 100 + SLOTS // BLOCKS))


def stop(process: int) -> None:
    """SIGSTOP; returns when each of the threads has stopped, for one that has not may still copy."""
    os.kill(process, signal.SIGSTOP)
    for task in Path(f"/proc/{process}/task").iterdir():
        while (task / "stat").read_text().rpartition(") ")[2][0] != "T":
            pass


def fetched(engine: LineProcess, wanted: int = 4) -> list[str]:
    """What an engine says of prompts whose blocks were loading when it read them, of so many of them.

    On a busy machine most loads are over by then. The pool has room for few prompts, so the next ones load again.
    """
    said: list[str] = []
    for number in cycle(range(PROMPTS)):
        reply = engine.ask(f"fetch {number}")
        if "loading True" in reply:
            said.append(reply)
        if len(said) == wanted:
            break
    return said


@pytest.mark.parametrize("on_device", [1, 2], indirect=True)
def test_kernels_of_a_layer_wait_for_it_on_the_stream(on_device: OnDevice) -> None:
    """Each kernel sees the bytes of its layer, though the host waits for no layer before it launches the next."""
    with stream_engine(on_device, "GatedEngine") as engine:
        engine.ask(f"serve {PROMPTS}")
        loaded = fetched(engine)
    assert set(loaded) == {"read loading True whole True wrong 0"}


def test_host_waits_where_streams_cannot(on_device: OnDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device whose streams wait for no values, the host waits for each layer, and kernels see the same bytes."""
    monkeypatch.setenv("FAKE_CUDA_FAULTS", "refused_values=1")
    with stream_engine(on_device, "GatedEngine", delay_us=0) as engine:
        engine.ask(f"serve {PROMPTS}")
        loaded = fetched(engine)
    assert set(loaded) == {"read loading True whole True wrong 0"}
    assert trace.ran(trace.read(on_device.trace_path), "wait value") == []


@pytest.mark.parametrize(("name", "wrong"), [("GatedEngine", False), ("NoGates", True)])
def test_kernels_behind_a_load_that_is_late(on_device: OnDevice, name: str, wrong: bool) -> None:
    """While a worker does nothing, kernels wait for their layers; without a wait they read what was there before."""
    with stream_engine(on_device, name, delay_us=0) as engine:
        only_in_host(on_device, engine)
        worker = on_device.worker_pid()
        stop(worker)
        assert engine.ask("fetch_loudly 0") == "launched"
        os.kill(worker, signal.SIGCONT)
        said = engine.hear()
    assert said.startswith("read loading True whole True")
    assert said.endswith(" wrong 0") != wrong


def test_no_stream_waits_for_a_worker_that_died(on_device: OnDevice) -> None:
    """A worker that hangs and is killed during a load opens the gates, and the step is refused."""
    with stream_engine(on_device, "GatedEngine", delay_us=0) as engine:
        only_in_host(on_device, engine)
        worker = on_device.worker_pid()
        stop(worker)
        assert engine.ask("fetch_loudly 0") == "launched"
        os.kill(worker, signal.SIGKILL)
        said = engine.hear()
    assert said.startswith("LoadFailed loading True whole False")


def waited_s(said: str) -> float:
    """For how long a stream has waited."""
    return float(said.split(" waited ")[1].split(maxsplit=1)[0])


def test_stopped_worker_holds_no_stream_behind_the_deadline(on_device: OnDevice) -> None:
    """The host opens the gates at the deadline, the step is refused, and the load counts when the worker goes on."""
    with stream_engine(on_device, "GatedEngine", delay_us=0) as engine:
        only_in_host(on_device, engine)
        worker = on_device.worker_pid()
        stop(worker)
        said = engine.ask(f"read_until 0 {DEADLINE_MS}")
        assert said.startswith("DeadlineExceeded loading True ")
        assert DEADLINE_MS / 1000 <= waited_s(said) <= DEADLINE_MS / 1000 + BUSY_S
        os.kill(worker, signal.SIGCONT)
        assert engine.ask("kept 0") == "whole True wrong 0"
        assert engine.ask("look 0") == "hit 3 ready 3 wrong 0"


@pytest.mark.parametrize("on_device", [1, 2], indirect=True)
@pytest.mark.parametrize("stopped", [True, False])
def test_no_stream_waits_for_a_daemon_that_died(on_device: OnDevice, *, stopped: bool) -> None:
    """SIGKILL of the daemon during a load, be its worker stopped or at work: the stream passes before its deadline.

    The step is refused, or has read right bytes; the next daemon tells that the load has failed, or that it is over.
    """
    with stream_engine(on_device, "GatedEngine", delay_us=0) as engine:
        only_in_host(on_device, engine)
        worker = on_device.worker_pid()
        stop(worker)
        engine.say("read_until_loudly 0 20000")
        assert engine.hear() == "launched"
        if not stopped:
            os.kill(worker, signal.SIGCONT)
        on_device.daemon.kill()
        said = engine.hear()
        on_device.daemon.await_ready()

        assert waited_s(said) < BUSY_S
        if stopped:
            assert said.startswith("DaemonUnreachable ")
        assert not said.startswith("read ") or said.endswith(" wrong 0")
        assert engine.ask("rejoin 0") == "rejoined"
        assert engine.ask("kept 0") in {"whole True wrong 0", "whole False wrong 0", "whole LoadFailed wrong 0"}
        assert engine.ask("look 0").endswith(" wrong 0")
