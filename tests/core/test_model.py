"""Long random histories against the dictionary model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.history import play_drawn
from tests.core.model import Driver

SEEDS = range(10)
STEPS_PER_SEED = 10_500


@pytest.mark.full  # the default run plays short ones
@pytest.mark.parametrize("seed", SEEDS)
def test_cache_agrees_with_the_model_over_long_histories(seed: int) -> None:
    """Over 10^5 random operations in all, the cache does what plain dictionaries do, and every invariant holds."""
    driver = Driver(random.Random(seed).randrange)
    for _ in range(STEPS_PER_SEED):
        driver.step()
    done = driver.done.copy()
    driver.end()

    assert len(done) == 15
    assert min(done.values()) >= 5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cache_agrees_with_the_model_on_any_short_history(data: st.DataObject) -> None:
    """Any short history agrees with the model; a failing one is shrunk to its shortest form."""
    play_drawn(Driver, data, 30)
