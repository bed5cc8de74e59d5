"""Stock vLLM's CPU build whose KV cache is memory of the fake CUDA device: a process of its own copies it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cuda_driver import trace
from tests.cuda_driver.conftest import device, library
from tests.cuda_driver.device import live_granules
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, random_tokens
from tests.vllm.engine_runs import Answer, engine_runs
from tests.vllm.fake_device import offer_device

__all__ = ["device", "library"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = [random_tokens(f"copied {number}", 3 + number) for number in range(4)]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[CacheDaemon]:
    """A daemon for the engines of a test."""
    made = CacheDaemon(tmp_path, slabs=8)
    made.start()
    yield made
    made.stop()


@pytest.fixture
def traced(library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the driver traces its calls. No rule of its was broken afterwards, and nothing is left on the device."""
    path = offer_device(monkeypatch, library, device, tmp_path, delay_us=500)
    yield path
    assert trace.broken_rules(trace.read(path)) == []
    assert live_granules(device) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_are_stock_vllm_s(tmp_path: Path, models: Path, daemon: CacheDaemon, traced: Path, ranks: int) -> None:
    """What a process has stored for one vLLM, another process loads for the next; vLLM's own processes copy nothing."""
    model, turns = models / "model", [PROMPTS, PROMPTS]
    with engine_runs(tmp_path / "log", daemon.run_dir) as runs:
        first, second = (
            runs.run(model, turns, name=f"copied {ranks}", on_device=True, is_async=True, tensor_parallel_size=ranks)
            for _ in range(2)
        )
        expected = runs.run(model, turns, tensor_parallel_size=ranks)

    for found in (*first, *second):
        for answer, plain, prompt in zip(found, expected[0], PROMPTS, strict=True):
            assert (answer.tokens, answer.logprobs) == (plain.tokens, plain.logprobs)
            blocks = (len(prompt) - 1) // BLOCK_SIZE
            assert answer.cached == (0 if found is first[0] else blocks * BLOCK_SIZE)
    records = trace.read(traced)
    engines = {each.process for each in trace.calls(records, "cuMemAlloc")}
    copying = {each.process for each in trace.calls(records, "cuMemcpyBatchAsync")}
    assert len(engines) == len(copying) == 2 * ranks
    assert not engines & copying


def copy_processes(run_dir: Path) -> list[int]:
    """Those of engines that use this daemon."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (process / "cmdline").read_bytes()
            variables = (process / "environ").read_bytes().split(b"\0")
            if b"kvcached_client.copy_process" in command and f"KVCACHED_RUN_DIR={run_dir}".encode() in variables:
                found.append(int(process.name))
    return found


def kill_some(run_dir: Path, killed: list[int], ending: threading.Event) -> None:
    """SIGKILL of each, some time after it was started."""
    chance = random.Random(5)
    while not ending.wait(chance.uniform(0.2, 1.5)):
        for process in copy_processes(run_dir):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
            killed.append(process)


@pytest.mark.usefixtures("traced")
def test_killed_copy_processes_cost_no_answer(tmp_path: Path, models: Path, daemon: CacheDaemon) -> None:
    """Whenever they are killed, idle, joining or at work, vLLM computes what they do not bring, and ends as ever."""
    model, turns = models / "model", [PROMPTS] * 16
    killed: list[int] = []
    answers: list[list[Answer]] = []
    ending = threading.Event()
    killer = threading.Thread(target=kill_some, args=(daemon.run_dir, killed, ending))
    with engine_runs(tmp_path / "log", daemon.run_dir) as runs:
        expected = runs.run(model, turns[:1])[0]
        killer.start()
        try:
            while len(set(killed)) < 2:  # a run may be over before its second process is
                answers += runs.run(model, turns, name="killed", on_device=True, is_async=True)
        finally:
            ending.set()
            killer.join()

    assert len(set(killed)) >= 2
    for found in answers:
        for answer, plain in zip(found, expected, strict=True):
            assert (answer.tokens, answer.logprobs) == (plain.tokens, plain.logprobs)
