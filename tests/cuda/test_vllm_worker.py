"""The worker's side of vLLM's connector with tensors on CUDA, on the fake driver: layouts, order and failures."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.cuda.test_offload import Node, broken_rules, node
from tests.cuda.vllm_worker import VIEWS
from tests.cuda_driver import trace
from tests.cuda_driver.device import settings
from tests.daemon.test_offload import is_sound
from tests.line_process import LineProcess

__all__ = ["node"]

WHOLE = "6 bad [] wrong []"


@contextmanager
def worker(
    node: Node, layout: str, copies: str = "thread", *, leave: bool = True, **driver: object
) -> Iterator[LineProcess]:
    """A vLLM in a process of its own."""
    with node.patch.context() as patch:
        for name, value in settings(**driver).items():
            patch.setenv(name, value)
        process = LineProcess("tests.cuda.vllm_worker", str(node.daemon.run_dir), layout, copies)
    try:
        assert process.hear() == "ready"
        yield process
        if leave:
            assert process.ask("leave") == "done"
    finally:
        process.end()


@pytest.mark.parametrize("copies", ["process", "thread"])
@pytest.mark.parametrize(("node", "layout"), list(enumerate(VIEWS, 1)), indirect=["node"])
def test_blocks_of_one_vllm_are_loaded_by_another(node: Node, layout: str, copies: str) -> None:
    """In each of vLLM's layouts: stores wait for the steps before them, loads for steps of preempted requests."""
    with worker(node, layout, copies) as first, worker(node, layout, copies) as second:
        for name in ("a", "b", "c"):
            assert first.ask(f"store {name} 6") == "stored"
            assert second.ask(f"load {name} 6") == WHOLE
        assert second.ask("store a 8") == "stored"
        assert first.ask("load a 8") == "8 bad [] wrong []"

    records = node.records()
    copies_made = trace.calls(records, "cuMemcpyBatchAsync")
    assert broken_rules(node) == []
    assert copies_made
    launching = {record.thread for record in trace.calls(records, "cuLaunchHostFunc")}
    engines = {record.process for record in trace.calls(records, "cuLaunchHostFunc")}
    assert any(record.process in engines for record in copies_made) == (copies == "thread")
    assert not any(record.thread in launching for record in [*copies_made, *trace.calls(records, "cuEventSynchronize")])
    assert is_sound(node.running)


def test_killed_copy_process_fails_its_session_alone(node: Node) -> None:
    """What it was copying fails, and nothing is wrong; in the next session another process copies."""
    with worker(node, "LBNHC", "process") as killed, worker(node, "LBNHC", "process") as other:
        assert killed.ask("store a 6") == "stored"
        assert killed.ask("kind") == "ProcessShard"
        for number in range(3):
            assert killed.ask(f"store_and_kill killed{number} 6") in {"stored", "failed"}
            assert killed.ask("connect") == "done"
            assert killed.ask("load a 6") == WHOLE
            assert killed.ask(f"store again{number} 6") == "stored"
            assert other.ask(f"load again{number} 6") == WHOLE
            assert other.ask(f"load killed{number} 6") in {WHOLE, "no hit"}
    assert broken_rules(node) == []
    assert is_sound(node.running)


def test_process_that_was_killed_before_the_session_is_replaced(node: Node) -> None:
    """It says nothing about the device. Those that are killed while they join are replaced twice."""
    with worker(node, "LBNHC", "process") as killed:
        assert killed.ask("kill_prepared") == "done"
        assert killed.ask("store a 6") == "stored"
        assert killed.ask("kind") == "ProcessShard"
    with worker(node, "LBNHC", "process") as killed:
        assert killed.ask("kill_joining 3") == "done"
        for number in range(3):
            assert killed.ask(f"store b{number} 6") == "failed"
            killed.ask("be_patient")
        assert killed.ask("store c 6") == "stored"
        assert killed.ask("kind") == "OffloadShard"


@contextmanager
def killed_in_the_end(pid: int) -> Iterator[int]:
    """A process that a failed test would leave, because it is stopped."""
    process = os.pidfd_open(pid)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)
        os.close(process)


def test_process_that_hangs_is_replaced(node: Node) -> None:
    """A load by a process that is stopped fails at its deadline; in the next session another process copies."""
    with worker(node, "LBNHC", "process") as hung:
        hung.ask("be_strict")
        assert hung.ask("store a 6") == "stored"
        with killed_in_the_end(int(hung.ask("copier"))) as stopped:
            assert hung.ask("let_hang a 6") == "6 bad [0, 1, 2, 3, 4, 5] wrong []"
            assert not Path(f"/proc/{stopped}").exists()
        assert hung.ask("connect") == "done"
        assert [hung.ask("load a 6"), hung.ask("store b 6"), hung.ask("kind")] == [WHOLE, "stored", "ProcessShard"]
    assert broken_rules(node) == []
    assert is_sound(node.running)


