"""Device pools on CUDA: engine, worker and daemon are separate processes on the fake driver."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

from kvcached_client import Admin
from kvcached_client.protocol.reports import HealthPart, HostRegistration
from tests.cuda.conftest import ROOT
from tests.cuda.test_copy_process import wait_until
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules, settings
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.line_process import LineProcess

SLOTS, BLOCKS = 48, 3
ON_DEVICE = CONFIG.replace("slots = 16", f'slots = {SLOTS}\ndevice = "cuda"').replace("ttl_ms = 600", "ttl_ms = 20000")
HOST = "[host]\nsize_bytes = 4194304\nslab_bytes = 65536\n"
#: Prompts whose stores are under way at a time: they have a fraction of the slots.
STORED_TOGETHER = 4
WHOLE = f"hit {BLOCKS} ready {BLOCKS} wrong 0"


class OnDevice(NamedTuple):
    """A daemon that comes back, and its device."""

    daemon: Supervised
    device: Path
    trace_path: Path

    def engine(self) -> LineProcess:
        """A new engine, ready."""
        engine = LineProcess("tests.cuda.pool_engine", str(self.daemon.run_dir))
        assert engine.hear() == "ready"
        return engine

    def worker_pid(self) -> int:
        """Of the only worker."""
        daemon = self.daemon.daemon_pid
        children = Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()
        (pid,) = (int(each) for each in children if b"worker.main" in Path(f"/proc/{each}/cmdline").read_bytes())
        return pid

    def await_stores(self) -> None:
        """Until no transfer is under way: what was committed so far is in the host pool, and may be evicted."""
        with Admin.connect(self.daemon.run_dir, deadline_ms=20_000) as admin:
            while any(admin.stats().transfers.values()):
                pass

    def await_worker(self) -> None:
        """Until the replica has a worker again."""
        with Admin.connect(self.daemon.run_dir, deadline_ms=20_000) as admin:
            while not admin.health().ok:
                pass


@contextmanager
def ended(process: LineProcess) -> Iterator[LineProcess]:
    try:
        yield process
    finally:
        process.end()


@pytest.fixture
def on_device(
    use_device: Callable[..., None], device: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[OnDevice]:
    """A daemon on a device whose streams are late; afterwards nothing is left on it, and no rule was broken."""
    given = getattr(request, "param", {})
    use_device(**(given if isinstance(given, dict) else {"seed": given}))
    with supervised(tmp_path, ON_DEVICE + HOST, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        yield OnDevice(daemon, device, tmp_path / "trace")
    assert trace.broken_rules(trace.read(tmp_path / "trace")) == []
    assert live_granules(device) == 0


def prompts(engine: LineProcess, numbers: range) -> None:
    for number in numbers:
        assert engine.ask(f"compute {number}").startswith("hit ")


def stored_prompts(on_device: OnDevice, engine: LineProcess, numbers: range) -> None:
    """As `prompts`. None is evicted before it is in the host pool, however slow the worker is."""
    for first in range(numbers.start, numbers.stop, STORED_TOGETHER):
        prompts(engine, numbers[first - numbers.start :][:STORED_TOGETHER])
        on_device.await_stores()


@pytest.mark.parametrize("on_device", [1, 2, 3], indirect=True)
@pytest.mark.parametrize("killed", ["engine", "worker", "daemon", "worker and daemon"])
def test_blocks_outlive_every_process(on_device: OnDevice, killed: str) -> None:
    """After SIGKILL of engine, worker, daemon or both, every block is hit again on the device, and none is wrong."""
    cached = range(8)
    with ended(on_device.engine()) as engine:
        prompts(engine, cached)
        assert live_granules(on_device.device) == 1
        if "worker" in killed:
            os.kill(on_device.worker_pid(), signal.SIGKILL)
        if "daemon" in killed:
            on_device.daemon.kill_and_wait()
        if killed == "engine":
            engine.end()
    with ended(on_device.engine()) as engine:
        assert [engine.ask(f"look {number}") for number in cached] == [WHOLE] * len(cached)
        on_device.await_worker()
        prompts(engine, range(100, 104))
        assert engine.ask("look 101") == WHOLE


def test_engine_goes_on_with_the_next_daemon(on_device: OnDevice) -> None:
    """An engine that keeps its pool mapped rejoins after the daemon was killed, and finds its blocks."""
    with ended(on_device.engine()) as engine:
        prompts(engine, range(6))
        on_device.daemon.kill_and_wait()

        assert engine.ask("rejoin 0") == "rejoined"
        assert {engine.ask(f"look {number}") for number in range(6)} == {WHOLE}


def test_addresses_stay_while_worker_and_daemon_are_replaced(on_device: OnDevice) -> None:
    """Graphs of kernels hold addresses: those of a mapped pool stay, and what is written there is what all others see.

    A mapping that is made in the next session is of the same memory, and at other addresses.
    """
    with ended(on_device.engine()) as engine:
        prompts(engine, range(3))
        before = engine.ask("addresses 0")
        os.kill(on_device.worker_pid(), signal.SIGKILL)
        on_device.await_worker()
        on_device.daemon.kill_and_wait()
        assert engine.ask("rejoin 0") == "rejoined"
        prompts(engine, range(3, 6))

        assert engine.ask("addresses 0") == before
        assert engine.ask("others 0") == f"elsewhere {len(before.split())} different 0"
        assert {engine.ask(f"look {number}") for number in range(6)} == {WHOLE}
    with ended(on_device.engine()) as engine:
        assert {engine.ask(f"look {number}") for number in range(6)} == {WHOLE}


def test_worker_whose_device_has_failed_says_so(use_device: Callable[..., None], device: Path, tmp_path: Path) -> None:
    """Its last line of log is one error that names what the driver said, and the daemon tells of no other end."""
    use_device(faults="launch_failure=@6")
    with supervised(tmp_path, ON_DEVICE + HOST, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        on_device = OnDevice(daemon, device, tmp_path / "trace")
        with ended(on_device.engine()) as engine:
            prompts(engine, range(8))
        log = Path(f"{daemon.run_dir}/worker-default-0.log")
        wait_until(lambda: " ending: " in log.read_text())
        (line,) = (each for each in log.read_text().splitlines() if " ending: " in each)
        assert re.fullmatch(r".* ERROR ending: the device has failed, .*: cu\w+: CUDA_ERROR_LAUNCH_FAILED", line)
        wait_until(lambda: "worker default/0 ended, as its device has failed" in daemon.log)


def test_registered_share_of_the_host_pool_is_told(on_device: OnDevice) -> None:
    """Once the worker has registered the host pool, health and stats say so; those of the next worker as well."""
    for _ in range(2):
        with Admin.connect(on_device.daemon.run_dir, deadline_ms=20_000) as admin:
            while not (told := admin.stats().pools[0].registered):
                pass
            part = next(each for each in admin.health().parts if each.part == "default/registered")
        assert told == (HostRegistration(shard=0, registered_bytes=4 << 20, size_bytes=4 << 20),)
        assert part == HealthPart(
            part="default/registered", ok=True, detail="shard 0: 4194304 of 4194304 bytes of the host pool"
        )
        os.kill(on_device.worker_pid(), signal.SIGKILL)
        on_device.await_worker()


def test_worker_logs_what_its_device_gives(on_device: OnDevice) -> None:
    """A worker's start is a line of its log with the device, its driver, and which mechanisms of copies they give."""
    on_device.await_worker()
    log = (on_device.daemon.run_dir / "worker-default-0.log").read_text()
    (line,) = (each for each in log.splitlines() if "copy engines" in each)
    assert ", Fake CUDA device 0, driver 13000: copies in batches, 3 copy engines, memory node 0, huge pages" in line


