"""Scheduling decisions, with a runner that computes nothing."""

from __future__ import annotations

from typing import cast

import pytest

from examples.llama_engine.cache import Cache
from examples.llama_engine.config import Limits
from examples.llama_engine.generation import GenerationRequest, InvalidRequest
from examples.llama_engine.scheduler import Scheduler
from kvcached_client.blocks.layout import KvGroup, Layout
from tests.engine.counting_runner import CountingRunner, drain, request
from tests.engine.fake_host import FakeHost
from tests.engine.fakes import FakeClient

LAYOUT = Layout(
    block_size=4, shards=1, groups=(KvGroup(layers=1, kv_heads=1, head_dim=2, v_head_dim=2, dtype="float32"),)
)


def start(slots: int = 64, host: FakeHost | None = None, **limits: int) -> tuple[FakeClient, CountingRunner, Scheduler]:
    client, runner = FakeClient(LAYOUT, slots, host), CountingRunner()
    chosen = Limits(**{"chunk_tokens": 8, "step_tokens": 16, "running_max": 4, **limits})
    return client, runner, Scheduler(cast("Cache", client), runner, chosen)


def test_prefill_chunks_end_on_absolute_multiples() -> None:
    """After a hit that ends inside a chunk the next chunk ends where a cold run's chunk would have ended."""
    client, runner, scheduler = start()
    scheduler.submit(request(12, max_tokens=1))
    scheduler.submit(request(20, max_tokens=1))
    drain(scheduler)
    assert runner.steps[:2] == [[(0, 8), (0, 8)], [(8, 12), (8, 16)]]
    scheduler.submit(request(13, max_tokens=1))
    runner.steps.clear()
    (result,) = drain(scheduler)
    assert result.hit_tokens == 12
    assert runner.steps == [[(12, 13)]]
    scheduler.submit(request(7, max_tokens=1))
    scheduler.submit(GenerationRequest(prompt=[*range(6), *range(50, 63)], max_tokens=1))
    runner.steps.clear()
    results = drain(scheduler)
    assert [result.hit_tokens for result in results] == [4, 4]
    assert runner.steps == [[(4, 7), (4, 8)], [(8, 16)], [(16, 19)]]
    client.check_all_returned()


def test_decode_rows_go_first_and_prefills_share_what_is_left() -> None:
    """A long prompt that arrives does not delay the tokens of a running request."""
    _, runner, scheduler = start()
    scheduler.submit(request(3, max_tokens=5))
    scheduler.step()
    scheduler.submit(request(40, first=100, max_tokens=1))
    scheduler.submit(request(40, first=200, max_tokens=1))
    scheduler.step()
    assert runner.steps[-1] == [(3, 4), (0, 8)]
    drain(scheduler)


def test_blocks_are_committed_as_they_fill_and_once_at_the_end() -> None:
    """Each chunk and each block filled while decoding is committed at once, slots are allocated as they are needed."""
    client, _, scheduler = start()
    scheduler.submit(request(10, max_tokens=8))
    drain(scheduler)
    assert client.calls == [
        "acquire request-1", "commit request-1 2", "commit request-1 3", "allocate request-1 13",
        "commit request-1 4", "allocate request-1 17", "release request-1",
    ]  # fmt: skip
    client.check_all_returned()


@pytest.mark.parametrize(("cache", "hit"), [("all", 20), ("prompt", 12), ("nothing", 0)])
def test_cache_policy_decides_what_a_follow_up_finds(cache: str, hit: int) -> None:
    """A follow-up on prompt and answer hits what the first request's policy kept: both, the prompt, or nothing."""
    client, _, scheduler = start()
    scheduler.submit(request(14, max_tokens=8, cache=cache))
    (first,) = drain(scheduler)
    scheduler.submit(GenerationRequest(prompt=[*range(14), *first.tokens], max_tokens=1))
    (second,) = drain(scheduler)
    assert second.hit_tokens == hit
    client.check_all_returned()


def test_no_capacity_waits_for_a_release_and_asks_once() -> None:
    """A request that finds the pool full is asked for again when a lease has been released, not every step."""
    client, _, scheduler = start(slots=6)
    scheduler.submit(request(16, max_tokens=6))
    scheduler.submit(request(16, first=100, max_tokens=1))
    results = drain(scheduler)
    assert [result.name for result in results] == ["request-1", "request-2"]
    assert [len(result.tokens) for result in results] == [6, 1]
    assert client.calls.count("acquire request-2") == 2
    refused = client.calls.index("acquire request-2")
    assert client.calls.index("release request-1") < client.calls.index("acquire request-2", refused + 1)
    client.check_all_returned()


