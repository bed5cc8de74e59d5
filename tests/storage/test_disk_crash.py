from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest

from kvcached.storage import disk_opening
from kvcached.storage.disk import DiskStorage
from kvcached.storage.disk_index import IndexDamaged
from kvcached.storage.interface import DONE, Outcome, Storage
from tests.project.source_tree import ROOT
from tests.storage.disks import flip, get, opened, put, restore, there
from tests.storage.putter import NUMBERS
from tests.storage.values import TIMEOUT_S, asked, is_right, key, proves_itself, stored

BLOCKS = range(60)
Answer = TypeVar("Answer")


def kill_while_putting(directory: Path, seed: int, batches: int) -> None:
    """Let a process store blocks, and kill it after so many batches."""
    command = [sys.executable, "-m", "tests.storage.putter", str(directory), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        for _ in range(batches):
            assert child.stdout.readline()
        child.kill()


@pytest.mark.parametrize("kills", [2, pytest.param(40, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_killed_process_leaves_no_wrong_bytes(tmp_path: Path, kills: int) -> None:
    """After a SIGKILL at any moment the directory opens at once, and each block is right or absent."""
    draw = random.Random(kills)
    for seed in range(kills):
        kill_while_putting(tmp_path / "d", seed, draw.randrange(1, 60))
        with opened(tmp_path / "d") as storage:
            outcomes = [get(storage, number).outcome for number in range(NUMBERS)]

            assert set(outcomes) <= {Outcome.DONE, Outcome.ABSENT}
            assert outcomes.count(Outcome.DONE) >= storage.usage().blocks * 0.9


def test_block_written_before_its_entry_is_found_when_the_index_is_made_anew(tmp_path: Path) -> None:
    """A directory whose index is gone gets a new one from its labels, with every block in it."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    (tmp_path / "d" / "index.db").unlink()

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)
        assert all(get(storage, number) == DONE for number in BLOCKS)


def test_deleted_blocks_stay_away_when_the_index_is_made_anew(tmp_path: Path) -> None:
    """What was deleted or cleared does not come back with a new index."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        storage.delete([key(number) for number in BLOCKS if number % 2], timeout_s=TIMEOUT_S)
    (tmp_path / "d" / "index.db").unlink()

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == {number for number in BLOCKS if number % 2 == 0}


def test_index_of_an_earlier_time_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An index that knows more blocks or fewer than the labels, by more than was in flight, is not believed."""
    monkeypatch.setattr(disk_opening, "_IN_FLIGHT_MAX", 8)
    with opened(tmp_path / "d") as storage:
        put(storage, *range(10))
    old = (tmp_path / "d" / "index.db").read_bytes()
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    (tmp_path / "d" / "index.db").write_bytes(old)

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)
    assert f"it has 10 blocks and the labels {len(BLOCKS)}" in caplog.text


def test_index_of_another_format_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that another program or version wrote in the index's place is replaced."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    (tmp_path / "d" / "index.db").write_bytes(b"another database" * 4096)

    with opened(tmp_path / "d") as storage:
        assert there(storage, BLOCKS) == set(BLOCKS)
    assert f"blocks: {len(BLOCKS)}, damaged labels: 0" in caplog.text


@pytest.mark.parametrize("trials", [10, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_damaged_index_leads_to_no_wrong_bytes(tmp_path: Path, trials: int) -> None:
    """Wherever the index is cut or changed, it is made anew or does no harm: a block is right or absent."""
    draw, index = random.Random(trials), tmp_path / "d" / "index.db"
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
    whole = index.read_bytes()
    found = kept = 0
    for trial in range(trials):
        index.write_bytes(whole)
        if trial % 2:
            index.write_bytes(whole[: draw.randrange(len(whole))])
        else:
            for _ in range(draw.choice([1, 10, 1000])):
                flip(index, draw)
        with opened(tmp_path / "d") as storage:
            for number in BLOCKS:
                found += twice(storage, partial(get, storage, number)) == DONE

        with opened(tmp_path / "d") as storage:
            twice(storage, lambda: put(storage, *BLOCKS))
            kept += len(twice(storage, lambda: there(storage, BLOCKS)))
    assert found > trials * len(BLOCKS) * 0.8
    assert kept > trials * len(BLOCKS) * 0.95


def twice(storage: DiskStorage, call: Callable[[], Answer]) -> Answer:
    """Call again if the call has come across damage: then there is a new index."""
    try:
        return call()
    except IndexDamaged:
        storage.wait_until_ready(TIMEOUT_S)
        return call()


def test_index_that_is_damaged_while_open_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The call that comes across the damage fails; the next one finds every block."""
    with opened(tmp_path / "d") as storage:
        put(storage, *BLOCKS)
        storage._catalog._index._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        storage._catalog._index._database.execute("PRAGMA cache_size = 0")
        storage._catalog._index._database.execute("PRAGMA shrink_memory")
        index = tmp_path / "d" / "index.db"
        with index.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (index.stat().st_size - 4096))

        with pytest.raises(IndexDamaged):
            storage.get([asked(number) for number in BLOCKS], timeout_s=TIMEOUT_S)
        storage.wait_until_ready(TIMEOUT_S)

        assert all(get(storage, number) == DONE for number in BLOCKS)
    assert "made a new index" in caplog.text


@pytest.mark.parametrize("trials", [1000, pytest.param(100_000, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_changed_byte_of_a_value_is_never_served(tmp_path: Path, trials: int) -> None:
    """Whichever byte of a slot changes, the frame tells."""
    draw, served = random.Random(1), 0
    parts = {number: [bytes(part) for part in stored(number).parts[1:]] for number in (1, 2)}
    with opened(tmp_path / "d", capacity_bytes=8 << 20) as storage:
        put(storage, 1, 2)
        (slots,) = (tmp_path / "d").glob("*.slots")
        for _ in range(trials):
            number = draw.choice([1, 2])
            where = flip(slots, draw, (number - 1) * 20480 + draw.randrange(20480))
            block = asked(number)
            (result,) = storage.get([block], timeout_s=TIMEOUT_S)
            if result == DONE and proves_itself(block, number):
                served += [bytes(part) for part in block.parts[1:]] != parts[number]
            restore(slots, *where)

    assert served == 0


@pytest.mark.parametrize("first", [0, 4096, 12288])
def test_value_that_never_reached_the_disk_proves_nothing(tmp_path: Path, first: int) -> None:
    """Label and index are there and bytes of the value are not, as after a loss of power: its frame tells."""
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
    (slots,) = (tmp_path / "d").glob("*.slots")
    with slots.open("r+b") as file:
        file.seek(first)
        file.write(bytes(4096))

    with opened(tmp_path / "d") as storage:
        block = asked(1)
        assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
        assert not proves_itself(block, 1)


def test_changed_label_is_never_believed(tmp_path: Path) -> None:
    """Whichever byte of a label changes, its block is absent; a new index does not have it, and its slot is free."""
    draw = random.Random(2)
    for trial in range(64):
        with opened(tmp_path / "d") as storage:
            storage.clear(b"", timeout_s=TIMEOUT_S)
            put(storage, 1, 2)
        (labels,) = (tmp_path / "d").glob("*.labels")
        flip(labels, draw, trial)
        if trial % 2:
            (tmp_path / "d" / "index.db").unlink()

        with opened(tmp_path / "d") as storage:
            assert storage.usage().blocks == (1 if trial % 2 else 2)
            assert get(storage, 1).outcome is Outcome.ABSENT
            assert get(storage, 2) == DONE
            assert put(storage, 1) == [Outcome.DONE]


@pytest.mark.parametrize("trials", [8, pytest.param(100, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_cut_files_lead_to_no_wrong_bytes(tmp_path: Path, trials: int) -> None:
    """Wherever a file of slots or labels is cut, while it is open or before, each block is right or absent."""
    draw = random.Random(3)
    for trial in range(trials):
        with opened(tmp_path / "d") as storage:
            storage.clear(b"", timeout_s=TIMEOUT_S)
            put(storage, *BLOCKS)
            if trial % 2:
                cut(tmp_path / "d", draw)
                assert all_right_or_absent(storage)
        cut(tmp_path / "d", draw)

        with opened(tmp_path / "d") as storage:
            assert all_right_or_absent(storage)
            assert put(storage, *BLOCKS) == [Outcome.DONE] * len(BLOCKS)
            assert all_right_or_absent(storage)


def cut(directory: Path, draw: random.Random) -> None:
    path = draw.choice([*directory.glob("*.slots"), *directory.glob("*.labels")])
    with path.open("r+b") as file:
        file.truncate(draw.randrange(path.stat().st_size + 1))


def all_right_or_absent(storage: Storage) -> bool:
    blocks = [asked(number) for number in BLOCKS]
    results = storage.get(blocks, timeout_s=TIMEOUT_S)
    return all(
        result.outcome is Outcome.ABSENT
        or (result == DONE and (is_right(block, number) or not proves_itself(block, number)))
        for block, number, result in zip(blocks, BLOCKS, results, strict=True)
    )
