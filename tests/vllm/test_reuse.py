"""What one server computed is loaded by itself, by its successor and by others, and comes to the same bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import Fleet, assert_same
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HITS = "vllm:external_prefix_cache_hits_total"
QUERIES = "vllm:external_prefix_cache_queries_total"


@pytest.mark.parametrize("blocks", [2, 5, 16, 40])
def test_prompt_comes_from_the_daemon_after_a_reset(
    server: VllmServer, reference: VllmServer, prompt: Prompts, blocks: int
) -> None:
    """After vLLM forgot a prompt, all its blocks but the last come from the daemon; log-probabilities are the same."""
    tokens = prompt(blocks)
    assert_same(server.complete(tokens), reference.complete(tokens))
    server.forget()
    hits, queries = server.metric(HITS), server.metric(QUERIES)

    assert_same(server.complete(tokens), reference.complete(tokens))
    assert server.metric(HITS) - hits == (blocks - 1) * BLOCK_SIZE
    assert server.metric(QUERIES) - queries == blocks * BLOCK_SIZE


def test_hit_ends_where_prompts_part(server: VllmServer, reference: VllmServer, prompt: Prompts) -> None:
    """Of a prompt that shares three of eight blocks with one before, those three come from the daemon."""
    first = prompt(8)
    second = first[: 3 * BLOCK_SIZE] + prompt(5, "another end")
    for tokens in (first, second):
        assert_same(server.complete(tokens), reference.complete(tokens))
        server.forget()
    assert_same(server.complete(second), reference.complete(second))


def test_external_hit_continues_a_local_one(server: VllmServer, reference: VllmServer, prompt: Prompts) -> None:
    """Where vLLM still has the first blocks itself, only the others are loaded."""
    first = prompt(9)
    short = first[: 4 * BLOCK_SIZE]
    assert_same(server.complete(first), reference.complete(first))
    server.forget()
    assert server.complete(short).tokens == reference.complete(short).tokens  # loads three blocks, computes the fourth
    hits = server.metric(HITS)

    assert_same(server.complete(first), reference.complete(first))
    assert server.metric(HITS) - hits == 4 * BLOCK_SIZE


def test_next_turn_of_a_conversation_hits_its_answer(
    server: VllmServer, reference: VllmServer, prompt: Prompts
) -> None:
    """Blocks that were filled while decoding are loaded like those of prompts."""
    first = prompt(3)
    expected = reference.complete(first, tokens=70)
    assert_same(server.complete(first, tokens=70), expected)
    server.forget()
    second = [*first, *expected.tokens, *prompt(2, "second turn")]

    answer = server.complete(second)
    assert_same(answer, reference.complete(second))
    assert answer.cached_tokens == 5 * BLOCK_SIZE


def test_servers_share_what_they_compute(
    server: VllmServer, other: VllmServer, reference: VllmServer, prompt: Prompts
) -> None:
    """What one server computed another one loads, and the other way round; log-probabilities are the same."""
    for writer, reader, name in ((server, other, "there"), (other, server, "back")):
        tokens = prompt(7, name)
        assert_same(writer.complete(tokens), reference.complete(tokens))
        writer.forget()  # when it may, its stores are over
        assert_same(reader.complete(tokens), reference.complete(tokens))


def test_killed_server_finds_its_prompts_again(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, fleet: Fleet, prompt: Prompts
) -> None:
    """A server that was killed and started again hits what it computed before; log-probabilities are the same."""
    tokens = prompt(12)
    assert_same(server.complete(tokens), reference.complete(tokens))
    server.forget()
    server.kill()
    daemon.until_sessions(1)
    fleet.servers("a")

    assert_same(server.complete(tokens), reference.complete(tokens))


def test_concurrent_requests_with_shared_prefixes(
    server: VllmServer, other: VllmServer, reference: VllmServer, prompt: Prompts
) -> None:
    """Sixteen requests at the same time on two servers, with beginnings in common, come out as one by one without."""
    trunk = prompt(6, "trunk")
    prompts = [trunk[: (2 + number % 5) * BLOCK_SIZE] + prompt(2, number) for number in range(16)]
    expected = [reference.complete(tokens) for tokens in prompts]
    places = [(server, other)[number % 2] for number in range(16)]
    for _ in range(3):
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(VllmServer.complete, places, prompts))
        assert answers == expected
        server.forget()
        other.forget()
