"""A process copies for a vLLM whose KV cache is memory of the daemon on CUDA: who may have that memory afterwards."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda.vllm_worker import VIEWS
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules
from tests.daemon.conftest import RunningDaemon
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_offload import config, is_sound
from tests.line_process import LineProcess

WHOLE = "6 bad [] wrong []"


class Node(NamedTuple):
    """A daemon that keeps device memory, and a device."""

    daemon: Supervised
    trace_path: Path
    workers: ExitStack

    def worker(self, claim: str, layout: str = "LBNHC", copies: str = "process") -> LineProcess:
        """A vLLM of one worker; killed at the test's end."""
        worker = LineProcess("tests.cuda.vllm_worker", str(self.daemon.run_dir), layout, copies, claim)
        self.workers.callback(worker.end)
        assert worker.hear() == "ready"
        return worker

    def records(self) -> list[trace.Record]:
        return trace.read(self.trace_path)


@pytest.fixture
def node(
    use_device: Callable[..., None], device: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Node]:
    """Streams are late. No rule of the driver was broken afterwards, and nothing is left on the device."""
    use_device(delay_us=20_000, memory_mib=64, seed=getattr(request, "param", 1))
    with ExitStack() as parts:
        daemon = parts.enter_context(
            supervised(tmp_path, config() + 'device_memory_bytes = "16MiB"\n', pause_min_s=0.01, pause_max_s=0.01)
        )
        yield Node(daemon, tmp_path / "trace", parts.enter_context(ExitStack()))
        assert is_sound(RunningDaemon(daemon.process, daemon.run_dir))
    assert trace.broken_rules(trace.read(tmp_path / "trace")) == []
    assert live_granules(device) == 0


def kill_and_wait(pid: int) -> None:
    dead = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([dead], [], [], 20)
    os.close(dead)


@pytest.mark.parametrize(("node", "layout"), list(enumerate(VIEWS, 1)), indirect=["node"])
def test_process_copies_into_and_out_of_the_daemon_s_memory(node: Node, layout: str) -> None:
    """In each of vLLM's layouts: both workers see their bytes, and their own processes copy nothing."""
    first, second = node.worker("first", layout), node.worker("second", layout)
    assert first.ask("pool") != second.ask("pool")
    for name in ("a", "b", "c"):
        assert first.ask(f"store {name} 6") == "stored"
        assert second.ask(f"load {name} 6") == WHOLE
    assert second.ask("kind") == "ProcessShard"
    assert [each.ask("leave") for each in (first, second)] == ["done", "done"]

    records = node.records()
    engines = {record.process for record in trace.calls(records, "cuLaunchHostFunc")}
    copying = {record.process for record in trace.calls(records, "cuMemcpyBatchAsync")}
    assert (len(engines), len(copying), engines & copying) == (2, 2, set())


def test_memory_waits_for_the_process_that_copied(node: Node) -> None:
    """A vLLM is dead, and the process that copies for it stands still: no daemon gives the memory to anybody else."""
    first = node.worker("first")
    assert first.ask("store a 6") == "stored"
    pool, copier = first.ask("pool"), int(first.ask("copier"))
    os.kill(copier, signal.SIGSTOP)
    first.end()
    second = node.worker("second")
    assert second.ask("pool") != pool
    node.daemon.kill_and_wait()
    third = node.worker("third")
    assert third.ask("pool") != pool
    kill_and_wait(copier)
    fourth = node.worker("fourth")
    assert fourth.ask("pool") == pool
    assert fourth.ask("store b 6") == "stored"
    assert fourth.ask("load b 6") == WHOLE


def test_next_session_has_a_process_of_its_own(node: Node) -> None:
    """After SIGKILL of the daemon, or of the process that copies, another process asks for the same memory."""
    worker = node.worker("first")
    assert worker.ask("store a 6") == "stored"
    for number in range(3):
        if number == 1:
            assert worker.ask(f"store_and_kill lost{number} 6") in {"stored", "failed"}
        else:
            node.daemon.kill_and_wait()
        assert worker.ask("connect") == "done"
        worker.ask("be_patient")
        assert worker.ask(f"store again{number} 6") == "stored"
        assert worker.ask(f"load again{number} 6") == WHOLE
        assert worker.ask("kind") == "ProcessShard"
    assert worker.ask("leave") == "done"


def test_thread_copies_where_the_daemon_gives_the_memory_to_no_process(node: Node) -> None:
    """One order fails; from then on vLLM's own thread copies, in the same memory."""
    worker = node.worker("first")
    assert worker.ask("name_a_stranger_s_pool") == "done"
    assert worker.ask("store a 6") == "failed"
    worker.ask("be_patient")
    assert worker.ask("store b 6") == "stored"
    assert [worker.ask("kind"), worker.ask("load b 6")] == ["OffloadShard", WHOLE]
    assert worker.ask("leave") == "done"
