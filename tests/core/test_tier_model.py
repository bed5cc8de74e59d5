"""Long random histories of the tiers against the model."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.transfers import loads, stores
from tests.core.tier_model import TierDriver

STEPS_PER_SEED = 400
#: What a long history has seen, or the model proves less than it says.
SEEN = {
    "stored_blocks",
    "store_failed_blocks",
    "store_refused_blocks",
    "loaded_blocks",
    "load_failed_blocks",
    "joined_loads",
    "corrupt_blocks",
    "dropped_blocks",
    "demoted_blocks",
    "host_evicted_blocks",
    "host_dropped_blocks",
    "evicted_blocks",
    "workers_lost",
    "cleared_blocks",
    "sessions_expired",
}


@pytest.fixture(autouse=True, scope="module")
def small_transfers() -> Iterator[None]:
    """Few blocks a transfer, so that short prompts need several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stores, "STORE_BLOCKS_MAX", 3)
        patch.setattr(loads, "LOAD_BLOCKS_MAX", 2)
        yield


def play(seeds: range) -> tuple[Counter[str], set[str]]:
    """Play a history per seed to its end; what was counted in all of them, and the effects that were seen."""
    counted: Counter[str] = Counter()
    effects: set[str] = set()
    for seed in seeds:
        driver = TierDriver(random.Random(seed).randrange)
        for _ in range(STEPS_PER_SEED):
            driver.step()
        driver.end()
        counted += driver.cache.counters + driver.done
        effects |= driver.world.seen
    return counted, effects


@pytest.mark.parametrize("first", range(0, 12, 4))
def test_tiers_agree_with_the_model(first: int) -> None:
    """Whatever engines, copies and deaths do in whatever order: bytes, pins and books are right after every step."""
    play(range(first, first + 4))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiers_agree_with_the_model_over_long_histories() -> None:
    """The same for hundreds of histories, in which everything that the tiers count happens."""
    counted, effects = play(range(100, 300))

    assert {name for name, count in counted.items() if count} >= {*SEEN, "hits cut short", "commits cut short"}
    assert effects >= {"StartTransfer", "HurryTransfer", "AbandonLoad", "LoadsEnded", "SessionEnded", "SessionExpired"}


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tiers_agree_with_the_model_on_any_short_history(data: st.DataObject) -> None:
    """Any short history agrees with the model; a failing one is shrunk to its shortest form."""
    driver = TierDriver(lambda count: data.draw(st.integers(0, count - 1)))
    for _ in range(25):
        driver.step()
    driver.end()
