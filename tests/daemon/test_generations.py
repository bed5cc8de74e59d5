"""Generations over several lives of a real daemon whose storage lasts: nothing that was cleared is served again."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.errors import DaemonFailure
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.test_renewal import WEIGHTS
from tests.daemon.test_restart import Engine
from tests.daemon.test_storage import BLOCKS, backed_up, connected, fetch, report, until, with_storage

pytestmark = pytest.mark.slow

RECORD = "generations.json"
#: Beside the engines in offload mode.
REPLICA = """
[[replica]]
name = "default"
model = "tiny"
block_size = 4
slots = 16
[[replica.group]]
layers = 2
kv_heads = 1
head_dim = 8
v_head_dim = 8
dtype = "float32"
"""


def reboot(tmp_path: Path) -> None:
    """What the machine's restart takes along: the host pool, which is gone already, and the run directory's files."""
    (tmp_path / "run" / "ledger.json").unlink(missing_ok=True)


def store(daemon: RunningDaemon, engine: Engine) -> None:
    """Blocks of the present generation, in storage, which has no others then."""
    until(lambda: report(daemon).counters["forgets_due"] == 0)
    engine.store("a", BLOCKS)
    backed_up(daemon, BLOCKS)


def nothing_between(tmp_path: Path) -> None:
    """An ordinary stop and start: the ledger is there, the host pool's memory is not."""
    assert (tmp_path / "run" / "ledger.json").exists()


@pytest.mark.parametrize("between", [nothing_between, reboot], ids=["stop and start", "reboot"])
def test_blocks_of_older_weights_never_come_back(tmp_path: Path, between: Callable[[Path], None]) -> None:
    """Cleared, stored, started again, cleared: what was stored after the first clear is no hit after the second."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        store(daemon, engine)  # KV of W1
        second = engine.scheduler.client.clear()
        until(lambda: report(daemon).blocks == 0)
        store(daemon, engine)  # KV of W2
    between(tmp_path)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        third = engine.scheduler.client.clear()  # W3
        found = fetch(engine, "a")
        assert (third > second, found.fetched, engine.load("a", BLOCKS)) == (True, 0, 0)


@pytest.mark.parametrize("between", [nothing_between, reboot], ids=["stop and start", "reboot"])
def test_blocks_that_were_stored_after_a_clear_are_found_by_the_next_life(
    tmp_path: Path, between: Callable[[Path], None]
) -> None:
    """Storage survives restarts after a clear as before it, with the same bytes."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        generation = engine.scheduler.client.clear()
        store(daemon, engine)
    between(tmp_path)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert engine.scheduler.client.generation == generation
        assert fetch(engine, "a").fetched == BLOCKS
        assert engine.load("a", BLOCKS) == BLOCKS


def test_what_people_clear_is_found_in_no_tier_and_in_no_later_life(tmp_path: Path) -> None:
    """Storage gives nothing of an engine's cleared namespace back, before and after a SIGKILL and a reboot."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        store(daemon, engine)
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            assert admin.clear("tiny").blocks == BLOCKS
        assert (engine.load("a", BLOCKS), fetch(engine, "a").fetched) == (0, 0)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
    reboot(tmp_path)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == 0
        store(daemon, engine)
        assert engine.load("a", BLOCKS) == BLOCKS


def test_clear_holds_though_daemon_and_machine_end_right_after_it(tmp_path: Path) -> None:
    """SIGKILL as soon as the clear is answered, and a reboot: what was cleared is not found, and storage forgets it."""
    text = with_storage(tmp_path / "disk")
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        store(daemon, engine)
        engine.scheduler.client.clear()
        daemon.process.kill()
        daemon.process.wait()
    reboot(tmp_path)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == 0
        until(lambda: report(daemon).blocks == 0)  # the next life forgets what the last one had no time to


@pytest.mark.parametrize("damage", ["removed", "damaged", "all of storage emptied"])
def test_without_its_record_storage_is_cold_and_nothing_cleared_is_found(tmp_path: Path, damage: str) -> None:
    """Where the record is lost, blocks are not found, in no generation that a later clear begins; new ones are."""
    disk = tmp_path / "disk"
    text = with_storage(disk)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        engine.scheduler.client.clear()
        store(daemon, engine)
    reboot(tmp_path)
    if damage == "removed":
        (disk / RECORD).unlink()
    elif damage == "damaged":
        (disk / RECORD).write_bytes(b"\0" * 64)
    else:
        shutil.rmtree(disk)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert fetch(engine, "a").fetched == 0
        engine.scheduler.client.clear()
        assert fetch(engine, "a").fetched == 0
        engine.store("b", BLOCKS)
        until(lambda: report(daemon).counters.get("written_blocks") == BLOCKS)
    reboot(tmp_path)
    with started(tmp_path, text) as daemon, connected(daemon) as engine:
        assert fetch(engine, "b").fetched == BLOCKS


def await_recorded(disk: Path, engine: Engine) -> None:
    """Return when the record names an engine's namespace: nothing is being written any more."""
    record, namespace = disk / RECORD, engine.scheduler.client.namespace.hex()
    while not (record.exists() and namespace in record.read_text()) or (disk / f"{RECORD}.new").exists():
        pass


def test_clear_that_cannot_be_written_down_is_an_error(tmp_path: Path) -> None:
    """A device that takes nothing: the engine is told, and its next clear is answered when it takes something again."""
    disk = tmp_path / "disk"
    with started(tmp_path, with_storage(disk)) as daemon, connected(daemon) as engine:
        await_recorded(disk, engine)
        (disk / f"{RECORD}.new").mkdir()
        with pytest.raises(DaemonFailure, match="restart of the machine"):
            engine.scheduler.client.clear()
        (disk / f"{RECORD}.new").rmdir()
        generation = engine.scheduler.client.clear()
        assert f'"generation":{generation}' in (disk / RECORD).read_text().replace(" ", "")


