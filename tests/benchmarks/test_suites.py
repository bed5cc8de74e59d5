"""The suites of index and rpc, as far as they can be run in little time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import turns_rig
from benchmarks.__main__ import main
from benchmarks.result import Result
from benchmarks.shapes import ADVERSARIAL, CHAT, LONG_PROMPT_BLOCKS, TRACE, Shape
from benchmarks.suites import index, looking, request

_PROMISED = {"match_128k_{}_us", "bytes_per_block_{}", "request_8k_{}_us", "evict_8192_{}_us"}
_WITH_HOST = {"match_128k_{}_host_us", "bytes_per_block_{}_write_through", "request_8k_{}_write_through_us"}
_FIELDS = ["suite", "metric", "value", "unit", "floor", "ratio", "target", "ok"]


def _lines(output: str) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines()]
    assert all(list(line) == _FIELDS for line in lines)
    return {line["metric"]: line for line in lines}


@pytest.mark.parametrize(
    ("shape", "promised"),
    [
        (TRACE, _PROMISED),
        pytest.param(CHAT, _PROMISED, marks=pytest.mark.slow),
        # It fills a cache that is made to be slow to fill, beside another test.
        pytest.param(ADVERSARIAL, {"match_128k_{}_us"}, marks=[pytest.mark.slow, pytest.mark.timeout(240)]),
    ],
)
def test_index_suite_has_every_promised_metric(
    shape: Shape, promised: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small caches, a shape gives its metrics, with a target where one was promised and a floor under each time."""
    monkeypatch.setattr(index, "_SLOTS", 30_000)
    monkeypatch.setattr(index, "_EVICTED_BLOCKS", 500)
    _check(index._measure(_shortened(shape, 700, monkeypatch), 10), shape, promised)


@pytest.mark.parametrize(
    ("shape", "prompts", "unpromised"),
    [
        (TRACE, 250, {"request_8k_{}_load_us", "loaded_blocks_{}"}),
        pytest.param(CHAT, 700, set(), marks=pytest.mark.slow),
    ],
)
def test_index_suite_has_every_metric_of_the_host_tier(
    shape: Shape, prompts: int, unpromised: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On small caches, a shape gives its metrics with both tiers full, and loads find next to whole prompts there."""
    monkeypatch.setattr(index, "_SLOTS", 60_000)
    monkeypatch.setattr(index, "_DEVICE_SLOTS", 30_000)
    results = _check(index._measure_write_through(_shortened(shape, prompts, monkeypatch), 10), shape, _WITH_HOST)
    names = {"ranges_per_grant_{}_write_through", *_WITH_HOST, *unpromised}
    assert set(results) == {name.format(shape.name) for name in names}
    if unpromised:
        assert results[f"loaded_blocks_{shape.name}"].value >= 480


@pytest.mark.slow
def test_index_suite_measures_a_prompt_with_a_branch_at_each_block() -> None:
    """The deepest path has a run for each block, and its request and the one beside it have targets."""
    results = {result.metric: result for result in index._measure_branched(10)}
    assert results["runs_on_path_branched"].value == LONG_PROMPT_BLOCKS
    judged = {name for name, result in results.items() if result.target}
    assert judged == {"request_128k_branched_us", "request_8k_beside_branched_over_alone"}
    assert results["request_128k_branched_us"].floor is not None


def _shortened(shape: Shape, prompts: int, monkeypatch: pytest.MonkeyPatch) -> Shape:
    """A shape of few prompts, for a suite with small caches."""
    monkeypatch.setattr(index, "_MATCH_SECONDS", 0.1)
    paths = shape.paths()[-prompts:]
    return replace(shape, paths=lambda: paths)


def _check(results: Iterable[Result], shape: Shape, promised: set[str]) -> dict[str, Result]:
    by_name = {result.metric: result for result in results}
    assert {name for name, result in by_name.items() if result.target} == {name.format(shape.name) for name in promised}
    assert all((result.floor is not None) == name.endswith("_us") for name, result in by_name.items())
    return by_name


def test_rpc_suite_measures_a_real_daemon(capsys: pytest.CaptureFixture[str]) -> None:
    """The suite starts a daemon and an echo, and prints the ratio with its spread and the times that it comes from."""
    main(["rpc", "--json", "--rounds", "10"])
    lines = _lines(capsys.readouterr().out)
    assert lines["acquire_over_echo_ratio"]["target"] == "value <= 1.6"
    for case in ("acquire", "wire"):
        low, middle, high = (lines[f"{case}_over_echo{part}_ratio"]["value"] for part in ("_p10", "", "_p90"))
        assert low <= middle <= high
    assert {name for name in lines if re.fullmatch(r"\w+_us", name)} == {"acquire_us", "echo_us", "wire_us"}


def test_events_suite_measures_two_daemons(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each case has the ratio of a daemon with subscribers to one without, with its spread, and of processor time."""
    monkeypatch.setattr(turns_rig, "PAIRS_PER_ROUND", 1)
    main(["events", "--json", "--rounds", "10"])
    lines = _lines(capsys.readouterr().out)
    assert lines["cached_ratio"]["target"] == "value <= 1.02"
    for case in ("cached", "half", "new"):
        assert (
            lines[f"{case}_p10_ratio"]["value"]
            <= lines[f"{case}_ratio"]["value"]
            <= lines[f"{case}_p90_ratio"]["value"]
        )
        assert lines[f"{case}_us"]["value"] > 0


def test_looking_suite_measures_a_daemon_at_which_everybody_looks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks and whoever has stalled each have their ratio, with its interval."""
    monkeypatch.setattr(turns_rig, "PAIRS_PER_ROUND", 1)
    monkeypatch.setattr(looking, "_IDLE_S", 0.5)
    main(["looking", "--json", "--rounds", "10"])
    lines = _lines(capsys.readouterr().out)
    assert lines["looked_processor_share"]["target"] == "value <= 0.01"
    for case in ("looked", "stalled"):
        assert lines[f"{case}_ratio"]["target"] == "value <= 1.01"
        low, middle, high = (lines[f"{case}{part}_ratio"]["value"] for part in ("_low", "", "_high"))
        assert low <= middle <= high


def test_request_suite_measures_whole_requests(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each case has a ratio to its echo, its messages counted, and processor time of both ends."""
    monkeypatch.setattr(request, "_WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(request, "_STEP_REQUESTS", 8)
    monkeypatch.setattr(request, "_MANY_SLOTS", 20_000)
    main(["request", "--json", "--rounds", "10"])
    lines = _lines(capsys.readouterr().out)
    calls = {name.removesuffix("_calls"): line["value"] for name, line in lines.items() if name.endswith("_calls")}
    assert calls == {
        "short_managed": 2,
        "8k_managed": 2,
        "short_managed_batched": 2,
        "64_commits": 8,
        "64_commits_batched": 8,
        "128k_match": 1,
        "128k_turn": 2,
        "short_offload_miss": 2,
        "short_offload": 5,
        "8k_offload": 5,
        "short_offload_pipelined": 5,
    }
    for case in calls:
        assert 0 < lines[f"{case}_over_echo_ratio"]["value"] <= lines[f"{case}_over_echo_median_ratio"]["value"]
        assert lines[f"{case}_client_cpu_us"]["value"] > 0
        assert lines[f"{case}_daemon_cpu_us"]["value"] > 0
    sized = {name for name, line in lines.items() if line["target"] == "value <= 1.3"}
    assert sized == {f"{case}_1m_over_10k_ratio" for case in ("short_managed", "8k_managed", "128k_turn")}