def test_a_request_larger_than_the_pool_is_rejected_and_others_run() -> None:
    """What could not run even alone ends with no_capacity and does not block the queue."""
    client, _, scheduler = start(slots=4)
    scheduler.submit(request(20))
    scheduler.submit(request(8, first=100, max_tokens=2))
    big, small = drain(scheduler)
    assert (big.finish_reason, big.tokens) == ("no_capacity", [])
    assert (small.finish_reason, len(small.tokens)) == ("length", 2)
    client.check_all_returned()


def test_output_that_outgrows_the_pool_ends_with_no_capacity() -> None:
    """A request that fills the pool alone ends with the tokens it has."""
    client, _, scheduler = start(slots=3)
    scheduler.submit(request(8, max_tokens=50))
    (result,) = drain(scheduler)
    assert (result.finish_reason, result.tokens) == ("no_capacity", list(range(8, 13)))
    client.check_all_returned()


@pytest.mark.parametrize("cache", ["all", "prompt", "nothing"])
def test_the_last_admitted_is_preempted_and_completes_later(cache: str) -> None:
    """Growing output takes the slots of the newest request, which then continues where it was, its policy kept."""
    client, _, scheduler = start(slots=7)
    scheduler.submit(request(8, max_tokens=10, cache=cache))
    scheduler.submit(request(8, first=100, max_tokens=10, cache=cache))
    results = drain(scheduler)
    assert [result.name for result in results] == ["request-1", "request-2"]
    assert [result.tokens for result in results] == [list(range(8, 18)), list(range(8, 18))]
    assert client.calls.count("acquire request-2") == 2
    assert len(client.cached) <= {"all": 7, "prompt": 4, "nothing": 0}[cache]
    client.check_all_returned()


def test_generation_stops_after_eos() -> None:
    """The end token is part of the output and nothing follows it."""
    _, _, scheduler = start()
    scheduler.submit(request(5, max_tokens=10, eos=7))
    (result,) = drain(scheduler)
    assert (result.finish_reason, result.tokens) == ("stop", [5, 6, 7])


def test_requests_that_cannot_be_served_are_refused() -> None:
    """An empty prompt and a request for no token are the caller's mistakes."""
    with pytest.raises(InvalidRequest, match="0 prompt tokens"):
        GenerationRequest(prompt=[])
    with pytest.raises(InvalidRequest, match="max_tokens 0"):
        GenerationRequest(prompt=[1], max_tokens=0)
    with pytest.raises(ValueError, match="step_tokens"):
        Limits(chunk_tokens=64, step_tokens=64)


def hosted(slots: int = 6, **limits: int) -> tuple[FakeClient, CountingRunner, Scheduler]:
    """A scheduler over a small pool whose evicted blocks go to a host pool."""
    return start(slots, FakeHost(), **limits)


def push_out(client: FakeClient) -> None:
    """Take every slot that is not held, so that all cached blocks are in the host pool alone."""
    slots = client.take(len(client.free) + len(client.cached))
    client.free += slots


def test_first_rows_are_computed_in_the_step_that_waits_for_the_hit() -> None:
    """A request whose hit is loading is computed at once with its tickets; no commit goes out before the load's end."""
    client, runner, scheduler = hosted()
    scheduler.submit(request(9, max_tokens=1))
    (cold,) = drain(scheduler)
    push_out(client)
    scheduler.submit(request(9, max_tokens=2))
    runner.steps.clear()
    client.calls.clear()
    (warm,) = drain(scheduler)
    assert (cold.hit_tokens, cold.loaded_tokens) == (0, 0)
    assert (warm.hit_tokens, warm.loaded_tokens) == (8, 8)
    assert runner.steps == [[(8, 9)], [(9, 10)]]
    assert runner.loads == [[0], [0], [1], [0]]
    assert client.calls == ["acquire request-2", "load request-2", "release request-2"]
    client.check_all_returned()


