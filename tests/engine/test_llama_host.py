"""The engine on a real daemon with a host tier: what comes back from there, and what is noticed when it is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine import Engine, EngineSettings, GenerationRequest, GenerationResult
from kvcached_client import Admin
from kvcached_client.blocks.host_layout import HostGeometry
from tests.daemon.conftest import RunningDaemon, started
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, layout_of, prompt
from tests.host_pool_file import host_pool_file

SLABS, SLAB_BYTES = 16, 256 << 10
CONFIG = f"""
[host]
size_bytes = {SLABS * SLAB_BYTES}
slab_bytes = {SLAB_BYTES}
verify = "{{verify}}"
"""
REPLICA = f"""
[[replica]]
name = "{{name}}"
model = "tiny-llama"
model_config = "{{directory}}/config.json"
kv_dtype = "float32"
block_size = {BLOCK_SIZE}
slots = {{slots}}
"""
TOKENS = prompt(3 * LIMITS.chunk_tokens + 1)
HIT_TOKENS = 3 * LIMITS.chunk_tokens


@contextmanager
def serving(directory: Path, replicas: str, *, slots: int, verify: str = "inherited") -> Iterator[RunningDaemon]:
    """A daemon with a host tier and replicas of the tiny model, whose files are in `directory`."""
    model = {**msgspec.to_builtins(TINY), "model_type": "llama"}
    (directory / "config.json").write_bytes(msgspec.json.encode(model))
    tables = (REPLICA.format(name=name, directory=directory, slots=slots) for name in replicas)
    with started(directory, CONFIG.format(verify=verify) + "".join(tables)) as daemon:
        yield daemon


def engine(directory: Path, replica: str) -> Engine:
    return Engine(EngineSettings(directory, directory / "run", replica, seed=3, limits=LIMITS))


def ask(engine: Engine, tokens: list[int]) -> GenerationResult:
    (result,) = engine.generate([GenerationRequest(prompt=tokens, max_tokens=8, logits=True)])
    return result


def push_out(engine: Engine, slots: int) -> None:
    """Compute other prompts, of more blocks than the pool has; what was cached before is in the host pool alone."""
    for seed in range(3):
        tokens = prompt(slots * BLOCK_SIZE // 2 - 8, seed=100 + seed)
        engine.generate([GenerationRequest(prompt=tokens, max_tokens=1)])


def counters(directory: Path) -> dict[str, int]:
    with Admin.connect(directory / "run") as admin:
        assert admin.check().violations == ()
        assert [pool.leases for pool in admin.stats().pools if pool.leases] == []
        return admin.stats().counters


def bits(result: GenerationResult) -> bytes:
    return np.stack(result.logits).tobytes()


def test_evicted_prefix_comes_back_and_another_replica_has_it_too(tmp_path: Path) -> None:
    """Its own replica, and one that never computed it, read back what left the pool; logits are equal bit for bit."""
    with serving(tmp_path, "ab", slots=32):
        with engine(tmp_path, "a") as first:
            cold, warm = ask(first, TOKENS), ask(first, TOKENS)
            push_out(first, slots=32)
            loaded = ask(first, TOKENS)
        with engine(tmp_path, "b") as second:
            elsewhere = ask(second, TOKENS)
        counted = counters(tmp_path)
    assert [each.hit_tokens for each in (cold, warm, loaded, elsewhere)] == [0, HIT_TOKENS, HIT_TOKENS, HIT_TOKENS]
    assert [each.loaded_tokens for each in (cold, warm, loaded, elsewhere)] == [0, 0, HIT_TOKENS, HIT_TOKENS]
    assert len({bits(each) for each in (cold, warm, loaded, elsewhere)}) == 1
    assert len({tuple(each.tokens) for each in (cold, warm, loaded, elsewhere)}) == 1
    assert counted["loaded_blocks"] == 2 * HIT_TOKENS // BLOCK_SIZE


def flip_a_bit(daemon: RunningDaemon, key: bytes) -> None:
    """Change the exponent of the first float of a block where it lies in the daemon's host memory."""
    with Admin.connect(daemon.run_dir) as admin:
        (slot,) = (place.slot for place in admin.inspect(key).places if place.tier == "host")
    block_bytes = layout_of(TINY).bytes_per_block()
    geometry = HostGeometry(slabs=SLABS, slab_bytes=SLAB_BYTES, shards=1, block_bytes=block_bytes)
    offset = geometry.block_offset(slot, shard=0) + 3
    with host_pool_file(daemon.process.pid).open("r+b", buffering=0) as memory:
        memory.seek(offset)
        (byte,) = memory.read(1)
        memory.seek(offset)
        memory.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("verify", ["always", pytest.param("never", marks=pytest.mark.slow)])
def test_flipped_bit_is_a_counted_miss_and_never_an_answer(tmp_path: Path, verify: str) -> None:
    """A flipped bit cuts the hit before it, is counted and changes no output; without verification logits differ."""
    sound_blocks = LIMITS.chunk_tokens // BLOCK_SIZE
    with serving(tmp_path, "a", slots=32, verify=verify) as daemon, engine(tmp_path, "a") as only:
        cold = ask(only, TOKENS)
        push_out(only, slots=32)
        flip_a_bit(daemon, only._cache.chain(TOKENS).key_range(sound_blocks, sound_blocks + 1))
        damaged, again = ask(only, TOKENS), ask(only, TOKENS)
        counted = counters(tmp_path)
    if verify == "always":
        assert (damaged.hit_tokens, damaged.loaded_tokens) == (LIMITS.chunk_tokens, LIMITS.chunk_tokens)
        assert counted["corrupt_blocks"] == 1
        assert bits(damaged) == bits(again) == bits(cold)
    else:
        assert (damaged.hit_tokens, counted.get("corrupt_blocks", 0)) == (HIT_TOKENS, 0)
        assert bits(damaged) != bits(cold)
