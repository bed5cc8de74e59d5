"""Stock vLLM on memory of the daemon: killed at random instants, it comes back with its blocks and right answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.warm_loop import WarmLoop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KILLS = 6
#: Of computed blocks, how many the next engine finds.
SHARE_MIN = 0.95


def test_killed_engine_comes_back_warm(tmp_path: Path, models: Path) -> None:
    """All answers are stock vLLM's; at least 95 % of what was computed is found. Many more kills: see `kills`."""
    loop = WarmLoop(tmp_path, models / "model", seed=7)
    with loop.running(tmp_path):
        for number in range(KILLS):
            loop.kill_once(number)
        loop.finish()
        kept = loop.daemon.stats().engine_pools
    outcome = loop.outcome
    assert outcome.wrong == 0, outcome
    assert outcome.completed > 100, outcome
    assert outcome.share >= SHARE_MIN, outcome
    assert [pool.used for pool in kept] == [False, False]


def test_daemon_is_killed_between_engines(tmp_path: Path, models: Path) -> None:
    """A daemon that is killed, too, hands the memory to the next one: the engine after that finds its blocks."""
    loop = WarmLoop(tmp_path, models / "model", seed=8)
    with loop.running(tmp_path):
        loop.finish()
        before = loop.daemon.stats().engine_pools
        loop.daemon.kill()
        loop.daemon.start()
        assert loop.daemon.stats().engine_pools == before
        loop.finish()
    assert loop.outcome.wrong == 0
    assert loop.outcome.adopted > 300, loop.outcome
