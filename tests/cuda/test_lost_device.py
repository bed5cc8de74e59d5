"""A daemon starts while a CUDA device is lost: what else it has is served, and the pool comes back with the device."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import pytest

from kvcached.config.schema import load_config
from kvcached.recovery.device_pools import PoolMemory, device_pools
from kvcached.worker import cuda_maker
from kvcached.worker.cuda_maker import NoCudaMemory
from kvcached_client import Admin
from kvcached_client.errors import DaemonFailure
from kvcached_client.protocol.engine import PoolStats
from tests.cuda.conftest import ROOT
from tests.cuda.test_pool import BLOCKS, HOST, ON_DEVICE, WHOLE, OnDevice, ended, stored_prompts
from tests.cuda_driver.device import bring_back, live_granules, lose
from tests.daemon.supervised import supervised
from tests.daemon.test_deaths import children, wait_for_end
from tests.project.daemon_process import running_daemon

PROMPTS: Final = range(4)
FROM_HOST: Final = f"hit {BLOCKS} ready 0 wrong 0"
CONFIG: Final = ON_DEVICE + HOST + "[offload]\n"
NOT_THERE: Final = "(check nvidia-smi; in a container, start it with --gpus all)"
#: Longer than the longest pause between two starts of workers.
DEADLINE_S: Final = 30.0
#: For a stop whose deadline is 0.3 s: two seconds more for workers that hang, and what a slow machine needs.
STOP_S_MAX: Final = 8.0
UseDevice = Callable[..., None]


@pytest.fixture
def on_device(use_device: UseDevice, device: Path, tmp_path: Path) -> Iterator[OnDevice]:
    """A supervised daemon of both modes; nothing is left on its device afterwards."""
    use_device()
    with supervised(tmp_path, CONFIG, pause_min_s=0.01, pause_max_s=0.01, failed_starts_max=1) as daemon:
        yield OnDevice(daemon, device, tmp_path / "trace")
    assert live_granules(device) == 0


def pools(run_dir: Path) -> dict[str, PoolStats]:
    with Admin.connect(run_dir, deadline_ms=20_000) as admin:
        return {pool.replica: pool for pool in admin.stats().pools}


def ills(run_dir: Path) -> dict[str, str]:
    """What health finds ill, and why."""
    with Admin.connect(run_dir, deadline_ms=20_000) as admin:
        return {part.part: part.detail for part in admin.health().parts if not part.ok}


def await_health(run_dir: Path) -> None:
    until_s = time.monotonic() + DEADLINE_S
    while found := ills(run_dir):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)


def doctor(run_dir: Path) -> dict[str, tuple[str, str]]:
    """Of each check of `kvcached doctor` its level and its text."""
    command = [sys.executable, "-m", "kvcached", "doctor", "--json", "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    return {each["check"]: (each["level"], each["text"]) for each in json.loads(done.stdout)["findings"]}


def lost_under(on_device: OnDevice) -> None:
    """Prompts are cached and in the host pool; then the device is lost, and the daemon is killed and starts again."""
    with ended(on_device.engine()) as engine:
        stored_prompts(on_device, engine, PROMPTS)
    lose(on_device.device)
    on_device.daemon.kill_and_wait()


def looked(on_device: OnDevice) -> set[str]:
    with ended(on_device.engine()) as engine:
        return {engine.ask(f"look {number}") for number in PROMPTS}


@pytest.mark.parametrize("keeps_memory", [True, False])
def test_daemon_starts_without_its_device(on_device: OnDevice, *, keeps_memory: bool) -> None:
    """The pool is degraded, with the reason and what to do, the host pool serves, and all comes back with the device.

    Where the device has kept its memory, each block is hit there again without a copy; else each is in the host pool.
    """
    run_dir = on_device.daemon.run_dir
    lost_under(on_device)

    pool = pools(run_dir)["default"]
    assert (pool.healthy, pool.degraded, pool.states["cached"]) == (False, True, len(PROMPTS) * BLOCKS)
    assert NOT_THERE in pool.trouble
    assert NOT_THERE in ills(run_dir)["default/workers"]
    found = doctor(run_dir)
    assert found["replica default"] == ("fail", pool.trouble)
    assert found["round trip"][0] == "ok"
    assert live_granules(on_device.device) == 1

    bring_back(on_device.device, keeps_memory=keeps_memory)
    await_health(run_dir)
    pool = pools(run_dir)["default"]
    assert (pool.state, pool.healthy, pool.trouble, live_granules(on_device.device)) == ("awake", True, "", 1)
    assert looked(on_device) == {WHOLE if keeps_memory else FROM_HOST}
    on_device.daemon.kill_and_wait()
    assert looked(on_device) == {WHOLE}


def test_lost_pool_is_taken_over_while_it_waits(on_device: OnDevice) -> None:
    """A further daemon that starts before the device is back waits for it in the same way."""
    lost_under(on_device)
    on_device.daemon.kill_and_wait()
    assert "default/workers" in ills(on_device.daemon.run_dir)
    bring_back(on_device.device, keeps_memory=True)
    await_health(on_device.daemon.run_dir)
    assert looked(on_device) == {WHOLE}


def test_memory_that_nobody_kept_is_made_when_the_device_is_back(
    use_device: UseDevice, device: Path, tmp_path: Path
) -> None:
    """Without a service manager the pool has no memory to wait with: it gets new memory, also after another start."""
    use_device()
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(CONFIG)
    with running_daemon(path, run_dir) as daemon:
        daemon.kill()
        daemon.wait()
    lose(device)
    for _ in range(2):
        with running_daemon(path, run_dir) as daemon:
            assert NOT_THERE in ills(run_dir)["default/workers"]
            assert (pools(run_dir)["default"].state, pools(run_dir)["default"].degraded) == ("waking", True)
            daemon.kill()
            daemon.wait()
    with running_daemon(path, run_dir):
        bring_back(device, keeps_memory=False)
        await_health(run_dir)
        assert (pools(run_dir)["default"].state, live_granules(device)) == ("awake", 1)
    assert live_granules(device) == 0


def two_replicas() -> str:
    first = ON_DEVICE.replace('device = "cuda"', 'device = "cuda"\ncuda_devices = [0]')
    second = first[first.index("[[replica]]") :].replace('"default"', '"other"').replace("[0]", "[1]")
    return first + second + HOST


def test_other_devices_serve_and_are_not_mistaken(use_device: UseDevice, device: Path, tmp_path: Path) -> None:
    """A device that is lost makes the numbers of those behind it smaller: each replica stays on its own device."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(two_replicas())
    with running_daemon(path, run_dir) as daemon:
        daemon.kill()
        daemon.wait()
    lose(device, 0)
    with running_daemon(path, run_dir):
        assert set(ills(run_dir)) == {"default/workers"}
        assert [live_granules(device, number) for number in range(2)] == [0, 1]
        bring_back(device, 0, keeps_memory=False)
        await_health(run_dir)
        assert [live_granules(device, number) for number in range(2)] == [1, 1]


