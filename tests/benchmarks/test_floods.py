"""The suite floods, with one flood and little time."""

from __future__ import annotations

import pytest

from benchmarks.suites.floods import FLOODS, measure
from tests.daemon.flooder import KINDS


def test_every_flood_of_the_suite_is_one_of_the_flooder() -> None:
    """A kind that the flooder does not know would fail only when the suite is run."""
    assert set(FLOODS.values()) <= set(KINDS)


@pytest.mark.slow
def test_a_flood_is_compared_with_the_same_loop_without_it() -> None:
    """One round gives times with their floors, and the promises about time, memory and log."""
    results = {each.metric: each for each in measure(1, 0.2, {"unread_replies": FLOODS["unread_replies"]})}

    quiet, flooded = results["no_flood_p99_ms"], results["unread_replies_p99_ms"]
    assert flooded.floor == quiet.value
    assert 0 < results["no_flood_p50_ms"].value <= quiet.value
    assert {name: each.target for name, each in results.items() if each.target} == {
        "unread_replies_p99_ms": "ratio <= 2",
        "unread_replies_rss_growth_mib": "value <= 32",
        "unread_replies_log_bytes": "value <= 65536",
        "rss_growth_mib": "value <= 32",
        "log_bytes": "value <= 65536",
    }
    assert results["busy_neighbour_p99_ms"].target is None
    assert results["rss_growth_mib"].ok
    assert results["log_bytes"].ok
    assert results["log_bytes"].value > 0
