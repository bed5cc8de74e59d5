"""A model whose K and V are the same on every shard: the daemon keeps them once, and the output stays what it was."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine import Engine, EngineSettings, GenerationRequest
from kvcached_client import Admin
from kvcached_client.blocks.host_layout import slots_per_slab
from tests.daemon.conftest import RunningDaemon, started
from tests.engine.fake_host import FakeHost
from tests.engine.fakes import FakeClient
from tests.engine.offload_rig import CONFIG, SLAB_BYTES, SLABS, OffloadEngine, bits, counters, host_stats
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY_MQA, ThreadedShards, generate, layout_of, prompt

SHARDS = 2
SLOTS = 32
TOKENS = prompt(3 * LIMITS.chunk_tokens + 1)
HIT_TOKENS = 3 * LIMITS.chunk_tokens
REPLICA = f"""
[[replica]]
name = "default"
model = "tiny-mqa"
model_config = "{{directory}}/config.json"
kv_dtype = "float32"
block_size = {BLOCK_SIZE}
shards = {SHARDS}
slots = {SLOTS}
"""


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """Serves a replica on two shards, and engines in offload mode."""
    directory = tmp_path_factory.mktemp("kv")
    model = {**msgspec.to_builtins(TINY_MQA), "model_type": "llama"}
    (directory / "config.json").write_bytes(msgspec.json.encode(model))
    with started(directory, CONFIG + REPLICA.format(directory=directory)) as daemon:
        yield daemon


def test_shards_compute_the_same_keys_and_values() -> None:
    """The two shards of a model with one head of K and V hold the same bits after a prompt."""
    host = FakeHost()
    shards = ThreadedShards(TINY_MQA, slots=64, shards=SHARDS, host=host)
    generate(FakeClient(layout_of(TINY_MQA, SHARDS), 64), shards, [GenerationRequest(prompt=TOKENS, max_tokens=8)])
    for layer in range(TINY_MQA.num_hidden_layers):
        first, second = (pool.pages(layer).tobytes() for pool in host.pools)
        assert first == second
        assert any(first)


@pytest.mark.timeout(120)  # starts shard processes
def test_managed_engine_gets_the_bits_it_would_compute(daemon: RunningDaemon) -> None:
    """Blocks that left the device pool come back to both shards from their one copy; logits are equal bit for bit."""
    settings = EngineSettings(daemon.run_dir.parent, daemon.run_dir, "default", tp=SHARDS, seed=3, limits=LIMITS)
    with Engine(settings) as engine:
        request = GenerationRequest(prompt=TOKENS, max_tokens=8, logits=True)
        (cold,) = engine.generate([request])
        for seed in range(3):
            other = prompt(SLOTS * BLOCK_SIZE // 2 - 8, seed=100 + seed)
            engine.generate([GenerationRequest(prompt=other, max_tokens=1)])
        (warm,) = engine.generate([request])
    assert [each.loaded_tokens for each in (cold, warm)] == [0, HIT_TOKENS]
    assert (warm.tokens, bits(warm)) == (cold.tokens, bits(cold))
    with Admin.connect(daemon.run_dir) as admin:
        assert admin.check().violations == ()


def test_offload_engines_get_the_bits_they_would_compute(daemon: RunningDaemon) -> None:
    """What one engine stored from two shards, a share each, another one loads to both, and answers bit for bit."""
    with OffloadEngine(daemon.run_dir, "mqa", shards=SHARDS, config=TINY_MQA) as first:
        cold = first.ask(TOKENS)
        with OffloadEngine(daemon.run_dir, "mqa", shards=SHARDS, config=TINY_MQA) as other:
            warm = other.ask(TOKENS)
    assert [each.hit_tokens for each in (cold, warm)] == [0, HIT_TOKENS]
    assert (warm.tokens, bits(warm)) == (cold.tokens, bits(cold))
    block_bytes = TINY_MQA.layout(BLOCK_SIZE, SHARDS).bytes_per_block()
    assert host_stats(daemon.run_dir, "mqa").slots == SLABS * slots_per_slab(SLAB_BYTES, block_bytes, 1)
    assert counters(daemon.run_dir)["corrupt_blocks"] == 0