@pytest.mark.parametrize("on_device", [{"faults": "refused_registration=1"}], indirect=True)
def test_refused_registration_is_told_and_harmless(on_device: OnDevice) -> None:
    """Where the driver registers nothing, health and stats say why; the daemon is healthy, and blocks are copied."""
    with Admin.connect(on_device.daemon.run_dir, deadline_ms=20_000) as admin:
        while not (told := admin.stats().pools[0].registered):
            pass
        health = admin.health()
    assert told[0].registered_bytes == 0
    assert "CUDA_ERROR_OUT_OF_MEMORY" in told[0].error
    assert health.ok
    assert [each.detail for each in health.parts if each.part == "default/registered"] == [
        f"shard 0: 0 of 4194304 bytes of the host pool, copies of the rest are slower: {told[0].error}"
    ]
    many = range(3 * SLOTS // BLOCKS)
    with ended(on_device.engine()) as engine:
        prompts(engine, many)
        assert all(engine.ask(f"look {number}").endswith(" wrong 0") for number in many)


@pytest.mark.parametrize("on_device", [1, 2, 3, 4], indirect=True)
def test_evicted_blocks_come_back_from_the_host_pool(on_device: OnDevice) -> None:
    """Blocks that have left the device are loaded from the host pool, as they were."""
    many = range(3 * SLOTS // BLOCKS)
    with ended(on_device.engine()) as engine:
        stored_prompts(on_device, engine, many)
        seen = [engine.ask(f"look {number}") for number in many]

        assert all(each.endswith(" wrong 0") for each in seen)
        loaded = [each for each in seen if each.startswith(f"hit {BLOCKS} ready 0 ")]
        assert len(loaded) >= len(many) - SLOTS // BLOCKS  # all that the device had no slots for
    calls = trace.calls(trace.read(on_device.trace_path), "cuMemcpyBatchAsync")
    assert 0 < len(calls) <= len(many) * 2  # of each prompt, a store and a load


def test_device_that_does_not_exist_is_a_start_error(library: Path, device: Path, tmp_path: Path) -> None:
    """A daemon that is to use a device that is not there does not start, and says which and what to do."""
    path = tmp_path / "kvcached.toml"
    path.write_text(ON_DEVICE.replace('device = "cuda"', 'device = "cuda"\ncuda_devices = [5]'))
    environment = {**os.environ, **settings(directory=device), "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(tmp_path / "run")],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 2
    assert "CUDA device 5: device 5 of 1 (name one that nvidia-smi lists" in done.stderr
    assert "kvcached doctor --cuda" in done.stderr
