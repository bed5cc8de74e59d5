"""Long random histories against the dictionary model."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.model import Driver

SEEDS = range(10)
STEPS_PER_SEED = 10_500


@pytest.mark.parametrize("seed", SEEDS)
def test_cache_agrees_with_the_model_over_long_histories(seed: int) -> None:
    """Over 10^5 random operations in all, the cache does what plain dictionaries do, and every invariant holds."""
    driver = Driver(random.Random(seed).randrange)
    done: dict[str, int] = {}
    for _ in range(STEPS_PER_SEED):
        name = driver.step()
        done[name] = done.get(name, 0) + 1

    assert len(done) == 15
    assert min(done.values()) >= 5


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_cache_agrees_with_the_model_on_any_short_history(data: st.DataObject) -> None:
    """Any short history agrees with the model; a failing one is shrunk to its shortest form."""
    driver = Driver(lambda count: data.draw(st.integers(0, count - 1)))
    for _ in range(30):
        driver.step()
