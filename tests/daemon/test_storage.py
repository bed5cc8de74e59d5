"""Storage below a real daemon: what outlives everything, and what happens when it fails."""

from __future__ import annotations

import fcntl
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcached.storage.link_state import LinkState
from kvcached_client import Admin
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.protocol.admin import StorageReport
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, keys_of
from tests.daemon.supervised import supervised
from tests.daemon.test_offload import config
from tests.daemon.test_restart import Engine
from tests.unkillable import unkillable

BLOCKS = 6
WAIT_S = 30.0


def with_storage(directory: Path, *, more: str = "", faults: str = "", settings: str = "") -> str:
    """A configuration with the disk backend, or with one that injects faults: `tests.storage.fault`."""
    return (
        config()
        + ("\n[storage]\n" + ('backend = "faulty"\n' if faults else ""))
        + f"prefetch_threshold_blocks = 1\ntimeout_ms = 2000\n{more}\n[storage.settings]\n"
        + f'directory = "{directory}"\ncapacity_bytes = {8 << 20}\nfree_space_floor_bytes = 0\n{settings}\n'
        + (f"[storage.settings.faults]\n{faults}\n" if faults else "")
    )


@contextmanager
def connected(daemon: RunningDaemon) -> Iterator[Engine]:
    """An engine with all its shards."""
    with ExitStack() as parts:
        engine = Engine(daemon.run_dir)
        parts.callback(engine.close)
        yield engine


def fetch(engine: Engine, name: str, **how: object) -> PrefetchResult:
    settings = {"stop": "wait_complete", "deadline_ms": 20_000, **how}
    return engine.scheduler.client.prefetch(keys_of(name, BLOCKS), BLOCKS * BLOCK_SIZE, full=True, **settings)  # type: ignore[arg-type]


def report(daemon: RunningDaemon) -> StorageReport:
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        return admin.storage()


def ailing(daemon: RunningDaemon) -> set[str]:
    """Parts that health finds something wrong with."""
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        return {part.part for part in admin.health().parts if not part.ok}


def until(holds: Callable[[], bool]) -> None:
    """Wait for what happens outside this process; fails after a while."""
    end_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def backed_up(daemon: RunningDaemon, blocks: int) -> None:
    """Wait until storage has so many blocks."""
    until(lambda: report(daemon).blocks >= blocks)


@pytest.mark.end_to_end
def test_blocks_outlive_everything(tmp_path: Path) -> None:
    """After a stop of everything and a start on empty memory, prompts come back from disk, byte for byte."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        engine.store("b", BLOCKS)
        backed_up(daemon, 2 * BLOCKS)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert engine.load("a", BLOCKS) == 0
        assert fetch(engine, "a") == PrefetchResult(BLOCKS, BLOCKS, is_over=True, reason="fetched")
        assert engine.load("a", BLOCKS) == BLOCKS
        assert engine.load("b", BLOCKS) == 0
        assert fetch(engine, "unknown") == PrefetchResult(0, 0, is_over=True, reason="nothing")


def test_encrypted_blocks_come_back_with_their_key_only(tmp_path: Path) -> None:
    """With a key file nothing is found under another key, and everything under the same."""
    pytest.importorskip("cryptography")
    keys = [tmp_path / "one.key", tmp_path / "other.key"]
    for path in keys:
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
    texts = [with_storage(tmp_path / "disk", more=f'key_file = "{path}"') for path in keys]
    with started(tmp_path, texts[0]) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
    with started(tmp_path, texts[1]) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == 0
    with started(tmp_path, texts[0]) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == BLOCKS
        assert engine.load("a", BLOCKS) == BLOCKS


def test_cleared_blocks_do_not_come_back(tmp_path: Path) -> None:
    """What was cleared is not found in storage, by a daemon that knows nothing of before either."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
        engine.scheduler.client.clear()
        assert fetch(engine, "a").fetched == 0
        until(lambda: report(daemon).blocks == 0)
    (tmp_path / "run" / "ledger.json").unlink(missing_ok=True)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == 0


def test_killed_storage_process_comes_back(tmp_path: Path) -> None:
    """When the storage process is killed, requests go on without it, nothing is held, and it is started again."""
    with started(tmp_path, with_storage(tmp_path / "disk")) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
        os.kill(int((daemon.run_dir / "storage.lock").read_text()), signal.SIGKILL)
        until(lambda: report(daemon).restarts == 1)
        assert engine.load("a", BLOCKS) == BLOCKS
        until(lambda: report(daemon).state == "ready")
        engine.store("b", BLOCKS)
        backed_up(daemon, 2 * BLOCKS)
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            assert admin.check().violations == ()