def test_device_that_hangs_delays_the_clear_and_nothing_else(tmp_path: Path) -> None:
    """While the record is being written engines are served; the clear is answered when the device says something."""
    disk = tmp_path / "disk"
    pipe = disk / f"{RECORD}.new"
    with started(tmp_path, with_storage(disk)) as daemon, connected(daemon) as engine, ThreadPoolExecutor(1) as thread:
        await_recorded(disk, engine)
        os.mkfifo(pipe)  # to open it for writing waits for a reader
        cleared = thread.submit(engine.scheduler.client.clear)
        with connected(daemon) as other:
            other.store("b", BLOCKS)
            assert other.load("b", BLOCKS) == BLOCKS
        assert not cleared.done()
        reader = os.open(pipe, os.O_RDONLY)
        pipe.unlink()
        os.close(reader)
        assert isinstance(cleared.exception(), DaemonFailure | None)  # a pipe cannot be synced; it may be tried again
        engine.scheduler.client.clear()


def attached_again(daemon: RunningDaemon) -> None:
    """Storage is locked for this daemon, and no longer for the one before."""
    with Admin.connect(daemon.run_dir, deadline_ms=20_000) as admin:
        admin.storage("detach")
        admin.storage("attach")
    until(lambda: report(daemon).state == "ready")


@contextmanager
def standby(tmp_path: Path) -> Iterator[tuple[RunningDaemon, Engine, RunningDaemon, Engine]]:
    """Two daemons with one directory, each with an engine: the first one uses it, and the second one waits for it."""
    with ExitStack() as parts:
        found: list[RunningDaemon | Engine] = []
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            daemon = parts.enter_context(started(tmp_path / name, with_storage(tmp_path / "disk")))
            engine = parts.enter_context(connected(daemon))
            found += [daemon, engine]
            if name == "one":
                store(daemon, engine)
                await_recorded(tmp_path / "disk", engine)
        yield tuple(found)  # type: ignore[misc]


def clear_and_die(daemon: RunningDaemon, engine: Engine) -> int:
    """An engine clears its namespace, and its daemon dies before storage has forgotten a block; the new generation."""
    storage = int((daemon.run_dir / "storage.lock").read_text())
    os.kill(storage, signal.SIGSTOP)
    cleared = engine.scheduler.client.clear()
    daemon.process.kill()
    daemon.process.wait()
    os.kill(storage, signal.SIGKILL)
    return cleared


def test_daemon_that_waited_for_storage_finds_nothing_from_before_a_clear_of_the_one_before(tmp_path: Path) -> None:
    """Its engines' blocks in memory, from before that clear, are gone, too, and it clears with numbers of its own."""
    with standby(tmp_path) as (one, engine, two, other):
        generation = other.scheduler.client.generation
        assert generation == engine.scheduler.client.generation
        other.store("b", BLOCKS)
        cleared = clear_and_die(one, engine)
        attached_again(two)
        assert fetch(other, "a").fetched == 0
        assert other.load("b", BLOCKS) == 0
        with connected(two) as third:
            assert third.scheduler.client.generation == cleared
        until(lambda: report(two).blocks == 0)
        assert other.scheduler.client.clear() > cleared + 1


@pytest.mark.parametrize("damage", ["removed", "damaged"])
def test_daemon_that_waited_for_storage_finds_nothing_cleared_without_the_record(tmp_path: Path, damage: str) -> None:
    """The daemon before has cleared and died, and its record is lost: its blocks are not found, whoever asks."""
    with standby(tmp_path) as (one, engine, two, other):
        cleared = clear_and_die(one, engine)
        record = tmp_path / "disk" / RECORD
        if damage == "removed":
            record.unlink()
        else:
            record.write_bytes(bytes(64))
        attached_again(two)
        assert (fetch(other, "a").fetched, other.load("a", BLOCKS)) == (0, 0)
        with connected(two) as third:
            assert third.scheduler.client.generation > cleared


def test_daemon_that_waited_for_storage_finds_what_was_stored_after_a_clear(tmp_path: Path) -> None:
    """It goes on in the generation that the one before has begun; back there, that one finds what this one stored."""
    with standby(tmp_path) as (one, engine, two, other):
        cleared = engine.scheduler.client.clear()
        store(one, engine)
        with Admin.connect(one.run_dir, deadline_ms=20_000) as admin:
            admin.storage("detach")
        attached_again(two)
        assert fetch(other, "a").fetched == BLOCKS
        assert other.load("a", BLOCKS) == BLOCKS
        with connected(two) as third:
            assert third.scheduler.client.generation == cleared
        other.store("b", BLOCKS)
        backed_up(two, 2 * BLOCKS)
        with Admin.connect(two.run_dir, deadline_ms=20_000) as admin:
            admin.storage("detach")
        attached_again(one)
        assert fetch(engine, "b").fetched == BLOCKS


def test_weights_survive_a_reboot_with_their_generation(tmp_path: Path) -> None:
    """What was set is what the next life serves, though nothing but storage is left."""
    text = with_storage(tmp_path / "disk") + REPLICA
    with started(tmp_path, text) as daemon, Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        done = admin.set_weights("default", WEIGHTS)
        daemon.process.send_signal(signal.SIGKILL)
        daemon.process.wait()
    reboot(tmp_path)
    with started(tmp_path, text) as daemon, Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        (info,) = admin.describe().replicas
        assert (info.weights_version, info.generation, info.namespace) == (
            WEIGHTS, done.generation, done.namespace.hex(),
        )  # fmt: skip
