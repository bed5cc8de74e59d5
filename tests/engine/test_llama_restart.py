"""The engine on a device pool goes on while its daemon is SIGKILLed and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine.generation import GenerationRequest, GenerationResult
from examples.llama_engine.kv_tensors import KvMemory, mapped_memory
from examples.llama_engine.managed_cache import ManagedCache
from examples.llama_engine.scheduler import Scheduler
from kvcached_client import Admin, Client, map_pool
from kvcached_client.transport.attach import SessionGrant
from tests.daemon.supervised import Supervised, supervised
from tests.engine.engine_process import EngineProcess
from tests.engine.fakes import FakeClient
from tests.engine.offload_rig import write_model
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, Executors, ThreadedShards, generate, layout_of, prompt

SHARDS = 2
RESERVE = 12
DEADLINE_MS = 10_000
CONFIG = f"""
[host]
size_bytes = 8_388_608
slab_bytes = 1_048_576

[[replica]]
name = "default"
model = "tiny-llama"
model_config = "config.json"
kv_dtype = "float32"
block_size = {BLOCK_SIZE}
shards = {SHARDS}
slots = 64
"""


class ManagedEngine:
    """Scheduler and cache of an engine on a real pool, its shards as threads. A context manager.

    Attributes:
        mappings: so often its shards have mapped the pool.
    """

    def __init__(self, run_dir: Path, reserve: int) -> None:
        self.mappings = 0
        self._parts = ExitStack()
        client = self._parts.enter_context(Client.connect(run_dir, deadline_ms=DEADLINE_MS, reserve_blocks=reserve))
        self._executors = Executors(TINY, self._memories(client.session), seed=3)
        self.scheduler = Scheduler(ManagedCache(client, self._remap), self._executors, LIMITS)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._parts.close()

    def ask(self, *requests: GenerationRequest) -> list[GenerationResult]:
        """Run requests together, and what is under way already; results in the order of their names."""
        for request in requests:
            self.scheduler.submit(request)
        results: list[GenerationResult] = []
        while not self.scheduler.idle:
            results += self.scheduler.step()
        return sorted(results, key=lambda result: result.name)

    def _remap(self, session: SessionGrant) -> None:
        self._executors.use(self._memories(session))

    def _memories(self, session: SessionGrant) -> list[KvMemory]:
        self.mappings += 1
        pools = [map_pool(session, shard, deadline_ms=DEADLINE_MS) for shard in range(SHARDS)]
        for pool in pools:
            self._parts.callback(pool.close)
        return [mapped_memory(pool, "cpu") for pool in pools]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Supervised]:
    write_model(tmp_path)
    with supervised(tmp_path, CONFIG) as running:
        yield running


def recomputed(request: GenerationRequest) -> GenerationResult:
    """What an engine gives that finds nothing cached."""
    return generate(FakeClient(layout_of(TINY, SHARDS), 64), ThreadedShards(shards=SHARDS), [request])[0]


def await_stored(daemon: Supervised, blocks: int) -> None:
    with Admin.connect(daemon.run_dir, deadline_ms=DEADLINE_MS) as admin:
        while admin.stats().counters.get("stored_blocks", 0) < blocks:
            admin.health()


def counters(daemon: Supervised) -> dict[str, int]:
    with Admin.connect(daemon.run_dir, deadline_ms=DEADLINE_MS) as admin:
        assert admin.check().violations == ()
        return admin.stats().counters


def test_requests_go_on_over_a_restart(daemon: Supervised) -> None:
    """Running requests, new ones and those after the restart give what recomputing gives; what was cached is hit."""
    old, running, new = (GenerationRequest(prompt=prompt(21, seed=seed), max_tokens=20) for seed in range(3))
    with ManagedEngine(daemon.run_dir, RESERVE) as engine:
        (before,) = engine.ask(old)
        await_stored(daemon, 5)
        engine.scheduler.submit(running)
        for _ in range(6):
            engine.scheduler.step()
        daemon.kill()
        engine.scheduler.submit(new)
        for _ in range(6):
            assert engine.scheduler.step() == []
        daemon.await_ready()
        disturbed = engine.ask()
        after = engine.ask(old, running, new)

    expected = [recomputed(request).tokens for request in (old, running, new)]
    assert [before.tokens, *(result.tokens for result in disturbed)] == expected
    assert [result.tokens for result in after] == expected
    assert [result.hit_tokens for result in after] == [20, 20, 20]
    assert (after[0].loaded_tokens, engine.mappings) == (0, 2)  # its blocks are where they were in the device pool
    found = counters(daemon)
    assert (found["sessions_resumed"], found["leases_declared"]) == (1, 3)  # two requests, and the reserve


def test_engine_without_slots_waits_for_its_daemon(daemon: Supervised) -> None:
    """Where neither leases nor the reserve have slots left, nobody is refused or preempted: the engine waits."""
    running, new = (GenerationRequest(prompt=prompt(9, seed=seed), max_tokens=16) for seed in range(2))
    with ManagedEngine(daemon.run_dir, reserve=0) as engine:
        engine.scheduler.submit(running)
        engine.scheduler.step()
        daemon.kill()
        results = engine.ask(new)
        daemon.await_ready()
        daemon.kill()
        again = engine.ask(running)  # nothing else runs that could end

    assert [result.tokens for result in results] == [recomputed(request).tokens for request in (running, new)]
    assert again[0].tokens == results[0].tokens
    assert {result.finish_reason for result in (*results, *again)} == {"length"}


@pytest.mark.slow
def test_shard_processes_stay(daemon: Supervised, tmp_path: Path) -> None:
    """An engine of processes whose daemon is killed under a request answers it, and hits it afterwards, bit for bit."""
    options = f"--tp {SHARDS} --reserve-blocks {RESERVE}".split()
    engine = EngineProcess(tmp_path, daemon.run_dir, *options).wait_ready()
    try:
        first = prompt(2 * LIMITS.chunk_tokens + 1, seed=1)
        cold = engine.ask(first)
        await_stored(daemon, 2 * LIMITS.chunk_tokens // BLOCK_SIZE)
        daemon.kill()
        disturbed = engine.ask(second := prompt(LIMITS.chunk_tokens + 1, seed=2))
        daemon.await_ready()
        warm, again = engine.ask(first), engine.ask(second)
    finally:
        engine.kill()
    assert (warm.tokens, warm.logits_digest) == (cold.tokens, cold.logits_digest)
    assert (warm.hit_tokens, warm.loaded_tokens) == (2 * LIMITS.chunk_tokens, 0)  # found in the device pool
    assert (again.tokens, again.logits_digest) == (disturbed.tokens, disturbed.logits_digest)
