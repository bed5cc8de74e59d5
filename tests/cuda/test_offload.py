"""Offload mode with tensors on CUDA: engines and the daemon are separate processes on the fake driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached_client.failpoints import VARIABLE
from kvcached_client.offload import new_instance
from tests.cuda.conftest import ROOT
from tests.cuda.offload_engine import PAGE_BYTES
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules, settings
from tests.daemon.conftest import RunningDaemon
from tests.daemon.offload_process import LAYERS, Scheduler, ShardMemory
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_offload import config, host, is_sound, nothing_held, seconds_until
from tests.line_process import LineProcess

MODULE = "tests.cuda.offload_engine"
BLOCKS = 6
WHOLE = f"{BLOCKS} [] True"


class Node(NamedTuple):
    """A daemon that comes back, and a device."""

    daemon: Supervised
    device: Path
    trace_path: Path
    patch: pytest.MonkeyPatch

    @contextmanager
    def engine(
        self, *, module: str = MODULE, argument: str = "0", leave: bool = True, **driver: object
    ) -> Iterator[LineProcess]:
        """An engine of a process of its own, on the device."""
        with self.patch.context() as patch:
            for name, value in settings(**driver).items():
                patch.setenv(name, value)
            engine = LineProcess(module, str(self.daemon.run_dir), argument)
        try:
            assert engine.hear() == "ready"
            yield engine
            if leave:
                assert engine.ask("leave") == "done"
        finally:
            engine.end()

    def records(self) -> list[trace.Record]:
        return trace.read(self.trace_path)

    @property
    def running(self) -> RunningDaemon:
        return RunningDaemon(self.daemon.process, self.daemon.run_dir)


@pytest.fixture
def node(
    library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[Node]:
    """A daemon in offload mode, and a device whose streams are late; afterwards nothing is left on it."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    seed = getattr(request, "param", 1)
    values = {"directory": device, "delay_us": 20_000, "register_us_per_mib": 0, "trace": tmp_path / "trace"}
    for name, value in settings(**values, seed=seed, memory_mib=64).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(library.parent))
    with supervised(tmp_path, config(PAGE_BYTES), pause_min_s=0.01, pause_max_s=0.01) as daemon:
        yield Node(daemon, device, tmp_path / "trace", monkeypatch)
    assert live_granules(device) == 0


def broken_rules(node: Node) -> list[str]:
    return trace.broken_rules(node.records())


def copies_after_their_marks(records: list[trace.Record]) -> int:
    """The number of copies; each ran after the kernels that were queued before the mark that it waits for."""
    copies = 0
    for process in {record.process for record in records}:
        mine = [record for record in records if record.process == process]
        kernels = trace.ran(mine, "host function")
        ran = trace.ran(mine, "copy")
        assert len(kernels) == len(ran), "one kernel, then one copy"
        assert all(kernel.order < copy.order for kernel, copy in zip(kernels, ran, strict=True))
        copies += len(ran)
    return copies


@pytest.mark.parametrize("node", [1, 2, 3, 4], indirect=True)
def test_blocks_of_one_engine_are_loaded_by_another(node: Node) -> None:
    """Late kernels write blocks, and late kernels read what loads overwrite: each sees its bytes, in two engines."""
    with node.engine() as first, node.engine() as second:
        names = [f"prompt-{number}" for number in range(5)]
        for name in names:
            assert first.ask(f"store {name} {BLOCKS}") == "done"
            assert second.ask(f"load {name} {BLOCKS}") == WHOLE
        assert second.ask(f"store {names[0]} {BLOCKS + 3}") == "done"
        assert first.ask(f"load {names[0]} {BLOCKS + 3}") == f"{BLOCKS + 3} [] True"

    records = node.records()
    calls = trace.calls(records, "cuMemcpyBatchAsync")
    assert broken_rules(node) == []
    assert len(calls) == 2 * len(names) + 2  # one for each store and for each load
    assert max(each.arguments["count"] for each in calls) <= (BLOCKS + 3) * LAYERS
    assert copies_after_their_marks(records) == len(calls)
    assert len(trace.calls(records, "cuMemHostRegister")) == len(trace.calls(records, "cuMemHostUnregister")) == 2
    events = [len(trace.calls(records, name)) for name in ("cuEventCreate", "cuEventDestroy")]
    assert events == [3 * len(calls)] * 2  # of the mark, before the copies, behind them
    assert is_sound(node.running)


