"""Epochs of the daemons of a run directory, one after the other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from kvcached.recovery.run_dir import claim_run_dir
from kvcached.recovery.state_file import LEDGER_NAME, STOPPED_NAME, Ledger, LedgerFile, boot_id, has_stopped
from kvcached_client.transport.run_dir import LOCK_NAME

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
