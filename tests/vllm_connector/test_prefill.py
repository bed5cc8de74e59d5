"""How fast vLLM computes prompts: what counts, what it comes to, and who is told."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.offload import Hold
from kvcached_client.types import LeaseId
from kvcached_client.vllm.daemon.commands import Seek
from kvcached_client.vllm.scheduling.request_state import RequestState
from kvcached_client.vllm.scheduling.waiting import PrefillMeter, PrefillRate, prompt_tokens
from tests.vllm_connector.link_rig import Rig as LinkRig
from tests.vllm_connector.link_rig import ScriptedClient, connected, fetching_rig
from tests.vllm_connector.link_rig import seek as any_seek
from tests.vllm_connector.rig import BLOCK, Cached, FakeRequest, FakeStep, New, Rig, generate

__all__ = ["fetching_rig"]

STEPS_MIN = 4
TOKENS = st.integers(1, 100_000)
SECONDS = st.floats(1e-4, 100)
RATES = st.floats(1, 1e6)


def rate_of(steps: Iterable[tuple[int, float]]) -> PrefillRate:
    rate = PrefillRate()
    for tokens, seconds in steps:
        rate.observe(tokens, seconds)
    return rate


# --- the rate -------------------------------------------------------------------------------------------------------


def test_rate_is_unknown_at_first() -> None:
    """Before the fourth step there is no rate."""
    rate = PrefillRate()
    for _ in range(STEPS_MIN - 1):
        rate.observe(512, 0.1)
        assert rate.tokens_per_s == 0
    rate.observe(512, 0.1)
    assert rate.tokens_per_s == pytest.approx(5120)


@given(st.lists(TOKENS, min_size=STEPS_MIN, max_size=50), RATES)
def test_even_steps_give_their_rate(sizes: list[int], true_rate: float) -> None:
    """Where each token takes as long as any other, the rate is that, whatever the sizes of steps."""
    rate = rate_of((tokens, tokens / true_rate) for tokens in sizes)
    assert rate.tokens_per_s == pytest.approx(true_rate, rel=1e-6)


@given(st.lists(st.tuples(TOKENS, SECONDS), min_size=STEPS_MIN, max_size=50))
def test_rate_is_within_what_steps_had(steps: list[tuple[int, float]]) -> None:
    """The rate is never below the slowest step's, nor above the fastest one's."""
    rates = [tokens / seconds for tokens, seconds in steps]
    assert min(rates) * 0.999 <= rate_of(steps).tokens_per_s <= max(rates) * 1.001


@given(st.integers(10, 200), st.integers(1, 8192), SECONDS, st.integers(1, 8192), st.floats(1e-6, 1e6))
def test_odd_step_changes_little(before: int, tokens: int, seconds: float, odd_tokens: int, odd_seconds: float) -> None:
    """After ten like steps one that is not larger, however long it takes, changes the rate by less than a third."""
    rate = rate_of([(tokens, seconds)] * before)
    known = rate.tokens_per_s
    rate.observe(min(odd_tokens, tokens), odd_seconds)
    assert known * 2 / 3 < rate.tokens_per_s < known * 4 / 3


def test_odd_first_step_is_forgotten() -> None:
    """A first step that took fifty times as long as the others is hardly seen after fifty more."""
    rate = rate_of([(512, 5.0), *[(512, 0.1)] * 50])
    assert rate.tokens_per_s == pytest.approx(5120, rel=0.1)


@pytest.mark.parametrize("factor", [0.05, 20])
def test_rate_follows_a_change(factor: float) -> None:
    """When everything takes twenty times as long from now on, or a twentieth, thirty steps later the rate says so."""
    rate = rate_of([*[(512, 0.1)] * 50, *[(512, 0.1 * factor)] * 60])
    assert rate.tokens_per_s == pytest.approx(5120 / factor, rel=0.2)


def test_small_steps_do_not_hide_what_full_ones_told() -> None:
    """Two hundred small steps, whose tokens take 27 times as long each, leave the rate within a factor of 2."""
    rate = rate_of([(8192, 0.3)] * 10)
    full = rate.tokens_per_s
    for _ in range(200):
        rate.observe(100, 0.1)
    assert full / 2 < rate.tokens_per_s <= full


def test_full_step_outweighs_small_ones() -> None:
    """After any number of small steps, which say little, the first full ones give nearly their own rate."""
    rate = rate_of([*[(100, 0.1)] * 1000, *[(8192, 0.3)] * 3])
    assert rate.tokens_per_s == pytest.approx(8192 / 0.3, rel=0.1)


def test_step_without_time_says_nothing() -> None:
    """A step that a coarse clock saw take no time is passed over."""
    assert rate_of([(512, 0.0)] * STEPS_MIN).tokens_per_s == 0


# --- the meter ------------------------------------------------------------------------------------------------------


def measured(*hooks: tuple[float, int | None]) -> list[tuple[int, float]]:
    """What reaches the rate when steps begin, with their tokens, and end (None) at these times."""
    seen: list[tuple[int, float]] = []
    meter = PrefillMeter()
    meter.rate.observe = lambda tokens, seconds: seen.append((tokens, seconds))  # type: ignore[method-assign]
    for now, tokens in hooks:
        if tokens is None:
            meter.end(now)
        else:
            meter.begin(now, tokens)
    return seen


def test_step_is_measured_from_its_schedule_to_its_output() -> None:
    """A step's time begins when it was scheduled: what vLLM waited before does not count."""
    assert measured((1, 512), (3, None), (100, 256), (101, None)) == [(512, 2), (256, 1)]