@pytest.mark.parametrize("number", [signal.SIGCONT, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_next_daemon_waits_for_the_last_ones_storage_process(tmp_path: Path, number: signal.Signals) -> None:
    """A storage process that outlives its daemon, even stopped, is dead before the next one hands out host slots."""
    with supervised(tmp_path, with_storage(tmp_path / "disk")) as daemon:
        running = RunningDaemon(daemon.process, daemon.run_dir)
        with connected(running) as engine:
            engine.store("a", BLOCKS)
            backed_up(running, BLOCKS)
            earlier = int((daemon.run_dir / "storage.lock").read_text())
            pidfd = os.pidfd_open(earlier)
            signal.pidfd_send_signal(pidfd, number)
            daemon.kill_and_wait()
            assert select.select([pidfd], [], [], 0)[0], "it lives"
            os.close(pidfd)
            engine.connect()
            engine.join()
            assert engine.load("a", BLOCKS) == BLOCKS
            until(lambda: report(running).state == "ready")


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGHUP])
def test_storage_process_that_cannot_be_killed_costs_no_memory(tmp_path: Path, how: signal.Signals) -> None:
    """The next daemon waits until it is dead, even if the one before was told to end, and then has every block.

    A start that waits is no failed start, of which the supervisor allows one here; and it can be told to end.
    """
    with supervised(tmp_path, with_storage(tmp_path / "disk"), failed_starts_max=1) as daemon:
        running = RunningDaemon(daemon.process, daemon.run_dir)
        with connected(running) as engine:
            engine.store("a", BLOCKS)
            backed_up(running, BLOCKS)
            pid = int((daemon.run_dir / "storage.lock").read_text())
            with unkillable(pid):
                daemon.kill() if how == signal.SIGKILL else daemon.process.send_signal(how)
                until(lambda: f"waits for the end of process {pid}" in daemon.log)
                assert (f"storage process {pid} did not end" in daemon.log) is (how == signal.SIGHUP)
            daemon.await_ready()
            engine.connect()
            engine.join()
            assert engine.load("a", BLOCKS) == BLOCKS
        until(lambda: report(running).state == "ready")
        with unkillable(int((daemon.run_dir / "storage.lock").read_text())):
            daemon.kill()
            until(lambda: daemon.log.count("waits for the end of process") == 2)
            daemon.process.terminate()
            assert daemon.process.wait(WAIT_S) == 128 + signal.SIGTERM


def test_namespace_is_known_before_storage_tells_of_itself(tmp_path: Path) -> None:
    """A daemon that takes over a namespace is complete before anything happens to it: no event finds half of it."""
    with supervised(tmp_path, with_storage(tmp_path / "disk")) as daemon:
        running = RunningDaemon(daemon.process, daemon.run_dir)
        with connected(running) as engine:
            engine.store("a", BLOCKS)
            daemon.kill_and_wait()
            assert "Traceback" not in daemon.log
            # Killed again, before any request: what the start wrote down is all that there is.
            daemon.kill_and_wait()
            assert "Traceback" not in daemon.log
            engine.connect()
            engine.join()
            assert engine.load("a", BLOCKS) == BLOCKS


def test_storage_that_is_away_at_a_restart_costs_no_block_in_memory(tmp_path: Path) -> None:
    """A daemon that is killed while its storage cannot be opened comes back at once, with what is in memory.

    It says why there is no storage, and has it again when it can be opened.
    """
    disk, away = tmp_path / "disk", tmp_path / "away"
    with supervised(tmp_path, with_storage(disk)) as daemon:
        running = RunningDaemon(daemon.process, daemon.run_dir)
        with connected(running) as engine:
            engine.store("a", BLOCKS)
            backed_up(running, BLOCKS)
            disk.rename(away)
            disk.write_text("no directory")
            daemon.kill_and_wait()
            engine.connect()
            engine.join()
            assert engine.load("a", BLOCKS) == BLOCKS
            until(lambda: "File exists" in report(running).why)
            assert report(running).state in {"waiting", "starting"}
            assert "SIGKILL" not in report(running).why
            assert ailing(running) == {"storage"}
            disk.unlink()
            away.rename(disk)
            until(lambda: report(running).state == "ready")


def test_storage_that_somebody_else_has_is_waited_for(tmp_path: Path) -> None:
    """At a first start, too, storage that cannot be opened now is no reason to serve nobody."""
    disk = tmp_path / "disk"
    disk.mkdir(mode=0o700)
    lock = os.open(disk / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)
    with started(tmp_path, with_storage(disk)) as daemon:
        assert "another process uses" in report(daemon).why
        assert ailing(daemon) == {"storage"}
        os.close(lock)
        until(lambda: report(daemon).state == "ready")


