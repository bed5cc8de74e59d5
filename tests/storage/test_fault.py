from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from kvcached.storage.backend import ABSENT, DONE, Outcome
from tests.storage.disks import opened, put, there
from tests.storage.fault import Fault, FaultSettings, FaultStorage
from tests.storage.values import TIMEOUT_S, asked, is_right, key, proves_itself, stored


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[FaultStorage]:
    """A disk with blocks 1 to 4 behind planned faults."""
    with opened(tmp_path / "d") as inner:
        put(inner, 1, 2, 3, 4)
        yield FaultStorage(inner)


@pytest.mark.parametrize("fault", [Fault.FLIP, Fault.TEAR, Fault.SWAP])
def test_spoiled_values_look_done_and_prove_nothing(storage: FaultStorage, fault: Fault) -> None:
    """A flipped bit, a torn value and another key's are told as DONE; only the frame shows it. Others are well."""
    storage.plan(None, fault)
    blocks = [asked(1), asked(2), asked(3)]

    assert storage.get(blocks, timeout_s=TIMEOUT_S) == [DONE] * 3

    assert [proves_itself(block, number) for number, block in enumerate(blocks, 1)] == [True, False, True]
    assert storage.injected == {fault: 1}


def test_swapped_value_is_a_whole_one_of_another_key(storage: FaultStorage) -> None:
    """What comes in another key's place is a value that was stored."""
    storage.plan(None, Fault.SWAP)
    blocks = [asked(1), asked(2)]
    storage.get(blocks, timeout_s=TIMEOUT_S)

    assert proves_itself(blocks[1], 1)


def test_lost_and_failed_blocks(storage: FaultStorage) -> None:
    """A block is absent though it is there, or fails; the next time it is read."""
    storage.plan(Fault.LOSE, Fault.FAIL)
    blocks = [asked(1), asked(2), asked(3)]

    assert [each.outcome for each in storage.get(blocks, timeout_s=TIMEOUT_S)] == [
        Outcome.ABSENT,
        Outcome.FAILED,
        Outcome.DONE,
    ]
    assert storage.get(blocks, timeout_s=TIMEOUT_S) == [DONE] * 3


def test_puts_that_are_not_kept(storage: FaultStorage) -> None:
    """A put is told as DONE and not kept, or fails; the others are kept."""
    storage.plan(Fault.LOSE, Fault.FAIL)

    results = storage.put([stored(5), stored(6), stored(7)], timeout_s=TIMEOUT_S)

    assert [each.outcome for each in results] == [Outcome.DONE, Outcome.FAILED, Outcome.DONE]
    assert there(storage, range(8)) == {1, 2, 3, 4, 7}


def test_exists_lies(storage: FaultStorage) -> None:
    """What is there is denied, and what is not there is claimed."""
    storage.plan(Fault.LIE, Fault.LIE)

    assert there(storage, range(2)) == {0}
    assert storage.get([asked(0)], timeout_s=TIMEOUT_S) == [ABSENT]


def test_calls_raise(storage: FaultStorage) -> None:
    """A whole call fails, and nothing of it is done."""
    storage.plan(Fault.RAISE)

    with pytest.raises(OSError, match="injected"):
        storage.delete([key(1)], timeout_s=TIMEOUT_S)

    assert there(storage, range(2)) == {1}


def test_hang_lasts_until_it_is_released(storage: FaultStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that hangs goes on when it is released, and is then as good as any."""
    reached, wait = threading.Event(), storage._released.wait

    def tell(timeout: float | None = None) -> bool:
        reached.set()
        return wait(timeout)

    monkeypatch.setattr(storage._released, "wait", tell)
    storage.plan(Fault.HANG)
    block, results = asked(1), []
    thread = threading.Thread(target=lambda: results.extend(storage.get([block], timeout_s=TIMEOUT_S)))
    thread.start()
    reached.wait()
    assert there(storage, range(3)) == {1, 2}  # other calls go on
    assert results == []
    storage.release()
    thread.join()

    assert results == [DONE]
    assert is_right(block, 1)


def test_delay_has_its_bounds(tmp_path: Path) -> None:
    """A delay takes at least what was set, and draws stay between that and the bound."""
    with opened(tmp_path / "d") as inner:
        storage = FaultStorage(inner, FaultSettings({Fault.DELAY: 1.0}, delay_s=0.05))
        began = time.monotonic()
        storage.clear(b"", timeout_s=TIMEOUT_S)
        assert time.monotonic() - began >= 0.05

        drawn = FaultStorage(inner, FaultSettings({}, delay_s=1.0, delay_p99_s=9.0))
        delays = sorted(drawn._delay_s() for _ in range(1000))
        assert 1.0 <= delays[0] < delays[500] < 4
        assert 6 < delays[980] <= delays[-1] == 9.0


def test_same_seed_same_faults(tmp_path: Path) -> None:
    """Two runs with one seed fail alike, at about the rates that were set; another seed fails differently."""

    def outcomes(seed: int) -> list[str]:
        faults = FaultSettings({Fault.FAIL: 0.2, Fault.LOSE: 0.1}, seed=seed)
        storage = FaultStorage(inner, faults)
        return [str(storage.get([asked(1)], timeout_s=TIMEOUT_S)[0].outcome) for _ in range(300)]

    with opened(tmp_path / "d") as inner:
        put(inner, 1)
        first = outcomes(1)

        assert first == outcomes(1)
        assert first != outcomes(2)
        assert 30 < first.count("failed") < 90
        assert 10 < first.count("absent") < 60


@pytest.mark.parametrize("rates", [{Fault.FLIP: -0.1}, {Fault.FLIP: 0.6, Fault.TEAR: 0.6}, {Fault.DELAY: 1.1}])
def test_impossible_rates_are_refused(rates: dict[Fault, float]) -> None:
    """Rates of calls, and of blocks, are probabilities."""
    with pytest.raises(ValueError, match="no probabilities"):
        FaultSettings(rates)


def test_settings_can_be_a_table() -> None:
    """Settings can be converted from a table of plain values."""
    settings = msgspec.convert({"rates": {"flip": 0.5}, "seed": 3, "delay_s": 0.1}, FaultSettings)

    assert settings == FaultSettings({Fault.FLIP: 0.5}, seed=3, delay_s=0.1)
