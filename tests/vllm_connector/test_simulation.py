"""The scheduler's side and the link between a small vLLM and the daemon's own core, with everything going wrong."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.vllm_connector.mini_world import GroupsWorld, World


@pytest.mark.parametrize("seed", range(20))
def test_everything_goes_wrong(seed: int) -> None:
    """Outputs are as computed without a cache; every request ends; no block, lease, transfer or note is left behind."""
    World(seed).run()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_goes_wrong_often() -> None:
    """The same, from 200 other seeds."""
    for seed in range(1000, 1200):
        World(seed).run()


@pytest.mark.parametrize("seed", range(20))
def test_everything_goes_wrong_with_groups(seed: int) -> None:
    """The same with a sliding window beside full attention: also, nothing is read that has left the window."""
    GroupsWorld(seed).run()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_everything_goes_wrong_with_groups_often() -> None:
    """The same, from 200 other seeds; hits, failed loads and preemptions are among them."""
    seen: Counter[str] = Counter()
    for seed in range(2000, 2200):
        world = GroupsWorld(seed)
        world.run()
        seen += world.seen
        seen["loads failed"] += world.vllm.loads_failed
        seen["preemptions"] += world.vllm.preemptions
    assert min(seen[what] for what in ("loads", "loads failed", "preemptions", "resets")) > 100, seen
