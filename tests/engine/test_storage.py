"""The example engine and storage: who waits for it, and who does not."""

from __future__ import annotations

import pytest

from examples.llama_engine import storage
from examples.llama_engine.config import Limits
from examples.llama_engine.scheduler import Scheduler
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, ErrorCode, request_error
from tests.engine.counting_runner import CountingRunner, drain, request
from tests.engine.fake_copies import FakeOffloadClient
from tests.engine.test_offload_cache import GONE, Bench, retries_at_once, stored

__all__ = ["retries_at_once"]

LIMITS = Limits(chunk_tokens=8, step_tokens=16, running_max=4)


def on_disk(tokens: int) -> FakeOffloadClient:
    """A client whose storage holds a prompt of so many tokens."""
    client = FakeOffloadClient({})
    client.on_disk = set(stored(tokens).stored)
    return client


def test_prompt_comes_from_storage() -> None:
    """Blocks that only storage has are hit: they are fetched before the request is admitted."""
    client = on_disk(12)
    scheduler = Scheduler(Bench(client, blocks=32).cache, CountingRunner(), LIMITS)
    scheduler.submit(request(13, max_tokens=1))
    (result,) = drain(scheduler)
    assert (result.hit_tokens, client.calls[:3]) == (12, ["prefetch", "fetched", "acquire"])


def test_request_that_waits_for_storage_delays_no_other() -> None:
    """While blocks of one request come from storage another is computed; alone, it is waited for."""
    client, runner = on_disk(12), CountingRunner()
    scheduler = Scheduler(Bench(client, blocks=32).cache, runner, LIMITS)
    scheduler.submit(request(7, first=100, max_tokens=2))
    client.is_storage_slow = True
    scheduler.submit(request(13, max_tokens=1))
    results = {result.name: result for result in drain(scheduler)}
    assert runner.steps == [[(0, 7)], [(7, 8)], [(12, 13)]]
    assert results["request-2"].hit_tokens == 12


@pytest.mark.parametrize(("pause_s", "asked"), [(1e9, 1), (0.0, 3)])
def test_daemon_without_storage_is_asked_seldom(monkeypatch: pytest.MonkeyPatch, pause_s: float, asked: int) -> None:
    """After the answer that there is no storage no request waits for it, until a pause is over."""
    monkeypatch.setattr(storage, "PAUSE_S", pause_s)
    client = FakeOffloadClient({})
    scheduler = Scheduler(Bench(client, blocks=32).cache, CountingRunner(), LIMITS)
    for _ in range(3):
        scheduler.submit(request(13, max_tokens=1))
        drain(scheduler)
    assert client.calls.count("prefetch") == asked


def test_storage_is_told_how_fast_the_engine_computes() -> None:
    """Steps with prefill give the rate that later requests are asked with; at first it is not known."""
    client = on_disk(4)
    scheduler = Scheduler(Bench(client, blocks=32).cache, CountingRunner(), LIMITS)
    for first in (100, 200):
        scheduler.submit(request(13, first=first, max_tokens=1))
        drain(scheduler)
    assert client.rates[0] == 0
    assert client.rates[1] > 0


@pytest.mark.parametrize("error", [GONE, DeadlineExceeded("slow"), request_error(ErrorCode.LIMIT, "too many", "fewer")])
def test_without_storage_requests_are_computed(error: Exception) -> None:
    """A daemon that is away, slow, or refuses costs what storage has, and no request."""
    client = on_disk(12)
    client.errors = {"prefetch": error}
    scheduler = Scheduler(Bench(client, blocks=32).cache, CountingRunner(), LIMITS)
    scheduler.submit(request(13, max_tokens=1))
    (result,) = drain(scheduler)
    assert result.hit_tokens == 0


def test_daemon_that_goes_away_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """When the daemon goes away while a request waits for storage, the request is computed."""
    client = on_disk(12)
    scheduler = Scheduler(Bench(client, GONE, blocks=32).cache, CountingRunner(), LIMITS)

    def away(_: object) -> None:
        raise DaemonUnreachable("gone")

    monkeypatch.setattr("tests.engine.fake_copies.FakePrefetch.result", away)
    scheduler.submit(request(13, max_tokens=1))
    (result,) = drain(scheduler)
    assert result.hit_tokens == 0