def test_device_that_was_never_there_is_a_wrong_configuration(
    use_device: UseDevice, device: Path, tmp_path: Path
) -> None:
    """Another number in the configuration is refused with what is wrong, although the replica has served before."""
    use_device()
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(CONFIG)
    with running_daemon(path, run_dir) as daemon:
        daemon.kill()
        daemon.wait()
    path.write_text(CONFIG.replace('device = "cuda"', 'device = "cuda"\ncuda_devices = [5]'))
    command = [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "CUDA device 5: device 5 of 1 (name one that nvidia-smi lists" in done.stderr


def test_device_that_is_listed_and_does_nothing_is_lost(use_device: UseDevice, device: Path, tmp_path: Path) -> None:
    """At a first start, too: the device exists, so the configuration is right, and the other tiers serve."""
    use_device(faults="device_lost=@1")
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(CONFIG)
    with running_daemon(path, run_dir):
        assert set(ills(run_dir)) == {"default/workers"}
        assert (
            "CUDA_ERROR_UNKNOWN" in pools(run_dir)["default"].trouble or NOT_THERE in pools(run_dir)["default"].trouble
        )
    assert live_granules(device) == 0


def test_device_that_was_lost_at_the_first_start_is_known_again(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver tells its UUID, and no longer lists it by the next try: the pool gets no memory of its neighbour."""
    use_device(devices=2)
    path = tmp_path / "kvcached.toml"
    path.write_text(on_the_first_device())
    (replica,) = load_config(path).replica

    async def main() -> None:
        monkeypatch.setenv("FAKE_CUDA_COMPUTE_MODE", "2")
        opened = await device_pools([replica], {replica.name: None}, {})
        memory = PoolMemory(replica, None, (), opened.lost[replica.name])
        monkeypatch.delenv("FAKE_CUDA_COMPUTE_MODE")
        assert [uuid.partition("-")[0] for uuid in memory.devices] == ["GPU"]
        lose(device, 0)
        with pytest.raises(NoCudaMemory, match=f"the driver does not list {memory.devices[0]}, which the pool had"):
            await memory.make()
        bring_back(device, 0, keeps_memory=False)
        await memory.make()
        assert [live_granules(device, number) for number in range(2)] == [1, 0]
        memory.close()

    asyncio.run(main())


def test_lost_device_without_a_uuid_is_a_failed_start(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could tell it from its neighbours later."""
    use_device()
    path = tmp_path / "kvcached.toml"
    path.write_text(on_the_first_device())
    (replica,) = load_config(path).replica
    monkeypatch.setenv("FAKE_CUDA_COMPUTE_MODE", "2")
    monkeypatch.setattr(cuda_maker, "MAKER", "tests.cuda.silent_maker")
    with pytest.raises(NoCudaMemory, match="CUDA_ERROR_DEVICE_UNAVAILABLE") as refused:
        asyncio.run(device_pools([replica], {replica.name: None}, {}))
    assert (refused.value.is_lost, refused.value.listed) == (True, ("",))


def on_the_first_device() -> str:
    first, _, _ = two_replicas().partition('[[replica]]\nname = "other"')
    return first + HOST


def in_order(daemon: subprocess.Popen[bytes]) -> None:
    daemon.terminate()
    assert daemon.wait() == 0


def made(device: Path) -> list[int]:
    return [live_granules(device, number) for number in range(2)]


def test_replica_moves_after_a_stop_in_order(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of it is kept, and its number means another device now: its memory is made there, also after a crash."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(on_the_first_device())
    with running_daemon(path, run_dir) as daemon:
        assert made(device) == [1, 0]
        in_order(daemon)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with running_daemon(path, run_dir) as daemon:
        assert (ills(run_dir), made(device)) == ({}, [0, 1])
        daemon.kill()
        daemon.wait()
    with running_daemon(path, run_dir):
        assert (ills(run_dir), made(device)) == ({}, [0, 1])


def test_replica_does_not_move_after_a_crash(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its device may be lost: it waits, also after a stop in order, and says how to use another one; that helps."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(on_the_first_device())
    with running_daemon(path, run_dir) as daemon:
        daemon.kill()
        daemon.wait()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    for _ in range(2):
        with running_daemon(path, run_dir) as daemon:
            assert "to use another device, stop the daemon, delete ledger.json" in ills(run_dir)["default/workers"]
            assert made(device) == [0, 0]
            in_order(daemon)
    (run_dir / "ledger.json").unlink()
    with running_daemon(path, run_dir):
        assert (ills(run_dir), made(device)) == ({}, [0, 1])


@pytest.mark.parametrize("worker", ["idle", "dead"])
def test_replica_does_not_move_if_its_device_is_lost_at_a_stop_in_order(
    use_device: UseDevice, device: Path, tmp_path: Path, worker: str
) -> None:
    """A worker that has nothing to do does not notice it, one that has just died is no proof: each device is tried."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(on_the_first_device())
    with running_daemon(path, run_dir) as daemon:
        (pid,) = children(daemon.pid)
        lose(device, 0)
        if worker == "dead":
            os.kill(pid, signal.SIGKILL)
            assert wait_for_end(pid, DEADLINE_S)
        in_order(daemon)
    assert not (run_dir / "stopped").exists()
    with running_daemon(path, run_dir):
        assert "delete ledger.json" in ills(run_dir)["default/workers"]
        assert made(device) == [0, 0]
        bring_back(device, 0, keeps_memory=False)
        await_health(run_dir)
        assert made(device) == [1, 0]


def test_device_that_hangs_holds_up_no_stop(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that does not answer is waited for as long as the configuration says; its replica does not move."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text("shutdown_deadline_ms = 300\n" + on_the_first_device())
    with running_daemon(path, run_dir) as daemon:
        (pid,) = children(daemon.pid)
        os.kill(pid, signal.SIGSTOP)
        daemon.terminate()
        assert daemon.wait(STOP_S_MAX) == 0
    assert "no answer for 1 s" in run_dir.with_suffix(".log").read_text()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with running_daemon(path, run_dir):
        assert "delete ledger.json" in ills(run_dir)["default/workers"]
        assert made(device) == [0, 0]


def test_replica_does_not_move_to_a_neighbours_device(use_device: UseDevice, device: Path, tmp_path: Path) -> None:
    """A device is lost after a stop in order: those behind it have other numbers than before, so the replica waits."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(two_replicas())
    with running_daemon(path, run_dir) as daemon:
        in_order(daemon)
    lose(device, 0)
    with running_daemon(path, run_dir):
        assert (set(ills(run_dir)), made(device)) == ({"default/workers"}, [0, 1])


def test_pool_that_sleeps_wakes_on_its_own_device(
    use_device: UseDevice, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program may wake it, and nobody knows what has become of its device meanwhile: no other one is used."""
    use_device(devices=2)
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(on_the_first_device())
    with running_daemon(path, run_dir) as daemon:
        with Admin.connect(run_dir, deadline_ms=20_000) as admin:
            admin.sleep("default")
        in_order(daemon)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with running_daemon(path, run_dir), Admin.connect(run_dir, deadline_ms=20_000) as admin:
        with pytest.raises(DaemonFailure, match=r"stays asleep: .* delete ledger\.json"):
            admin.wake("default")
        assert made(device) == [0, 0]
