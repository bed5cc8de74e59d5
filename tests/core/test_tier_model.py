"""Long random histories of the tiers against the model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.transfers import loads, stores
from tests.core.history import play, play_drawn
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


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)])
def test_tiers_agree_with_the_model(first: int) -> None:
    """Whatever engines, copies and deaths do in whatever order: bytes, pins and books are right after every step."""
    play(TierDriver, range(first, first + 4), STEPS_PER_SEED)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_tiers_agree_with_the_model_over_long_histories() -> None:
    """The same for sixty histories, in which everything that the tiers count happens."""
    seen = play(TierDriver, range(100, 160), STEPS_PER_SEED)

    assert {name for name, count in seen.items() if count} >= {
        *SEEN, "hits cut short", "commits cut short",
        "StartTransfer", "HurryTransfer", "AbandonLoad", "LoadsEnded", "SessionEnded", "SessionExpired",
    }  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_tiers_agree_with_the_model_on_any_short_history(data: st.DataObject) -> None:
    """Any short history agrees with the model; a failing one is shrunk to its shortest form."""
    play_drawn(TierDriver, data, 25)
