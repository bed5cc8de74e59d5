"""Blocks that are not what was stored are never used: they are computed again, and dropped."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.host_blocks import HostBlocks
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_requests_finish_though_every_load_fails(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """With a bit of every stored block flipped each request computes its prompt, after one try; later ones hit."""
    prompts = [prompt(6, number) for number in range(6)]
    cold = [reference.complete(tokens) for tokens in prompts]
    assert [server.complete(tokens) for tokens in prompts] == cold
    server.forget()
    with HostBlocks(daemon.pid) as host:
        host.damage(host.stored())
    corrupt, acquires = daemon.count("corrupt_blocks"), daemon.count("acquires")

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(server.complete, prompts)) == cold
    assert daemon.count("corrupt_blocks") - corrupt >= len(prompts)
    assert daemon.count("acquires") - acquires <= 2 * len(prompts)

    corrupt = daemon.count("corrupt_blocks")
    server.forget()
    for tokens in prompts:
        assert_same(server.complete(tokens), reference.complete(tokens))
    assert daemon.count("corrupt_blocks") == corrupt


@pytest.mark.parametrize("depth", [0, 3, 6])
def test_hit_is_cut_at_a_damaged_block(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts, depth: int
) -> None:
    """Of a hit with one damaged block what lies before it is used, and the rest is computed and stored anew."""
    tokens = prompt(8)
    with HostBlocks(daemon.pid) as host:
        before = {block.key for block in host.stored()}
        assert_same(server.complete(tokens), reference.complete(tokens))
        server.forget()
        mine = [block for block in host.stored() if block.key not in before]
        assert [block.depth for block in mine] == list(range(8))
        host.damage([mine[depth]])
    corrupt = daemon.count("corrupt_blocks")

    answer = server.complete(tokens)
    reference.forget()
    reference.complete(tokens[: depth * BLOCK_SIZE] + prompt(8 - depth, "other end"))  # to have `depth` blocks cached
    assert answer == reference.complete(tokens)
    assert daemon.count("corrupt_blocks") == corrupt + 1

    server.forget()
    reference.complete(tokens)
    assert_same(server.complete(tokens), reference.complete(tokens))
    assert daemon.count("corrupt_blocks") == corrupt + 1
