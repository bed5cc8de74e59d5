"""A vLLM that sleeps and wakes up: requests under way, what the daemon keeps over it, and what it clears.

On CPUs vLLM's workers keep their memory, but its scheduler pauses, and resets all caches, as on any device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, ask
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import CONNECTOR, VllmServer, ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

HITS = "vllm:external_prefix_cache_hits_total"
BLOCKS = 9
KEEPS = {"hold_deadline_ms": 10_000, "device_memory": "daemon", "on_reset": "keep"}


@pytest.fixture(scope="module")
def own_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """A daemon with device memory."""
    daemon = CacheDaemon(tmp_path_factory.mktemp("daemon"), device_memory_bytes=1 << 28)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def sleeper(tmp_path_factory: pytest.TempPathFactory, models: Path, own_daemon: CacheDaemon) -> Iterator[VllmServer]:
    """A server whose KV cache is in the daemon's memory, and which keeps its namespace."""
    connector = CONNECTOR | {"kv_connector_extra_config": KEEPS}
    directory = tmp_path_factory.mktemp("server")
    server = VllmServer(directory, "sleeper", models / "model", run_dir=own_daemon.run_dir, connector=connector)
    with ended(server):
        server.wait_until_ready()
        own_daemon.until_sessions(1)
        yield server


def sleep(server: VllmServer, level: int, mode: str = "abort") -> None:
    ask(server.socket, "POST", f"/sleep?level={level}&mode={mode}")
    assert json.loads(ask(server.socket, "GET", "/is_sleeping")) == {"is_sleeping": True}


def wake_up(server: VllmServer) -> None:
    ask(server.socket, "POST", "/wake_up")
    assert json.loads(ask(server.socket, "GET", "/is_sleeping")) == {"is_sleeping": False}


@pytest.mark.parametrize("level", [1, 2])
def test_daemon_keeps_over_sleep_what_vllm_forgets(
    sleeper: VllmServer, reference: VllmServer, prompt: Prompts, level: int
) -> None:
    """A server that sleeps as soon as it has answered finds the whole prompt in the host pool when it has woken up."""
    tokens = prompt(BLOCKS)
    expected = reference.complete(tokens)
    assert_same(sleeper.complete(tokens), expected)
    sessions = sleeper.log().count("opened session")
    for _ in range(3):
        sleep(sleeper, level)
        wake_up(sleeper)
        hits = sleeper.metric(HITS)
        assert_same(sleeper.complete(tokens), reference.complete(tokens))
        assert sleeper.metric(HITS) - hits == (BLOCKS - 1) * BLOCK_SIZE
    assert sleeper.log().count("opened session") == sessions


@pytest.mark.parametrize("mode", ["wait", "keep"])
def test_requests_go_on_after_sleep(sleeper: VllmServer, reference: VllmServer, prompt: Prompts, mode: str) -> None:
    """Requests that vLLM keeps over its sleep, or ends before it, have the answers that they would have had."""
    prompts = [prompt(BLOCKS, number) for number in range(8)]
    expected = [reference.complete(tokens, tokens=40) for tokens in prompts]
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(sleeper.complete, tokens, tokens=40) for tokens in prompts]
        wait(answers, timeout=0.5, return_when=FIRST_COMPLETED)
        sleep(sleeper, 1, mode)
        wake_up(sleeper)
        assert [answer.result() for answer in answers] == expected
    for tokens, answer in zip(prompts, expected, strict=True):
        assert sleeper.complete(tokens, tokens=40) == answer


def test_loads_end_before_sleep(sleeper: VllmServer, reference: VllmServer, prompt: Prompts) -> None:
    """A server that sleeps while prompts are loaded aborts them, and answers them rightly when it has woken up."""
    prompts = [prompt(40, number) for number in range(6)]
    expected = [reference.complete(tokens) for tokens in prompts]
    assert [sleeper.complete(tokens) for tokens in prompts] == expected
    sleep(sleeper, 1)
    wake_up(sleeper)
    with ThreadPoolExecutor(len(prompts)) as pool:
        answers = [pool.submit(sleeper.complete, tokens) for tokens in prompts]
        wait(answers, timeout=0.05)
        sleep(sleeper, 1)
        wake_up(sleeper)
        wait(answers)
    # The reference has cached them, too, by now: CPUs without AVX-512 round otherwise where vLLM reads cached blocks.
    assert [sleeper.complete(tokens) for tokens in prompts] == [reference.complete(tokens) for tokens in prompts]


def test_server_clears_its_namespace_to_sleep_unless_told_otherwise(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """As vLLM asks for, because weights may change meanwhile: nothing from before the sleep is found after it."""
    tokens = prompt(BLOCKS)
    assert_same(server.complete(tokens), reference.complete(tokens))
    generation = daemon.stats().hosts[0].generation
    sleep(server, 1)
    wake_up(server)
    assert daemon.stats().hosts[0].generation > generation  # by how much depends on whether the daemon started again
    hits = server.metric(HITS)
    assert server.complete(tokens) == reference.complete(tokens)
    assert server.metric(HITS) == hits
