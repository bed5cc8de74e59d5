"""The engine on a real daemon: real processes, sockets and memory."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

from examples.llama_engine import Engine, EngineSettings, GenerationRequest, Limits
from kvcached_client import Admin
from tests.daemon.conftest import seconds_until
from tests.engine.engine_process import EngineProcess
from tests.engine.tiny_llama import BLOCK_SIZE, LIMITS, TINY, prompt

pytestmark = pytest.mark.slow

CONFIG = """
run_dir = "{directory}"

[host]
size_bytes = 8_388_608
slab_bytes = 1_048_576
"""
REPLICA = """
[[replica]]
name = "{name}"
model = "tiny-llama-{name}"
model_config = "config.json"
kv_dtype = "float32"
block_size = {block_size}
shards = {shards}
slots = {slots}
"""
SLOTS = {"tp1": 128, "tp2": 128, "small": 16}
START_TIMEOUT_S = 30


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a daemon, with the model beside its sockets."""
    directory = tmp_path_factory.mktemp("kv")
    model = {**msgspec.to_builtins(TINY), "model_type": "llama"}
    (directory / "config.json").write_bytes(msgspec.json.encode(model))
    replicas = (
        REPLICA.format(name=name, block_size=BLOCK_SIZE, shards=2 if name == "tp2" else 1, slots=slots)
        for name, slots in SLOTS.items()
    )
    (directory / "kvcached.toml").write_text(CONFIG.format(directory=directory) + "".join(replicas))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(directory / "notify.sock"))
        daemon = subprocess.Popen(
            [sys.executable, "-m", "kvcached", "serve", "--config", directory / "kvcached.toml"],
            env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify.sock")},
        )
        try:
            assert select.select([notices], [], [], START_TIMEOUT_S)[0], "the daemon did not become ready"
            while notices.recv(256) != b"READY=1":
                pass  # it tells the manager other things before
            yield directory
        finally:
            daemon.terminate()
            daemon.wait(START_TIMEOUT_S)


def managed(tp: int) -> list[str]:
    return f"--replica tp{tp} --tp {tp}".split()


def check_quiet(directory: Path, replica: str) -> None:
    """No request holds anything, and every invariant of the daemon holds."""
    with Admin.connect(directory) as admin:
        (pool,) = (pool for pool in admin.stats().pools if pool.replica == replica)
        assert pool.leases == 0
        assert admin.check().violations == ()


@pytest.mark.parametrize("tp", [1, 2])
def test_cached_prefix_is_read_again_and_after_the_engine_was_killed(directory: Path, tp: int) -> None:
    """Later runs hit the prefix, in host memory and after SIGKILL of the engine too: the same logits bit for bit."""
    tokens = prompt(2 * LIMITS.chunk_tokens + BLOCK_SIZE, seed=tp)
    engine = EngineProcess(directory, directory, *managed(tp)).wait_ready()
    try:
        cold, warm = engine.ask(tokens), engine.ask(tokens)
        for seed in range(3):
            engine.ask(prompt(2 * SLOTS[f"tp{tp}"], seed=100 + seed))  # half the pool each
        loaded = engine.ask(tokens)
        engine.send(prompt(60, seed=7))  # it dies with a request on its hands
    finally:
        engine.kill()
    engine = EngineProcess(directory, directory, *managed(tp)).wait_ready()
    try:
        restarted = engine.ask(tokens)
        check_quiet(directory, f"tp{tp}")
        engine.send(prompt(200, seed=8))
        os.kill(engine.process.pid, signal.SIGKILL)  # the scheduler alone, with a step under way
        assert seconds_until(directory, lambda pool: pool.session == 0, 5, replica=f"tp{tp}") <= 1
    finally:
        engine.kill()
    answers = [cold, warm, loaded, restarted]
    cached = len(tokens) - BLOCK_SIZE
    assert [(each.hit_tokens, each.loaded_tokens) for each in answers] == [
        (0, 0), (cached, 0), (cached, cached), (cached, 0)
    ]  # fmt: skip
    assert all(each.tokens == cold.tokens and each.logits_digest == cold.logits_digest for each in answers)


def test_crowded_pool_answers_everyone_and_gives_everything_back(directory: Path) -> None:
    """Requests that do not fit together are preempted and come back by loads; each ends with its answer, none stays."""
    requests = [GenerationRequest(prompt=prompt(20, seed=seed), max_tokens=24) for seed in range(4)]
    limits = Limits(chunk_tokens=16, step_tokens=48, running_max=4)
    with Engine(EngineSettings(model_dir=directory, run_dir=directory, replica="small", limits=limits)) as engine:
        loaded_before = loaded_blocks(directory)
        together = engine.generate(requests)
        assert loaded_blocks(directory) > loaded_before
        alone = [engine.generate([request])[0] for request in requests]
        check_quiet(directory, "small")
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert all(len(result.tokens) == 24 for result in together)


def loaded_blocks(directory: Path) -> int:
    with Admin.connect(directory) as admin:
        return admin.stats().counters.get("loaded_blocks", 0)
