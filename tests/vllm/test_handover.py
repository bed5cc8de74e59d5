"""Prompts that one server has just computed, or is computing, at another server on the same daemon."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, Completion
from tests.vllm.conftest import Prompts
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Tokens behind the full blocks of a prompt, so that every full block may be a hit.
REST = 7
#: Full blocks of the prompts that are handed over, one after the other.
SIZES = (1, 2, 3, 5, 8, 12, 17, 24, 33, 47, 60, 4)
#: Prompts that both servers get at nearly the same time.
TWINS = 6
#: Of 36 hand-overs. A prefill's last blocks are offered before its response leaves, if the daemon replies within 3 ms;
#: on a busy machine it does not always. Without waits for stores, and without offers at once, 8 are missed.
MISSED_MAX = 4


def some_prompt(prompt: Prompts, blocks: int, name: object) -> list[int]:
    return [*prompt(blocks, name), *range(3, 3 + REST)]


def handed_over(prefill: VllmServer, decode: VllmServer, tokens: list[int]) -> Completion:
    """As proxies for prefill and decode servers do it: one token of the first, then the whole request to the second."""
    prefill.complete(tokens, tokens=1)
    return decode.complete(tokens)


def test_prefill_that_is_handed_over_is_hit(
    server: VllmServer, other: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """A prompt that the prefill server has answered is a whole hit at the decode server, however soon it gets it.

    Of 36 prompts one by one, outputs are those of a server without a cache, also where some blocks came too late.
    """
    missed = {}
    for turn in range(3):
        for blocks in SIZES:
            tokens = some_prompt(prompt, blocks, (turn, blocks))
            answer, expected = handed_over(server, other, tokens), handed_over(reference, reference, tokens)
            assert answer.tokens == expected.tokens
            if answer.cached_tokens == expected.cached_tokens:
                assert answer == expected
            else:
                missed[turn, blocks] = answer.cached_tokens // BLOCK_SIZE
    assert len(missed) <= MISSED_MAX, missed


def test_prompt_that_two_servers_get_at_nearly_the_same_time(
    server: VllmServer, other: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """Two servers that compute and store the same prompt, whichever waits for the other, answer as one without cache.

    Nothing of them is left behind, and no block is stored twice.
    """
    stored = daemon.count("stored_blocks")
    for number in range(TWINS):
        tokens = some_prompt(prompt, 33, number)
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda each, tokens=tokens: each.complete(tokens), (server, other)))
        expected = reference.complete(tokens)
        assert [answer.tokens for answer in answers] == [expected.tokens] * 2
    daemon.until_idle()
    assert daemon.count("stored_blocks") - stored == TWINS * 33
