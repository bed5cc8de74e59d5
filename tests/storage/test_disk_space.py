from __future__ import annotations

import errno
import logging
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from kvcached.storage.backend import Outcome
from kvcached.storage.disk import catalog as disk_catalog
from tests.storage.disks import MIB, VALUE_BYTES, get, opened, put, size_on_disk, there
from tests.storage.values import TIMEOUT_S, asked, is_right, key, kind, stored


def file_system(free_bytes: int) -> SimpleNamespace:
    """What statvfs tells of a file system with so much room."""
    return SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096)


def test_capacity_is_never_exceeded(tmp_path: Path) -> None:
    """However much is put, the files take no more of the file system than the capacity."""
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        for number in range(400):
            assert put(storage, number) == [Outcome.DONE]
            assert size_on_disk(tmp_path / "d") <= 4 * MIB

        usage = storage.usage()
        assert usage.capacity_bytes == 4 * MIB
        assert usage.size_bytes == usage.blocks * VALUE_BYTES <= 2 * MIB
        assert usage.blocks > 80


def test_least_recently_used_blocks_make_room(tmp_path: Path) -> None:
    """Blocks that were read stay, those that nobody asked for go, in the order of their last use."""
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(200))
        capacity = storage.usage().blocks
        storage.clear(b"", timeout_s=TIMEOUT_S)
        put(storage, *range(capacity))
        get(storage, 0)
        get(storage, 2)

        put(storage, *range(1000, 1000 + capacity - 2))

        assert there(storage, range(capacity)) == {0, 2}


def test_uses_are_known_after_a_restart(tmp_path: Path) -> None:
    """A block that was read before the backend was closed stays longer than one stored later."""
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(60))
        get(storage, 0)
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(100, 180))

        left = there(storage, range(60))
        assert 0 in left
        assert left <= {0, *range(30, 60)}


def test_clock_that_is_set_back_does_not_make_new_blocks_old(tmp_path: Path) -> None:
    """Blocks are evicted in the order of their last use, even if that seems to have been before they were stored."""
    now = [10**18]
    with opened(tmp_path / "d", clock=lambda: now[0], capacity_bytes=4 * MIB) as storage:
        put(storage, *range(200))
        capacity = storage.usage().blocks
        storage.clear(b"", timeout_s=TIMEOUT_S)
        put(storage, *range(capacity))
        now[0] -= 86_400 * 10**9
        get(storage, 0)
        put(storage, *range(1000, 1020))
        assert there(storage, range(30)) == {0, *range(21, 30)}
        assert len(there(storage, range(1000, 1020))) == 20

    with opened(tmp_path / "d", clock=lambda: now[0], capacity_bytes=4 * MIB) as storage:
        put(storage, *range(2000, 2010))
        assert len(there(storage, range(1000, 1020))) == 20
        assert there(storage, range(40)) == {0, *range(31, 40)}


def test_files_know_their_uses_after_a_restart(tmp_path: Path) -> None:
    """Of two sizes the one whose blocks were read last stays, though they were stored before the other's."""
    large = kind(part_bytes=65536)
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        storage.put([stored(2, large)], timeout_s=TIMEOUT_S)
        get(storage, 1)
    with opened(tmp_path / "d") as storage:
        huge = kind(part_bytes=131072)
        storage.put([stored(number, huge) for number in range(5)], timeout_s=TIMEOUT_S)

        assert there(storage, range(3)) == {1}
        assert storage.exists([key(2, large)], timeout_s=TIMEOUT_S) == [False]


def test_blocks_of_another_size_get_room(tmp_path: Path) -> None:
    """Where older blocks of another size fill the capacity, a file of theirs goes."""
    large = kind(part_bytes=65536)
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(200))

        results = storage.put([stored(1, large)], timeout_s=TIMEOUT_S)

        assert results[0].outcome is Outcome.DONE
        block = asked(1, large)
        assert storage.get([block], timeout_s=TIMEOUT_S)[0].outcome is Outcome.DONE
        assert is_right(block, 1, large)
        assert size_on_disk(tmp_path / "d") <= 4 * MIB
        assert there(storage, range(200))


