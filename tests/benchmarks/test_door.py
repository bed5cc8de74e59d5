"""The suite door, with one hostile peer and little time."""

from __future__ import annotations

import pytest

from benchmarks.suites.door import LOCAL, TCP, measure
from tests.daemon import flooder, tcp_flooder


def test_every_hostile_peer_of_the_suite_is_one_of_the_flooders() -> None:
    """A kind that a flooder does not know would fail only when the suite is run."""
    assert set(LOCAL.values()) <= set(flooder.KINDS)
    assert set(TCP.values()) == set(tcp_flooder.KINDS)


def test_mutated_frames_are_many_and_differ() -> None:
    """What is sent as mutated frames is a thousand frames at a time, and never the same again."""
    one, other = flooder._mutated_frames(), flooder._mutated_frames()

    assert one != other
    assert len(one) == len(other)
    assert len(one) > 1000 * 20


@pytest.mark.slow
def test_a_hostile_machine_is_compared_with_the_same_loop_without_it() -> None:
    """One round beside strangers at the TCP port gives times, memory, log, and how many were refused."""
    results = {each.metric: each for each in measure(1, 0.5, {}, {"tcp_unknown_keys": TCP["tcp_unknown_keys"]})}

    assert results["tcp_unknown_keys_p99_ms"].floor == results["no_flood_p99_ms"].value
    assert results["tcp_unknown_keys_p99_ms"].target == "ratio <= 2"
    assert results["tcp_unknown_keys_refused"].value > 0
    assert results["rss_growth_mib"].ok
    assert results["log_bytes"].ok