def test_storage_says_how_full_it_is_before_anything_is_written(tmp_path: Path) -> None:
    """After each start the sizes are known: those of an empty disk, and those of one with blocks."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon:
        empty = report(daemon)
        assert (empty.blocks, empty.size_bytes, empty.capacity_bytes) == (0, 0, 8 << 20)
        with connected(daemon) as engine:
            engine.store("a", BLOCKS)
            backed_up(daemon, BLOCKS)
            size_bytes = report(daemon).size_bytes
    with started(tmp_path, text) as daemon:
        full = report(daemon)

    assert (full.blocks, full.size_bytes, full.capacity_bytes) == (BLOCKS, size_bytes, 8 << 20)
    assert size_bytes > 0


def test_storage_that_can_write_nothing_says_so(tmp_path: Path) -> None:
    """Storage that works but takes no block is not called ready, and the reason is shown."""
    system = os.statvfs(tmp_path)
    floor_bytes = system.f_blocks * system.f_frsize - (8 << 20)  # a larger one is refused at the start
    text = with_storage(tmp_path / "disk").replace("floor_bytes = 0", f"floor_bytes = {floor_bytes}")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        until(lambda: report(daemon).state == "read_only")
        assert "free_space_floor_bytes" in report(daemon).why
        assert ailing(daemon) == {"storage"}


def test_changed_bytes_are_never_used(tmp_path: Path) -> None:
    """Whatever becomes of the files, a block is what was stored, or it is not there."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
    for path in (tmp_path / "disk").glob("**/*"):
        if path.is_file() and path.stat().st_size > 1 << 16:
            with path.open("r+b") as file:
                for at in range(0, path.stat().st_size, 4096):
                    file.seek(at + 2500)
                    byte = file.read(1)
                    file.seek(at + 2500)
                    file.write(bytes([byte[0] ^ 1]))
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        result = fetch(engine, "a")
        assert result.fetched < BLOCKS
        assert engine.load("a", BLOCKS) == result.fetched
        assert report(daemon).counters["wrong_blocks"] >= 1


@pytest.mark.parametrize(
    "fault", ["swap", *(pytest.param(each, marks=pytest.mark.slow) for each in ("tear", "flip", "fail", "lose", "lie"))]
)
def test_wrong_answers_are_misses(tmp_path: Path, fault: str) -> None:
    """Torn, changed and exchanged values, failures and lies: a hit is right, or it is none, and every request ends."""
    text = with_storage(tmp_path / "disk", faults=f"rates = {{ {fault} = 0.5 }}\nseed = 3")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        for number in range(4):
            engine.store(f"prompt {number}", BLOCKS)
        time.sleep(0.5)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        for number in range(4):
            result = fetch(engine, f"prompt {number}")
            assert result.is_over
            assert engine.load(f"prompt {number}", BLOCKS) == result.blocks
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            assert admin.check().violations == ()


def test_hung_storage_keeps_nobody_waiting(tmp_path: Path) -> None:
    """A device that does not answer: prefetches end by their deadlines, and the process is replaced in the end."""
    more, faults = "prefetch_timeout_ms = 200\n", "rates = { hang = 1.0 }"
    text = with_storage(tmp_path / "disk", more=more, faults=faults).replace("timeout_ms = 2000", "timeout_ms = 300")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        assert not fetch(engine, "b", stop="timeout").is_over
        assert not fetch(engine, "c", deadline_ms=100).fetched
        until(lambda: "storage" in ailing(daemon))
        until(lambda: report(daemon).restarts >= 1)
        assert engine.load("a", BLOCKS) == BLOCKS


def test_storage_is_detached_attached_and_cleared(tmp_path: Path) -> None:
    """The command ends the process, starts it again, and has it forget everything; it says what is so."""
    with started(tmp_path, with_storage(tmp_path / "disk")) as daemon, connected(daemon) as engine:

        def command(action: str) -> tuple[int, str]:
            call = [sys.executable, "-m", "kvcached", "storage", action, "--run-dir", str(daemon.run_dir)]
            done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
            return done.returncode, done.stdout

        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
        status = command("status")
        assert status[0] == 0
        assert "disk: ready; backup: every" in status[1]
        assert "detached" in command("detach")[1]
        assert fetch(engine, "b").reason == "unavailable"
        command("attach")
        until(lambda: report(daemon).state == "ready")
        command("clear")
        assert report(daemon).blocks == 0


def test_storage_that_cannot_be_opened_refuses_the_start(tmp_path: Path) -> None:
    """A backend that is not there, or settings that are wrong, end the start with what to do."""
    path = tmp_path / "kvcached.toml"
    for text, told in (
        (with_storage(tmp_path / "disk", more='backend = "nosuch"'), "there is no such backend"),
        (with_storage(tmp_path / "disk", settings="nonsense = 1"), "nonsense"),
    ):
        path.write_text(text)
        call = [sys.executable, "-m", "kvcached", "serve", "--config", str(path), "--run-dir", str(tmp_path / "run")]
        done = subprocess.run(call, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert told in done.stderr


def test_directory_that_was_removed_is_made_again(tmp_path: Path) -> None:
    """Somebody deletes it while the daemon uses it: storage says so, is opened anew, and takes blocks again."""
    directory = tmp_path / "blocks"
    with started(tmp_path, with_storage(directory)) as daemon, connected(daemon) as engine:
        engine.store("a", BLOCKS)
        backed_up(daemon, BLOCKS)
        shutil.rmtree(directory)
        engine.store("b", BLOCKS)
        until(lambda: report(daemon).restarts == 1)
        assert "was removed or replaced while it was used" in report(daemon).why
        until(lambda: report(daemon).state == LinkState.READY)
        assert engine.load("a", BLOCKS) == BLOCKS  # storage is known to be empty: what is hit is written again
        backed_up(daemon, 2 * BLOCKS)
        assert (directory / "generations.json").exists()
