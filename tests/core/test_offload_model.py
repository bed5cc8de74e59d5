"""Long random histories of engines in offload mode against the model."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core.history import play, play_drawn
from tests.core.offload_drivers import MixedDriver, OffloadDriver

STEPS_PER_SEED = 400
#: What a long history has seen, or the model proves less than it says.
SEEN = {
    "stored_blocks",
    "store_failed_blocks",
    "store_refused_blocks",
    "loaded_blocks",
    "load_failed_blocks",
    "load_called_off_blocks",
    "host_hit_blocks",
    "corrupt_blocks",
    "corrupt while another reads",
    "cleared_blocks",
    "store for a cleared namespace",
    "healed holes",
    "host_evicted_blocks",
    "host_dropped_blocks",
    "sessions_expired",
    "scribbled",
    "namespace forgotten",
    "too many namespaces",
    *(
        f"refused: {code}"
        for code in ("hit_gone", "request_conflict", "session_expired", "already_released", "out_of_order")
    ),
}


@pytest.mark.parametrize("first", [0, pytest.param(4, marks=pytest.mark.full), pytest.param(8, marks=pytest.mark.full)])
def test_offload_mode_agrees_with_the_model(first: int) -> None:
    """Whatever engines and their shards do, a slot is one copy's until its end, and a load reads what was stored."""
    play(OffloadDriver, range(first, first + 4), STEPS_PER_SEED)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 3))])
def test_offload_mode_beside_device_pools_agrees_with_the_model(seed: int) -> None:
    """The same beside replicas on the same slabs, whose own model holds, too."""
    play(MixedDriver, range(seed, seed + 1), STEPS_PER_SEED)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_offload_mode_agrees_with_the_model_over_long_histories() -> None:
    """The same for more than a hundred histories, in which everything that can happen does."""
    counted = play(OffloadDriver, range(100, 250), STEPS_PER_SEED)

    assert {name for name, count in counted.items() if count} >= SEEN


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_mixed_engines_agree_with_the_models_over_long_histories() -> None:
    """The same for both kinds of engines together."""
    counted = play(MixedDriver, range(100, 140), STEPS_PER_SEED)

    assert {name for name, count in counted.items() if count} >= {
        *SEEN - {"namespace forgotten", "too many namespaces", "scribbled"},
        "demoted_blocks",
        "joined_loads",
        "workers_lost",
        "refused: paused",
    }


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_offload_mode_agrees_with_the_model_on_any_short_history(data: st.DataObject) -> None:
    """Any short history agrees with the model; a failing one is shrunk to its shortest form."""
    play_drawn(OffloadDriver, data, 30)
