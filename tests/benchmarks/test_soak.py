"""The soak: what counts as growth, and a short one with a real daemon."""

from __future__ import annotations

import pytest

from benchmarks.soak_command import INTERVALS, Interval, Options, results, run


def intervals(memory: list[int], descriptors: list[int], over_echo: list[float]) -> list[Interval]:
    """Four quarters with these figures."""
    quarters = zip(memory, descriptors, over_echo, strict=True)
    return [
        Interval(size, open_files, 7, [ratio]) for size, open_files, ratio in quarters for _ in range(INTERVALS // 4)
    ]


@pytest.mark.parametrize(
    ("memory", "descriptors", "over_echo", "grown"),
    [
        ([10, 100, 100, 100], [3, 9, 9, 9], [40.0, 20.0, 20.0, 20.0], set()),
        ([100, 100, 102, 104], [9] * 4, [20.0] * 4, {"memory"}),
        ([100] * 4, [9, 9, 9, 10], [20.0] * 4, {"more_descriptors"}),
        ([100] * 4, [9] * 4, [20.0, 20.0, 24.0, 27.0], {"round_over_echo"}),
        ([100, 100, 90, 80], [9, 9, 8, 8], [20.0, 20.0, 15.0, 10.0], set()),
    ],
)
def test_what_the_last_quarter_has_more_than_the_second_is_told(
    memory: list[int], descriptors: list[int], over_echo: list[float], grown: set[str]
) -> None:
    """Growth of memory, descriptors or times is told; what the first quarter needed to begin with is not growth."""
    told = list(results(intervals(memory, descriptors, over_echo)))
    assert {each.metric for each in told if each.ok is False} == grown
    assert [each.metric for each in told] == ["memory", "more_descriptors", "more_threads", "round_over_echo", "rounds"]


def test_a_short_soak_works_and_tells_all_figures() -> None:
    """Each interval has rounds of both engines, whose bytes are compared, and figures of the daemon's processes."""
    told = {each.metric: each.value for each in run(Options(minutes=0.02, json=True))}
    assert told["rounds"] >= INTERVALS
    assert told["memory"] > 10_000_000
    assert told["round_over_echo"] > 1
