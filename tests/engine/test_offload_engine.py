"""The engine in offload mode on a real daemon."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine import daemon_link
from examples.llama_engine.generation import GenerationRequest, GenerationResult
from kvcached_client import Admin
from kvcached_client.blocks.host_layout import HostGeometry
from tests.daemon.conftest import RunningDaemon, started
from tests.engine.engine_process import EngineProcess
from tests.engine.offload_rig import (
    CONFIG,
    DEADLINE_MS,
    SLAB_BYTES,
    SLABS,
    OffloadEngine,
    bits,
    counters,
    host_stats,
    write_model,
)
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, prompt
from tests.host_pool_file import host_pool_file

TOKENS = prompt(3 * LIMITS.chunk_tokens + 1)
HIT_TOKENS = 3 * LIMITS.chunk_tokens
#: On a busy machine a thread that is woken may wait for seconds.
PATIENCE_S = 30.0


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One for all tests that do not kill it; each has a model of its own, and so a namespace."""
    with started(tmp_path_factory.mktemp("kv"), CONFIG) as daemon:
        yield daemon


def assert_same_bits(*results: GenerationResult) -> None:
    assert len({tuple(result.tokens) for result in results}) == 1
    assert len({bits(result) for result in results}) == 1


@pytest.mark.timeout(120)  # starts three engines
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_prefix_is_hit_by_other_engines_and_after_a_kill(daemon: RunningDaemon, tmp_path: Path, tp: int) -> None:
    """The engine that stored a prefix, another one, and one started after a SIGKILL get the same logits bit for bit."""
    write_model(tmp_path)
    options = f"--attached --block-size {BLOCK_SIZE} --blocks 64 --tp {tp} --deadline-ms {DEADLINE_MS}".split()
    engines = [EngineProcess(tmp_path, daemon.run_dir, *options) for _ in range(3 - tp)]
    answers = []
    try:
        answers += [engines[0].wait_ready().ask(TOKENS), engines[0].ask(TOKENS)]
        answers += [engine.wait_ready().ask(TOKENS) for engine in engines[1:]]
        engines[0].send(prompt(60, seed=7))  # it dies with a request on its hands
        engines[0].kill()
        engines[0] = EngineProcess(tmp_path, daemon.run_dir, *options)
        answers.append(engines[0].wait_ready().ask(TOKENS))
    finally:
        for engine in engines:
            engine.kill()
    cold, *warm = answers
    assert cold.hit_tokens == 0
    assert all((each.hit_tokens, each.loaded_tokens) == (HIT_TOKENS, HIT_TOKENS) for each in warm)
    assert all((each.tokens, each.logits_digest) == (cold.tokens, cold.logits_digest) for each in warm)


@pytest.mark.parametrize("shards", [1, 2])
def test_output_is_stored_as_it_is_computed(daemon: RunningDaemon, shards: int) -> None:
    """A follow-up on prompt and answer, asked of another engine, loads both and gets the answer of a cold engine."""
    model = f"output-{shards}"
    with OffloadEngine(daemon.run_dir, model, shards=shards) as first:
        answer = first.ask(prompt(18), max_tokens=15)
        follow_up = [*prompt(18), *answer.tokens, *prompt(5, seed=1)]
        with OffloadEngine(daemon.run_dir, model, shards=shards) as other:
            warm = other.ask(follow_up)
    with OffloadEngine(daemon.run_dir / "nobody", shards=shards) as alone:
        cold = alone.ask(follow_up)
    assert [each.hit_tokens for each in (warm, cold)] == [32, 0]
    assert warm.tokens == cold.tokens
    assert host_stats(daemon.run_dir, model).sessions == 0


def test_hits_share_a_batch_with_requests_that_are_computed(daemon: RunningDaemon) -> None:
    """Requests that load and requests that do not answer together as they do alone, under tensor parallelism."""
    prompts = [prompt(length, seed=length) for length in (3, 17, 33, 49, 64)]
    requests = [GenerationRequest(prompt=tokens, max_tokens=8) for tokens in prompts]
    with OffloadEngine(daemon.run_dir, "batch", shards=2) as engine:
        alone = [engine.run(request)[0] for request in requests[1::2]]
        together = engine.run(*requests)
        again = engine.run(*requests)
    assert [result.hit_tokens for result in together] == [0, 16, 0, 48, 0]
    assert [result.hit_tokens for result in again] == [0, 16, 32, 48, 60]
    assert [result.tokens for result in together] == [result.tokens for result in again]
    assert [result.tokens for result in together[1::2]] == [result.tokens for result in alone]
    host_stats(daemon.run_dir, "batch")


def flip_a_bit(daemon: RunningDaemon, key: bytes, block_bytes: int, shards: int) -> None:
    """Change the exponent of the first float of a block on the last shard, where it lies in the host memory."""
    with Admin.connect(daemon.run_dir) as admin:
        (place,) = admin.inspect(key).places
    geometry = HostGeometry(slabs=SLABS, slab_bytes=SLAB_BYTES, shards=shards, block_bytes=block_bytes)
    offset = geometry.block_offset(place.slot, shard=shards - 1) + 3
    with host_pool_file(daemon.process.pid).open("r+b", buffering=0) as memory:
        memory.seek(offset)
        (byte,) = memory.read(1)
        memory.seek(offset)
        memory.write(bytes([byte ^ 0x40]))