def test_engines_on_cpu_and_device_share_blocks(node: Node) -> None:
    """Equal bytes are one namespace, wherever the tensors are: each engine loads what the other has stored."""
    scheduler, memory = Scheduler(node.daemon.run_dir, new_instance(), 1, PAGE_BYTES), ShardMemory(0, PAGE_BYTES)
    with scheduler.client, node.engine() as engine:
        memory.join(scheduler.client.session)
        assert memory.link is not None
        with memory.link:
            assert engine.ask("store device 6") == "done"
            assert memory.load(scheduler.prepare_load("device", BLOCKS)) == ([], True)
            memory.store(scheduler.prepare_store("cpu", BLOCKS)[1])
            assert engine.ask("load cpu 6") == WHOLE
    assert broken_rules(node) == []


@pytest.mark.parametrize("node", [1, 2, 3], indirect=True)
def test_engine_on_another_device_and_on_its_default_stream(node: Node) -> None:
    """The tensors' device counts, not that of the thread; a mark of the default stream is one; batches are calls."""
    with node.engine(argument="1", devices=2) as engine, node.engine(devices=2) as other:
        assert [engine.ask("compute_on_default_stream"), engine.ask(f"split {2 * LAYERS}")] == ["done"] * 2
        for name in ("a", "b"):
            assert [engine.ask(f"store {name} {BLOCKS}"), other.ask(f"load {name} {BLOCKS}")] == ["done", WHOLE]
            assert [other.ask(f"store {name}{name} 6"), engine.ask(f"load {name}{name} 6")] == ["done", WHOLE]

    calls = trace.calls(node.records(), "cuMemcpyBatchAsync")
    assert broken_rules(node) == []
    assert len(calls) == 4 * BLOCKS // 2 + 4  # the engine has two blocks in a batch, the other one all
    assert live_granules(node.device, 1) == 0


def test_copy_without_a_mark_is_refused(node: Node) -> None:
    """Blocks on a device cannot be copied without saying behind which kernels; the store is reported as failed."""
    with node.engine() as engine:
        said = engine.ask("store_without_mark a")

        assert said == ("BadRequest: bad_value: no mark for tensors on a CUDA device (give `after=shard.mark(stream)`)")
        assert nothing_held(host(node.daemon.run_dir))
        assert engine.ask("load a 2") == "0"
    assert broken_rules(node) == []


@pytest.mark.parametrize(
    "place",
    ["blocks.store.cleared", "blocks.copy", "blocks.store.copied", "blocks.store.header", "offload.load.copied"],
)
def test_engine_killed_in_a_copy_leaves_no_wrong_byte(node: Node, place: str) -> None:
    """SIGKILL of an engine within a store or a load: its slots are free, and whatever is found later is right."""
    with node.engine() as other:
        assert other.ask(f"store a {BLOCKS}") == "done"
        node.patch.setenv(VARIABLE, f"{place}=kill")
        with node.engine(leave=False) as engine:
            engine.say("load a 6" if ".load." in place else "store b 6")
            assert engine.hear() == ""
            engine.process.wait()
        node.patch.delenv(VARIABLE)
        seconds_until(node.daemon.run_dir, nothing_held)

        assert other.ask("load b 6") == "0"
        assert [other.ask(f"load {name} 6") for name in "aa"] == [WHOLE] * 2
        assert [other.ask("store b 6"), other.ask("load b 6")] == ["done", WHOLE]
    assert broken_rules(node) == []
    assert is_sound(node.running)