def test_value_larger_than_the_capacity_is_refused(tmp_path: Path) -> None:
    """A value that could never fit is FULL, and nothing makes room for it."""
    huge = kind(part_bytes=MIB)
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, 1)

        assert storage.put([stored(1, huge)], timeout_s=TIMEOUT_S)[0].outcome is Outcome.FULL
        assert there(storage, range(2)) == {1}


def test_smaller_capacity_takes_effect_at_the_start(tmp_path: Path) -> None:
    """A directory that holds more than it may gives files back when it is opened."""
    with opened(tmp_path / "d", capacity_bytes=8 * MIB) as storage:
        put(storage, *range(300))

    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        assert size_on_disk(tmp_path / "d") <= 4 * MIB
        assert there(storage, range(300))


def test_floor_frees_space_first_and_then_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Below the floor files are given back and puts are FULL; what is left can be read; above it all is well again."""
    with opened(tmp_path / "d", free_space_floor_bytes=10 * MIB) as storage:
        put(storage, *range(150))
        before = size_on_disk(tmp_path / "d")
        monkeypatch.setattr(os, "statvfs", lambda _: file_system(10 * MIB - 4096))

        assert put(storage, 1000) == [Outcome.FULL]

        assert size_on_disk(tmp_path / "d") < before
        left = there(storage, range(150))
        assert left
        assert get(storage, max(left)).outcome is Outcome.DONE
        monkeypatch.setattr(os, "statvfs", lambda _: file_system(100 * MIB))
        assert put(storage, 1000) == [Outcome.DONE]


def test_no_file_is_made_below_the_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new file has to leave the floor free: where it cannot, the first value is FULL."""
    with opened(tmp_path / "d", free_space_floor_bytes=10 * MIB) as storage:
        monkeypatch.setattr(os, "statvfs", lambda _: file_system(10 * MIB + 8192))

        assert put(storage, 1) == [Outcome.FULL]
        assert list((tmp_path / "d").glob("*.slots")) == []