def test_overlapping_steps_are_measured_one_after_the_other() -> None:
    """A step that was scheduled while another one was computed began when that was over."""
    hooks = [(0, 512), (1, 400), (4, None), (5, 300), (7, None), (8, None)]
    assert measured(*hooks) == [(512, 4), (400, 3), (300, 1)]


def test_step_that_says_nothing_takes_its_own_time() -> None:
    """A step without prompts between others that overlap with it is not taken for one of them."""
    assert measured((0, 512), (1, 0), (4, None), (5, 256), (6, None), (8, None)) == [(512, 4), (0, 2), (256, 2)]


def test_end_without_a_beginning_is_nothing() -> None:
    """An end of which no beginning is known measures nothing, and does not spoil what follows."""
    assert measured((1, None), (2, 512), (3, None)) == [(512, 1)]


def test_steps_that_never_end_are_not_kept() -> None:
    """Of a vLLM that does not tell when steps are over, no more than a few are kept."""
    meter = PrefillMeter()
    for now in range(1000):
        meter.begin(now, 512)
    assert len(meter._under_way) == 16


# --- what counts ----------------------------------------------------------------------------------------------------


def tokens_in(step: FakeStep, prompts: dict[str, int]) -> int:
    return prompt_tokens(
        step, {name: RequestState(FakeRequest(name, range(size)), 0) for name, size in prompts.items()}
    )


def step_of(
    *, new: dict[str, tuple[int, int]] | None = None, known: dict[str, tuple[int, int]] | None = None
) -> FakeStep:
    """A step by its requests: how many tokens of each were computed before, and how many are now."""
    new, known = new or {}, known or {}
    names = list(known)
    cached = Cached(names, set(), [None] * len(names), [computed for computed, _ in known.values()])
    scheduled = {name: count for name, (_, count) in (new | known).items()}
    return FakeStep([New(name, ([],), computed) for name, (computed, _) in new.items()], cached, scheduled)


def test_prompts_count() -> None:
    """Tokens of new prompts count, those of chunks of earlier ones, and none that were there already."""
    assert tokens_in(step_of(new={"a": (0, 100)}), {"a": 100}) == 100
    assert tokens_in(step_of(new={"a": (64, 36)}), {"a": 100}) == 36
    assert tokens_in(step_of(new={"a": (0, 60)}, known={"b": (512, 400)}), {"a": 100, "b": 2000}) == 460


def test_few_requests_that_decode_do_not_matter() -> None:
    """A step that computes prompts beside a few requests that decode counts, with the tokens of prompts alone."""
    step = step_of(new={"a": (0, 100)}, known={"b": (50, 1), "c": (70, 1)})
    assert tokens_in(step, {"a": 100, "b": 50, "c": 60}) == 100


@pytest.mark.parametrize(
    "step",
    [
        step_of(known={"a": (100, 1), "b": (200, 1)}),
        step_of(known={"a": (100, 5), "b": (200, 5)}),
        step_of(new={"c": (0, 9)}, known={"a": (100, 5), "b": (200, 5)}),
        step_of(known={"a": (100, 500)}),
        step_of(),
    ],
    ids=["decode", "speculation", "mostly speculation", "output computed again", "nothing"],
)
def test_other_steps_do_not_count(step: FakeStep) -> None:
    """A step that decodes, guesses, or computes outputs again after a preemption says nothing of prompts."""
    assert tokens_in(step, {"a": 100, "b": 200, "c": 9}) == 0


def test_unknown_request_does_not_count() -> None:
    """Tokens of a request that the connector has forgotten are not taken for a prompt's."""
    assert tokens_in(step_of(new={"a": (0, 100)}), {}) == 0


# --- who is told ----------------------------------------------------------------------------------------------------


def compute(rig: Rig, name: str, seconds: float) -> Seek:
    """A request is computed in one step, which takes so long; what was asked for it."""
    request = rig.arrive(name, 10 * BLOCK)
    (seek,) = rig.link.taken(Seek)
    rig.start(request, 0, 10 * BLOCK)
    rig.now += seconds
    rig.side.step_over()
    return seek


def test_seeks_say_how_fast_vllm_computes() -> None:
    """Once four prompts were computed, the daemon is told the rate with each question."""
    rig = Rig()
    seeks = []
    for number in range(6):
        seeks.append(compute(rig, f"r{number}", 0.5))
        rig.now += 60  # idle
    assert [seek.prefill_tokens_per_s for seek in seeks] == [0] * STEPS_MIN + [pytest.approx(20 * BLOCK)] * 2
    assert rig.side.prefill_tokens_per_s == pytest.approx(20 * BLOCK)


def test_decoding_leaves_the_rate() -> None:
    """Steps that decode change nothing, however slow they are."""
    rig = Rig()
    for number in range(STEPS_MIN):
        compute(rig, f"r{number}", 0.5)
    request = rig.arrive("decoder", BLOCK)
    rig.start(request, 0, BLOCK)
    rig.side.step_over()
    known = rig.side.prefill_tokens_per_s
    for _ in range(5):
        generate(rig, request, 1)
        rig.now += 10
        rig.side.step_over()
    assert rig.side.prefill_tokens_per_s == known


def test_prefetch_carries_the_rate(fetching_rig: LinkRig) -> None:
    """The link hands a seek's rate on to the daemon with the prefetch."""
    client = ScriptedClient(1, acquire=Hold(LeaseId(5), 2))
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(any_seek(rate=1500.5))
    fetching_rig.wait(1)
    client.await_calls(1)
    assert client.calls == [("begin_prefetch", bytes(32), 9, "timeout", 1500.5)]
