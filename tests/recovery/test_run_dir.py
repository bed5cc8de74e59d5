"""The run directory: epochs of its daemons, one after the other, and its lock."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from kvcached.recovery.run_dir import RunDirUnusable, check_run_dir, claim_run_dir, is_claimed
from kvcached.recovery.state_file import LEDGER_NAME, STOPPED_NAME, Ledger, LedgerFile, boot_id, has_stopped
from kvcached_client.transport.run_dir import LOCK_NAME
from tests.recovery.test_supervise import NAMESPACE

HOUR_MS = 60 * 60 * 1000
WALL_MS, BOOT_MS = 1_700_000_000_000, 5 * HOUR_MS


class Clocks:
    """The wall clock, which people set, and the time since the machine's start."""

    def __init__(self, patch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.wall_ms, self.boot_ms = WALL_MS, BOOT_MS
        self.run_dir = run_dir
        patch.setattr(time, "time_ns", lambda: self.wall_ms * 1_000_000)
        patch.setattr(time, "clock_gettime_ns", lambda _: self.boot_ms * 1_000_000)

    def start(self) -> int:
        """The epoch of a daemon, which has ended."""
        epoch, held = claim_run_dir(self.run_dir)
        with held:
            return epoch

    def go_on(self, ms: int, *, wall_ms: int) -> None:
        self.boot_ms += ms
        self.wall_ms += wall_ms


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Clocks:
    return Clocks(monkeypatch, tmp_path / "run")


def test_epoch_is_the_time_of_the_start(clocks: Clocks) -> None:
    """Where nobody sets the clock."""
    assert clocks.start() == WALL_MS
    clocks.go_on(HOUR_MS, wall_ms=HOUR_MS)
    assert clocks.start() == WALL_MS + HOUR_MS + 1
    clocks.go_on(1000, wall_ms=1005)
    assert clocks.start() == WALL_MS + HOUR_MS + 1005


@pytest.mark.parametrize("back_ms", [1000, HOUR_MS, 30 * 24 * HOUR_MS])
def test_epochs_are_as_far_apart_as_the_starts(clocks: Clocks, back_ms: int) -> None:
    """Events are numbered from the epoch on, by time: those of the next daemon are larger than all of the last one."""
    before = clocks.start()
    for _ in range(3):
        clocks.go_on(2 * HOUR_MS, wall_ms=-back_ms)
        epoch = clocks.start()
        assert epoch > before + 2 * HOUR_MS
        before = epoch


@pytest.mark.parametrize("text", [f"{WALL_MS + HOUR_MS:<64}", f"{WALL_MS + HOUR_MS} {BOOT_MS + 1}"])
def test_life_of_unknown_length_counts_as_a_long_one(clocks: Clocks, text: str) -> None:
    """An older daemon has not written when it started, and one before a reboot has on another clock."""
    clocks.run_dir.mkdir(mode=0o700)
    (clocks.run_dir / LOCK_NAME).write_text(text)
    assert clocks.start() == WALL_MS + 25 * HOUR_MS
    clocks.wall_ms += 100 * HOUR_MS
    clocks.boot_ms = 0
    assert clocks.start() == WALL_MS + 100 * HOUR_MS


@pytest.mark.parametrize("text", ["x", "9" * 20, "12 x", "1 2" * 40])
def test_damaged_lock_file_is_replaced(clocks: Clocks, text: str, caplog: pytest.LogCaptureFixture) -> None:
    """The clock says the epoch then, and the log that the file was damaged."""
    clocks.run_dir.mkdir(mode=0o700)
    (clocks.run_dir / LOCK_NAME).write_text(text)
    assert clocks.start() == WALL_MS
    assert "is damaged" in caplog.text
    clocks.go_on(1000, wall_ms=-HOUR_MS)
    assert clocks.start() == WALL_MS + 1001


@pytest.mark.parametrize("text", [None, "", "0", "garbage"], ids=["missing", "empty", "zero", "damaged"])
def test_epoch_does_not_go_back_where_the_lock_file_has_none(clocks: Clocks, text: str | None) -> None:
    """The ledger says which epoch was before, though the clock was set back: no claim of before is of this daemon."""
    before = clocks.start()
    LedgerFile(clocks.run_dir / LEDGER_NAME).write(Ledger(boot=boot_id(), epoch=before))
    clocks.go_on(1000, wall_ms=-HOUR_MS)
    (clocks.run_dir / LOCK_NAME).unlink()
    if text is not None:
        (clocks.run_dir / LOCK_NAME).write_text(text)

    assert clocks.start() > before


def test_stop_in_order_is_told_of_the_daemon_that_wrote_the_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What another daemon has noted says nothing of it, nor does a link or an empty file."""
    noted, ledger = tmp_path / STOPPED_NAME, Ledger(boot=boot_id(), epoch=7)
    assert not has_stopped(tmp_path, ledger)
    LedgerFile(tmp_path / LEDGER_NAME).note_stop(7)
    assert has_stopped(tmp_path, ledger)
    LedgerFile(tmp_path / LEDGER_NAME).note_stop(78)
    assert not has_stopped(tmp_path, ledger)
    noted.write_text("")
    assert not has_stopped(tmp_path, ledger)
    assert caplog.messages == []
    (tmp_path / "other").write_text("7\n")
    noted.unlink()
    noted.symlink_to(tmp_path / "other")
    assert not has_stopped(tmp_path, ledger)
    assert [message.startswith(f"{noted} is not used: ") for message in caplog.messages] == [True]


LOOK = """
import os, sys
from pathlib import Path
from kvcached.recovery.run_dir import check_run_dir
check_run_dir(Path(sys.argv[1]), predecessor=os.getpid())
"""


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="this machine lets nobody make a pid namespace",
)
def test_lock_of_a_daemon_in_another_pid_namespace_is_seen(tmp_path: Path) -> None:
    """A daemon whose process a container cannot see keeps its run directory against the next daemon there."""

    def look() -> str:
        command = [*NAMESPACE, sys.executable, "-c", LOOK, str(tmp_path / "run")]
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=30).stderr

    with claim_run_dir(tmp_path / "run")[1]:
        assert f"another daemon runs in {tmp_path}/run; stop it, or choose another run_dir\n" in look()
    assert look() == ""


def test_look_at_the_lock_does_not_take_it(tmp_path: Path) -> None:
    """A daemon can claim its run directory whoever has looked at it before, and however long he keeps the file open."""
    run_dir = tmp_path / "run"
    claim_run_dir(run_dir)[1].__exit__(None, None, None)
    assert not is_claimed(run_dir)
    check_run_dir(run_dir, os.getpid())
    with claim_run_dir(run_dir)[1]:
        assert is_claimed(run_dir)
        check_run_dir(run_dir, os.getpid())


def test_start_waits_for_who_looks_at_the_lock(tmp_path: Path) -> None:
    """A look that meets the start of a daemon does not keep it out; another daemon does."""
    run_dir = tmp_path / "run"
    claim_run_dir(run_dir)[1].__exit__(None, None, None)
    lock = os.open(run_dir / LOCK_NAME, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        ends = threading.Timer(0.05, fcntl.flock, (lock, fcntl.LOCK_UN))
        ends.start()
        with claim_run_dir(run_dir)[1], pytest.raises(RunDirUnusable, match="another daemon runs in"):
            claim_run_dir(run_dir)
        ends.join()
    finally:
        os.close(lock)