@pytest.mark.parametrize("reason", ["floor", "limit"])
def test_block_that_is_not_taken_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: str) -> None:
    """A put that is FULL names what is in its way: the floor of the settings, or what the file system says."""

    def limited(*_: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    floor = 1 << 49 if reason == "floor" else 0
    monkeypatch.setattr(os, "posix_fallocate", limited)
    with opened(tmp_path / "d", free_space_floor_bytes=floor) as storage:
        (result,) = storage.put([stored(1)], timeout_s=TIMEOUT_S)

    assert result.outcome is Outcome.FULL
    assert ("free_space_floor_bytes" if floor else "File too large") in result.detail


@pytest.mark.parametrize("number", [errno.EFBIG, errno.EMFILE, errno.EACCES])
def test_file_that_no_room_would_help_costs_no_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A limit of sizes or of open files, or missing rights: blocks of other sizes stay, which would make room in vain.

    Blocks of a size that has its files take each other's place as before.
    """

    def limited(*_: int) -> None:
        raise OSError(number, os.strerror(number))

    large = kind(part_bytes=65536)
    with opened(tmp_path / "d", capacity_bytes=4 * MIB) as storage:
        put(storage, *range(20))
        monkeypatch.setattr(os, "posix_fallocate", limited)
        (result,) = storage.put([stored(1, large)], timeout_s=TIMEOUT_S)

        assert (result.outcome, os.strerror(number) in result.detail) == (Outcome.FULL, True)
        assert there(storage, range(20)) == set(range(20))
        assert [put(storage, number) for number in range(100, 150)] == [[Outcome.DONE]] * 50


def test_full_file_system_refuses_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where no space can be reserved, a put is FULL, nothing is left behind, and later ones succeed."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with opened(tmp_path / "d") as storage:
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(os, "posix_fallocate", full)
            assert put(storage, 1) == [Outcome.FULL]
            assert put(storage, 2) == [Outcome.FULL]
        assert caplog.text.count("No space left on device") == 1
        assert [*(tmp_path / "d").glob("*.slots"), *(tmp_path / "d").glob("*.labels")] == []
        assert put(storage, 1) == [Outcome.DONE]


@pytest.mark.parametrize(
    ("number", "outcome"), [(errno.ENOSPC, Outcome.FULL), (errno.EDQUOT, Outcome.FULL), (errno.EIO, Outcome.FAILED)]
)
def test_failed_write_concerns_its_block_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, outcome: Outcome
) -> None:
    """A write that the device refuses is FULL or FAILED; the others of the batch are stored; the slot is free again."""
    write, calls = os.pwritev, []

    def refuse_second(descriptor: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(number, os.strerror(number))
        return write(descriptor, parts, offset)

    with opened(tmp_path / "d") as storage:
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", refuse_second)
            assert put(storage, 1, 2, 3) == [Outcome.DONE, outcome, Outcome.DONE]

        assert there(storage, range(5)) == {1, 3}
        assert storage.usage().blocks == 2
        assert put(storage, 2) == [Outcome.DONE]
        assert get(storage, 2).outcome is Outcome.DONE


def test_failed_read_concerns_its_block_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that cannot be read is FAILED, with the reason, and forgotten; the others are read."""
    read, calls = os.preadv, []

    def refuse_second(descriptor: int, parts: list[memoryview], offset: int) -> int:
        calls.append(offset)
        if len(calls) == 2:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read(descriptor, parts, offset)

    with opened(tmp_path / "d") as storage:
        put(storage, 1, 2, 3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", refuse_second)
            results = storage.get([asked(1), asked(2), asked(3)], timeout_s=TIMEOUT_S)

        assert [each.outcome for each in results] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
        assert "Input/output error" in results[1].detail
        assert there(storage, range(5)) == {1, 3}


def test_blocks_expire(tmp_path: Path) -> None:
    """After its time a block is absent, and its slot is free without anybody asking for it."""
    now = [10**18]
    with opened(tmp_path / "d", clock=lambda: now[0], ttl_s=100) as storage:
        put(storage, 1, 2)
        now[0] += 60 * 10**9
        put(storage, 3)
        now[0] += 50 * 10**9

        assert there(storage, range(5)) == {3}
        assert get(storage, 1).outcome is Outcome.ABSENT
        now[0] += 100 * 10**9
        put(storage, 4)
        assert storage.usage().blocks == 1


def test_blocks_that_expire_all_the_time_cost_few_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block is written and one expires each second: a put looks through the index each 16th of the time to live."""
    now = [10**18]
    with opened(tmp_path / "d", clock=lambda: now[0], ttl_s=160, capacity_bytes=32 * MIB) as storage:
        scans = Mock(wraps=storage._catalog._index.stored_before)
        monkeypatch.setattr(storage._catalog._index, "stored_before", scans)
        for number in range(480):
            now[0] += 10**9
            put(storage, number)

        assert scans.call_count <= 480 // 10 + 1
        assert storage.usage().blocks <= 160 + 10


def test_blocks_expire_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where very many have expired at once no put forgets all of them: each of the next ones does its share."""
    monkeypatch.setattr(disk_catalog, "_EXPIRED_AT_A_TIME", 8)
    now = [10**18]
    with opened(tmp_path / "d", clock=lambda: now[0], ttl_s=100) as storage:
        put(storage, *range(20))
        now[0] += 200 * 10**9
        left = []
        for number in range(100, 105):
            put(storage, number)
            left.append(storage.usage().blocks)

    assert left == [13, 6, 3, 4, 5]