@pytest.mark.parametrize("shards", [1, 2])
def test_damaged_block_is_computed_again(daemon: RunningDaemon, shards: int) -> None:
    """A bit that flipped on one shard cuts the hit before its block, changes no output, and is gone afterwards."""
    counted = counters(daemon.run_dir)["corrupt_blocks"]
    with OffloadEngine(daemon.run_dir, f"damaged-{shards}", shards=shards) as engine:
        cold = engine.ask(TOKENS)
        sound_blocks = LIMITS.chunk_tokens // BLOCK_SIZE
        key = engine.cache.chain(TOKENS).key_range(sound_blocks, sound_blocks + 1)
        flip_a_bit(daemon, key, TINY.layout(BLOCK_SIZE, shards).bytes_per_block(), shards)
        damaged, again = engine.ask(TOKENS), engine.ask(TOKENS)
    assert [each.hit_tokens for each in (cold, damaged, again)] == [0, LIMITS.chunk_tokens, HIT_TOKENS]
    assert_same_bits(cold, damaged, again)
    assert counters(daemon.run_dir)["corrupt_blocks"] == counted + 1
    host_stats(daemon.run_dir, f"damaged-{shards}")


def test_engine_outlives_its_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGKILL of the daemon changes no output of a running request; a new daemon is filled and serves hits again."""
    monkeypatch.setattr(daemon_link, "RETRY_PAUSE_S", 0.0)
    request = GenerationRequest(prompt=TOKENS, max_tokens=24, logits=True)
    with OffloadEngine(tmp_path / "run") as engine:
        with started(tmp_path, CONFIG) as daemon:
            (cold,) = engine.run(request)
            names = [engine.scheduler.submit(each) for each in (request, GenerationRequest(prompt=prompt(90, seed=4)))]
            for _ in range(3):
                engine.scheduler.step()
            daemon.process.kill()
            daemon.process.wait()
            hit, _ = engine.finish(names)
            (without,) = engine.run(request)
        (tmp_path / "run.notify").unlink()  # of the first one's fixture
        with started(tmp_path, CONFIG) as successor:
            refilled, warm = engine.run(request)[0], engine.run(request)[0]
            assert host_stats(successor.run_dir).sessions == 1
    assert [each.hit_tokens for each in (cold, hit, without, refilled, warm)] == [0, HIT_TOKENS, 0, 0, HIT_TOKENS]
    assert_same_bits(cold, without, refilled, warm)
    assert hit.tokens == cold.tokens  # it shared its steps


def test_idle_engine_lets_go_of_a_dead_daemon(tmp_path: Path) -> None:
    """The host pool of a daemon that died is unmapped while nobody asks for anything; its memory is free then."""

    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:kvcached-host")

    gc.collect()
    before = mapped()  # what other tests have left
    with started(tmp_path, CONFIG) as daemon, OffloadEngine(daemon.run_dir) as engine:
        engine.ask(TOKENS)
        assert mapped() > before
        daemon.process.kill()
        end = time.monotonic() + PATIENCE_S
        while mapped() > before:
            assert time.monotonic() < end
            time.sleep(0.01)  # the thread that unmaps needs this process's time


def test_daemon_that_comes_late_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that was started without a daemon computes, and stores and hits once there is one."""
    monkeypatch.setattr(daemon_link, "RETRY_PAUSE_S", 0.0)
    with OffloadEngine(tmp_path / "run") as engine:
        alone = engine.ask(TOKENS)
        with started(tmp_path, CONFIG):
            cold, warm = engine.ask(TOKENS), engine.ask(TOKENS)
    assert [each.hit_tokens for each in (alone, cold, warm)] == [0, 0, HIT_TOKENS]
    assert_same_bits(alone, cold, warm)


def test_crowded_blocks_answer_everyone(daemon: RunningDaemon) -> None:
    """Requests that do not fit into the engine's blocks wait or are preempted, and load what they had: all answer."""
    requests = [GenerationRequest(prompt=prompt(20, seed=seed), max_tokens=24) for seed in range(4)]
    loaded = counters(daemon.run_dir)["loaded_blocks"]
    with OffloadEngine(daemon.run_dir, "crowded", blocks=16) as engine:
        together = engine.run(*requests)
        assert counters(daemon.run_dir)["loaded_blocks"] > loaded
        alone = [engine.run(request)[0] for request in requests]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert all(len(result.tokens) == 24 for result in together)
    host_stats(daemon.run_dir, "crowded")


def test_request_larger_than_the_engine_is_refused(daemon: RunningDaemon) -> None:
    """A prompt that the engine has no blocks for ends with no_capacity, output that outgrows them where they end."""
    with OffloadEngine(daemon.run_dir, "large", blocks=8) as engine:
        large = GenerationRequest(prompt=prompt(40), max_tokens=4)
        growing = GenerationRequest(prompt=prompt(30, seed=1), max_tokens=40)
        results = engine.run(large, growing, GenerationRequest(prompt=prompt(9, seed=2), max_tokens=2))
    assert [(each.finish_reason, len(each.tokens)) for each in results] == [
        ("no_capacity", 0),
        ("no_capacity", 3),
        ("length", 2),
    ]


@pytest.mark.parametrize(("cache", "blocks"), [("all", 7), ("prompt", 4), ("nothing", 0)])
def test_policy_decides_what_is_stored(daemon: RunningDaemon, cache: str, blocks: int) -> None:
    """Prompt and output, the prompt, or nothing of a request is in the host pool afterwards, as the request asked."""
    with OffloadEngine(daemon.run_dir, f"policy-{cache}") as engine:
        engine.run(GenerationRequest(prompt=prompt(18), max_tokens=12, cache=cache))  # type: ignore[arg-type]
        assert host_stats(daemon.run_dir, f"policy-{cache}").states.get("cached", 0) == blocks