@pytest.mark.parametrize("place", ["blocks.store.copied", "offload.store.written", "offload.load.copied"])
def test_daemon_killed_in_a_copy_leaves_no_wrong_byte(node: Node, place: str) -> None:
    """SIGKILL of the daemon while an engine copies: the copy fails, and the engine goes on with the next daemon."""
    node.patch.setenv(VARIABLE, f"{place}=stop")
    with node.engine() as engine:
        node.patch.delenv(VARIABLE)
        what = "store a 6"
        if ".load." in place:
            assert engine.ask("store a 6") == "done"
            what = "load a 6"
        engine.say(what)
        os.waitid(os.P_PID, engine.process.pid, os.WSTOPPED | os.WNOWAIT)
        node.daemon.kill_and_wait()
        engine.process.send_signal(signal.SIGCONT)

        assert engine.hear().split(":")[0] in {"DaemonUnreachable", "Stale"}
        assert engine.ask("connect") == "done"
        assert engine.ask("load a 6") in {"0", WHOLE}
        assert [engine.ask("store a 6"), engine.ask("load a 6")] == ["done", WHOLE]
    assert broken_rules(node) == []


@pytest.mark.parametrize("copies", [0, 1])
def test_failed_device_is_a_failed_transfer(node: Node, copies: int) -> None:
    """A copy on a device that fails for good is a failed transfer to the daemon; other engines go on."""
    failure = f"launch_failure=@{2 * copies + 2}"  # each copy has a kernel before it
    with node.engine() as other:
        with node.engine(leave=False, faults=failure) as engine:
            assert [engine.ask(f"store prompt{number} 6") for number in range(copies)] == ["done"] * copies
            assert re.fullmatch("CudaFailure: cu.*: CUDA_ERROR_LAUNCH_FAILED", engine.ask("store last 6"))
            assert nothing_held(host(node.daemon.run_dir))
            assert engine.ask("store next 6") == "CudaFailure: cuLaunchHostFunc: CUDA_ERROR_LAUNCH_FAILED"
        seconds_until(node.daemon.run_dir, nothing_held)

        assert [other.ask(f"load prompt{number} 6") for number in range(copies)] == [WHOLE] * copies
        assert [other.ask("load last 6"), other.ask("store last 6"), other.ask("load last 6")] == ["0", "done", WHOLE]
    assert is_sound(node.running)


def test_registration_refused(node: Node) -> None:
    """Where the driver registers no host memory, copies are made all the same, and are right."""
    with node.engine(faults="refused_registration=1") as engine:
        assert [engine.ask("store a 6"), engine.ask("load a 6")] == ["done", WHOLE]
    assert trace.calls(node.records(), "cuMemHostUnregister") == []


def test_copies_of_a_store_that_breaks_off_end_before_the_pool_is_left(node: Node) -> None:
    """A store that fails between its batches waits for those that are queued: the host pool may go then."""
    node.patch.setenv(VARIABLE, "blocks.copy=raise@3")
    for name, value in settings(delay_us=1_000_000).items():  # longer than a busy machine takes to report a failure
        node.patch.setenv(name, value)
    with node.engine() as engine:
        node.patch.delenv(VARIABLE)
        assert engine.ask(f"split {LAYERS}") == "done"
        assert engine.ask("store a 6") == "FailpointReached: failpoint blocks.copy"
        records = node.records()
        assert engine.ask("load a 6") == "0"
    queued = trace.calls(records, "cuMemcpyBatchAsync")
    assert len(queued) == len(trace.ran(records, "copy")) == 2  # they are over when the failure is told
    assert broken_rules(node) == []


@pytest.mark.parametrize("devices", [2])
def test_layers_on_several_devices_are_refused(library: Path, device: Path, devices: int) -> None:
    """The layers of a shard are on one device."""
    said = outcome_of("several_devices", library, directory=device, devices=devices, memory_mib=64)
    assert "on CUDA devices 0 and 1" in said
    assert "a shard is one device" in said


def test_memory_of_no_device_is_refused(library: Path, device: Path) -> None:
    """A tensor that says that it is on a device, and is not, is refused before anything is copied."""
    assert "CUDA_ERROR_INVALID_VALUE" in outcome_of("no_device_memory", library, directory=device)


def outcome_of(name: str, library: Path, **driver: object) -> str:
    """What a function of the program says."""
    environment = {**os.environ, **settings(**driver), "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-m", MODULE, name],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout
