"""Model, paged attention and scheduler together, without a daemon."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine.config import Limits
from examples.llama_engine.generation import GenerationRequest, GenerationResult
from tests.engine.fake_host import FakeHost
from tests.engine.fakes import FakeClient
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, ThreadedShards, generate, layout_of, prompt

SLOTS = 256


def client_for(shards: int = 1, slots: int = SLOTS) -> FakeClient:
    return FakeClient(layout_of(TINY, shards), slots)


def request(tokens: list[int], max_tokens: int = 12, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt=tokens, max_tokens=max_tokens, logits=True, **options)  # type: ignore[arg-type]


def assert_close(left: GenerationResult, right: GenerationResult) -> None:
    assert left.tokens == right.tokens
    np.testing.assert_allclose(np.stack(left.logits), np.stack(right.logits), rtol=1e-4, atol=1e-4)


def assert_bit_identical(left: GenerationResult, right: GenerationResult) -> None:
    assert left.tokens == right.tokens
    assert np.stack(left.logits).tobytes() == np.stack(right.logits).tobytes()


def test_output_depends_on_the_whole_prompt() -> None:
    """Random weights are wide enough for the tests below to mean something: one early token changes the answer."""
    tokens = prompt(40)
    changed = [*tokens[:3], (tokens[3] + 1) % TINY.vocab_size, *tokens[4:]]
    first, second = generate(client_for(), ThreadedShards(), [request(tokens), request(changed)])
    assert first.tokens != second.tokens
    assert len(set(first.tokens)) > 3


@pytest.mark.parametrize("shards", [2, 4])
def test_shards_together_compute_what_one_computes(shards: int) -> None:
    """Splitting the model, over more shards than KV heads too, changes last bits only."""
    tokens = prompt(37)
    (one,) = generate(client_for(), ThreadedShards(), [request(tokens)])
    (two,) = generate(client_for(shards), ThreadedShards(shards=shards), [request(tokens)])
    assert_close(one, two)


def test_chunked_prefill_computes_what_one_pass_computes() -> None:
    """Where a prompt is cut into chunks changes last bits only."""
    tokens = prompt(61)
    whole = Limits(chunk_tokens=64, step_tokens=80, running_max=8)
    (in_chunks,) = generate(client_for(), ThreadedShards(), [request(tokens)])
    (in_one,) = generate(client_for(), ThreadedShards(), [request(tokens)], whole)
    assert_close(in_chunks, in_one)


def test_concurrent_requests_answer_as_they_do_alone() -> None:
    """Batching requests of many lengths gives each the tokens that it gets alone."""
    requests = [request(prompt(length, seed=length)) for length in (3, 17, 33, 50, 64)]
    together = generate(client_for(), ThreadedShards(), requests)
    for each, result in zip(requests, together, strict=True):
        assert_close(result, generate(client_for(), ThreadedShards(), [each])[0])


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("rest", [1, BLOCK_SIZE])
def test_hit_that_ends_on_a_chunk_gives_the_same_bits(shards: int, rest: int) -> None:
    """With the same rows in every step, reading a cached prefix and computing it give the same logits, bit for bit."""
    tokens = prompt(3 * LIMITS.chunk_tokens + rest)
    client, runner = client_for(shards), ThreadedShards(shards=shards)
    (cold,) = generate(client, runner, [request(tokens)])
    (warm,) = generate(client, runner, [request(tokens)])
    assert (cold.hit_tokens, warm.hit_tokens) == (0, 3 * LIMITS.chunk_tokens)
    assert_bit_identical(cold, warm)


def test_blocks_written_while_decoding_are_hit_by_the_next_turn() -> None:
    """A follow-up on prompt and answer reads the answer's blocks and computes what a cold engine computes."""
    client, runner = client_for(), ThreadedShards()
    (first,) = generate(client, runner, [request(prompt(18), max_tokens=15)])
    follow_up = [*prompt(18), *first.tokens, *prompt(5, seed=1)]
    (warm,) = generate(client, runner, [request(follow_up)])
    (cold,) = generate(client_for(), ThreadedShards(), [request(follow_up)])
    assert warm.hit_tokens == 32
    assert_close(warm, cold)


def test_a_pool_too_small_for_all_gives_the_same_answers_later() -> None:
    """Waiting, preemption and recomputation under pressure do not change any answer."""
    requests = [request(prompt(20, seed=seed), max_tokens=24) for seed in range(4)]
    tight = client_for(slots=16)
    crowded = generate(tight, ThreadedShards(slots=16), requests)
    roomy = generate(client_for(), ThreadedShards(), requests)
    acquired = [call for call in tight.calls if call.startswith("acquire")]
    assert len(acquired) > len(requests)
    for left, right in zip(crowded, roomy, strict=True):
        assert_close(left, right)
    tight.check_all_returned()


def hosted(shards: int = 1, slots: int = 24) -> tuple[FakeClient, ThreadedShards]:
    """A pool that holds little more than one prompt, and a host pool for the rest."""
    host = FakeHost()
    return FakeClient(layout_of(TINY, shards), slots, host), ThreadedShards(shards=shards, slots=slots, host=host)


@pytest.mark.parametrize("shards", [1, 2])
def test_each_layer_is_waited_for_before_it_is_read(shards: int) -> None:
    """A hit that arrives from the host pool layer by layer gives the cold run's logits, bit for bit, on all shards."""
    client, runner = hosted(shards)
    tokens = prompt(3 * LIMITS.chunk_tokens + 1)
    (cold,) = generate(client, runner, [request(tokens)])
    generate(client, runner, [request(prompt(93, seed=1), max_tokens=1)])
    (warm,) = generate(client, runner, [request(tokens)])
    assert (warm.hit_tokens, warm.loaded_tokens) == (48, 48)
    assert_bit_identical(cold, warm)
    layers = [(0, layer) for layer in range(TINY.num_hidden_layers)]
    for shard in range(shards):
        assert [(0, layer) for each, _, layer in client.host.waits if each == shard] == layers


@pytest.mark.parametrize("arriving", [0, 4, 8])
def test_load_that_fails_on_the_way_changes_no_answer(arriving: int) -> None:
    """Whatever part of a load arrives, the request and its neighbour in the batch answer as they do cold."""
    client, runner = hosted(shards=2)
    tokens = prompt(3 * LIMITS.chunk_tokens + 1)
    neighbour = request(prompt(10, seed=2))
    (cold,) = generate(client, runner, [request(tokens)])
    generate(client, runner, [request(prompt(93, seed=1), max_tokens=1)])
    client.host.fails[1] = arriving
    warm, beside = generate(client, runner, [request(tokens), neighbour])
    (alone,) = generate(client_for(2), ThreadedShards(shards=2), [neighbour])
    assert (warm.hit_tokens, warm.loaded_tokens) == (4 * arriving, 4 * arriving)
    assert_close(warm, cold)
    assert_close(beside, alone)
    client.check_all_returned()


def test_preempted_requests_come_back_from_the_host_pool() -> None:
    """Under pressure, with blocks going to the host pool and back, every answer is what it is with room for all."""
    requests = [request(prompt(20, seed=seed), max_tokens=24) for seed in range(4)]
    client, runner = hosted(slots=16)
    crowded = generate(client, runner, requests)
    roomy = generate(client_for(), ThreadedShards(), requests)
    assert client.host.loads
    for left, right in zip(crowded, roomy, strict=True):
        assert_close(left, right)
    client.check_all_returned()