def test_process_behind_a_long_kernel_is_not_late(node: Node) -> None:
    """While the device has not come to the mark of an order, no deadline of the order begins."""
    with worker(node, "LBNHC", "process") as slow:
        slow.ask("be_strict")
        assert slow.ask("store a 6") == "stored"
        first = slow.ask("copier")
        assert slow.ask("store_behind_kernel b 6 4") == "stored"
        assert [slow.ask("load b 6"), slow.ask("copier")] == [WHOLE, first]
    assert broken_rules(node) == []


def test_copy_that_the_device_refuses_costs_its_order_only(node: Node) -> None:
    """As by a thread: the order fails, the session goes on, and the same process carries out the next order."""
    with worker(node, "LBNHC", "process") as refused:
        refused.ask("let refused_values=@2")  # the first is the process's own try
        assert refused.ask("store a 6") == "failed"
        first = refused.ask("copier")
        assert [refused.ask("store b 6"), refused.ask("load b 6")] == ["stored", WHOLE]
        assert refused.ask("copier") == first


def test_processes_whose_device_fails_at_once_are_paused(node: Node) -> None:
    """After the second in a row no session is joined for a while; sessions go on, and no thread copies."""
    with worker(node, "LBNHC", "process") as failing:
        assert failing.ask("store a 6") == "stored"
        failing.ask("let launch_failure=@1")
        for number in range(2):
            failing.ask("connect")
            assert failing.ask(f"store b{number} 6") == "failed"
        failing.ask("connect")
        assert [failing.ask("store c 6"), failing.ask("kind"), failing.ask("store d 6")] == [
            "failed",
            "NoneType",
            "failed",
        ]
        failing.ask("let launch_failure=0")
        failing.ask("be_patient")
        assert [failing.ask("load a 6"), failing.ask("kind")] == [WHOLE, "ProcessShard"]


def test_thread_copies_where_no_process_can(node: Node) -> None:
    """Memory of vLLM's own allocator has no handle, and a device may hold no second context: a thread copies then."""
    with worker(node, "LBNHC", "unshared") as unshared:
        assert unshared.ask("store a 6") == "stored"
        assert [unshared.ask("kind"), unshared.ask("load a 6")] == ["OffloadShard", WHOLE]
    with worker(node, "LBNHC", "process") as poor:
        poor.ask("fail_process")
        assert poor.ask("store b 6") == "failed"
        poor.ask("be_patient")
        assert poor.ask("store c 6") == "stored"
        assert [poor.ask("kind"), poor.ask("load c 6")] == ["OffloadShard", WHOLE]
    refused = "cuIpcGetMemHandle: an IPC handle is made of memory of cuMemAlloc in this process"
    assert broken_rules(node) == [refused]


@pytest.mark.parametrize("node", [1, 2, 3], indirect=True)
def test_nothing_is_copied_while_vllm_sleeps(node: Node) -> None:
    """A store or a load meets its memory, or fails: none is queued when the memory goes, and none fills it afterwards.

    What was stored is loaded whole into the memory that comes after.
    """
    with worker(node, "LBNHC") as sleeping, worker(node, "LBNHC") as other:
        for number in range(6):
            name, when = f"name{number}", ("begun", "waiting")[number % 2]
            ended = sleeping.ask(f"sleep_in_store {name} 6 {when}")
            assert ended in {"stored", "failed"}
            if ended == "failed":
                assert other.ask(f"store {name} 6") == "stored"
            assert sleeping.ask(f"sleep_in_load {name} 6 {when}") in {"0", "6"}
            assert [each.ask(f"load {name} 6") for each in (sleeping, other)] == [WHOLE, WHOLE]
    assert broken_rules(node) == []
    assert is_sound(node.running)


def test_failed_device_fails_its_orders(node: Node) -> None:
    """Once the device has failed, every order is reported as failed, and no hit is taken for loaded."""
    with worker(node, "LBNHC") as other:
        with worker(node, "LBNHC", leave=False, faults="launch_failure=@3") as failing:
            assert failing.ask("store a 6") == "failed"  # two kernels, then the copy
            assert other.ask("store b 6") == "stored"
            assert failing.ask("load b 6") == "6 bad [0, 1, 2, 3, 4, 5] wrong []"
            assert failing.ask("store c 6") == "failed"
        assert [other.ask("load a 6"), other.ask("load b 6")] == ["no hit", WHOLE]