def test_hit_partly_on_the_device_counts_what_was_loaded() -> None:
    """Of a hit that is half here and half in the host pool only the latter counts as loaded."""
    client, _, scheduler = hosted(8)
    scheduler.submit(request(17, max_tokens=1))
    drain(scheduler)
    client.free += client.take(len(client.free) + 2)  # the last two blocks go to the host pool
    scheduler.submit(request(17, max_tokens=1))
    (warm,) = drain(scheduler)
    assert (warm.hit_tokens, warm.loaded_tokens) == (16, 8)
    client.check_all_returned()


@pytest.mark.parametrize("arriving", [0, 1])
def test_shorter_hit_discards_the_rows_and_computes_them_again(arriving: int) -> None:
    """Where a load failed, the token that came of it is not taken, and the request continues from the hit it has."""
    client, runner, scheduler = hosted()
    scheduler.submit(request(9, max_tokens=1))
    drain(scheduler)
    push_out(client)
    client.host.fails[1] = arriving
    runner.steps.clear()
    scheduler.submit(request(9, max_tokens=2))
    scheduler.submit(request(3, first=100, max_tokens=1))
    results = {result.name: result for result in drain(scheduler)}
    start = 4 * arriving
    assert runner.steps == [[(8, 9), (0, 3)], [(start, 8)], [(8, 9)], [(9, 10)]]
    assert results["request-2"].tokens == [9, 10]
    assert (results["request-2"].hit_tokens, results["request-2"].loaded_tokens) == (start, start)
    assert results["request-3"].tokens == [3]
    client.check_all_returned()


def test_rows_that_a_shard_computed_without_the_load_are_discarded() -> None:
    """An item that a shard names unread is computed again, even where the hit is as long as it was."""
    client, runner, scheduler = hosted()
    scheduler.submit(request(9, max_tokens=1))
    drain(scheduler)
    push_out(client)
    runner.steps.clear()
    runner.unread = [0]
    scheduler.submit(request(9, max_tokens=2))
    (result,) = drain(scheduler)
    assert runner.steps == [[(8, 9)], [(8, 9)], [(9, 10)]]
    assert (result.tokens, result.hit_tokens) == ([9, 10], 8)
    client.check_all_returned()


@pytest.mark.parametrize("others", [0, 1])
def test_no_slots_for_what_did_not_arrive_puts_the_request_back(others: int) -> None:
    """A request without slots for what failed to load asks again, when somebody has ended or at once if it is alone."""
    client, _, scheduler = hosted(8)
    scheduler.submit(request(9, max_tokens=1))
    drain(scheduler)
    push_out(client)
    client.host.fails[1] = 1
    client.full_at_wait = True
    client.calls.clear()
    scheduler.submit(request(9, max_tokens=2))
    if others:
        scheduler.submit(request(3, first=100, max_tokens=3))
    results = {result.name: result for result in drain(scheduler)}
    assert results["request-2"].tokens == [9, 10]
    again = client.calls.index("acquire request-2", client.calls.index("load request-2"))
    assert client.calls.index("release request-2") < again
    assert ("release request-3" in client.calls[:again]) == bool(others)
    client.check_all_returned()


def test_request_that_is_preempted_while_it_loads_releases_and_loads_again() -> None:
    """A loading request whose slots somebody needs commits nothing, and finds its blocks again later."""
    client, _, scheduler = hosted(5)
    scheduler.submit(request(9, max_tokens=1))
    drain(scheduler)
    push_out(client)
    scheduler.submit(request(8, first=100, max_tokens=3))
    scheduler.step()
    scheduler.submit(request(9, max_tokens=1))
    client.calls.clear()
    scheduler.step()  # request-2 grows into a third block, and request-3 has the last ones
    assert client.calls == ["acquire request-3", "allocate request-2 9", "release request-3", "allocate request-2 9"]
    results = {result.name: result for result in drain(scheduler)}
    assert results["request-2"].tokens == [8, 9, 10]
    assert (results["request-3"].tokens, results["request-3"].hit_tokens) == ([9], 8)
    client.check_all_returned()


def test_loads_are_joined() -> None:
    """Two requests that want the same blocks of the host pool wait for the same load, in one step."""
    client, runner, scheduler = hosted(8)
    scheduler.submit(request(9, max_tokens=1))
    drain(scheduler)
    push_out(client)
    runner.loads.clear()
    scheduler.submit(request(9, max_tokens=1))
    scheduler.submit(request(10, max_tokens=1))
    results = drain(scheduler)
    assert [result.loaded_tokens for result in results] == [8, 8]
    assert (runner.loads, len(client.host.loads)) == ([[1, 1]], 1)
    client.check_all_returned()
