"""CUDA graphs: what the SDK does beside a capture, and the example engine with its decode steps as graphs."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvcached_client import Admin
from kvcached_client.errors import ErrorCode, RequestError
from tests.cuda.conftest import RunProgram
from tests.cuda.test_pool import OnDevice
from tests.cuda_driver import trace
from tests.cuda_driver.device import live_granules, settings
from tests.cuda_driver.trace import broken_rules
from tests.daemon.supervised import supervised

if TYPE_CHECKING:
    from tests.engine.engine_process import Answer

CPU_TORCH = Path(__file__).parent / "cpu_torch"
SHARDS = (1, 2)
CHUNK = 16
PROMPT_TOKENS, PROMPTS = 2 * CHUNK + 1, 3
FILLERS = 12
CONFIG = """
session_ttl_ms = 20000

[host]
size_bytes = 8388608
slab_bytes = 65536

[[replica]]
name = "default"
model = "tiny-llama"
model_config = "config.json"
kv_dtype = "float32"
block_size = 4
shards = {shards}
slots = 64
device = "cuda"
cuda_devices = {devices}
"""


def test_sdk_does_not_break_a_capture(run_program: RunProgram) -> None:
    """While one thread captures a graph, others register the host pool, mark, copy and ask for fences."""
    done = run_program("beside_a_capture")

    assert done.said == [True, 0x11]
    assert broken_rules(done.records) == []


@pytest.fixture(params=SHARDS)
def llama_on_device(
    library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[OnDevice]:
    """A daemon with the pool of the tiny Llama, on a device whose streams are late; nothing is left afterwards."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    pytest.importorskip("torch")
    pytest.importorskip("safetensors")
    from tests.engine.offload_rig import write_model  # noqa: PLC0415 - needs torch

    write_model(tmp_path)
    traced = tmp_path / "trace"
    values = settings(directory=device, delay_us=50, register_us_per_mib=0, seed=request.param, trace=traced)
    for name, value in {**values, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(CPU_TORCH)}.items():
        monkeypatch.setenv(name, value)
    config = CONFIG.format(shards=request.param, devices=[0] * request.param)
    with supervised(tmp_path, config, pause_min_s=0.01, pause_max_s=0.01) as daemon:
        yield OnDevice(daemon, device, tmp_path / "trace")
    assert trace.broken_rules(trace.read(tmp_path / "trace")) == []
    assert live_granules(device) == 0


class Llama:
    """The example engine with graphs, and what it gave for each prompt when it computed them first."""

    def __init__(self, on_device: OnDevice) -> None:
        self._on_device = on_device
        self._cold: dict[int, object] = {}

    @contextmanager
    def running(self, *options: str) -> Iterator[Llama]:
        """A new engine process group."""
        from tests.engine.engine_process import EngineProcess  # noqa: PLC0415 - needs torch

        run_dir = self._on_device.daemon.run_dir
        shards = "2" if "cuda_devices = [0, 0]" in (run_dir.parent / "kvcached.toml").read_text() else "1"
        fixed = ("--device", "cuda", "--cuda-graphs", "--tp", shards)
        self._process = EngineProcess(run_dir.parent, run_dir, *fixed, *options).wait_ready()
        try:
            yield self
        finally:
            self._process.kill()

    def same(self, source: str) -> None:
        """Every prompt has the tokens and the bits of its first computation, and its hit comes from `source`."""
        for number in range(PROMPTS):
            answer = self._ask(number)
            assert self._cold.setdefault(number, (answer.tokens, answer.logits_digest)) == (
                answer.tokens,
                answer.logits_digest,
            ), (source, number)
            found = "host" if answer.loaded_tokens else "device" if answer.hit_tokens else "nowhere"
            assert found == source, (source, number, answer.hit_tokens, answer.loaded_tokens)
            assert answer.hit_tokens == (0 if source == "nowhere" else PROMPT_TOKENS - 1)

    def evict(self) -> None:
        """Compute others, which take the slots of the prompts."""
        for number in range(100, 100 + FILLERS):
            self._ask(number)

    def compute_another(self) -> None:
        """Compute a prompt that is none of those."""
        self._ask(99)

    def _ask(self, number: int) -> Answer:
        chance = random.Random(number)
        return self._process.ask([chance.randrange(199) for _ in range(PROMPT_TOKENS)])


def kill_workers(on_device: OnDevice) -> None:
    daemon = on_device.daemon.daemon_pid
    for pid in map(int, Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split()):
        with suppress(FileNotFoundError, ProcessLookupError):  # the daemon ends the others when one of them is dead
            if b"worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
    on_device.await_worker()


def sleep_and_wake(on_device: OnDevice) -> None:
    with Admin.connect(on_device.daemon.run_dir, deadline_ms=20_000) as admin:
        while True:
            try:
                admin.sleep("default", deadline_ms=30_000)
                break
            except RequestError as error:  # until the daemon has seen that the engine is gone
                if error.code != ErrorCode.POOL_BUSY:
                    raise
        assert live_granules(on_device.device) == 0
        admin.wake("default")


@pytest.mark.timeout(240)
def test_graphs_give_the_bits_of_the_first_computation(llama_on_device: OnDevice) -> None:
    """Replayed decode steps over hits on device and host: before and after deaths of workers and daemon, and a sleep.

    The engine keeps its graphs while workers and daemon are replaced; it records new ones after a sleep, for which it
    has to leave. In each life it records few graphs and replays many.
    """
    llama = Llama(llama_on_device)
    with llama.running("--reserve-blocks", "12"):
        llama.same("nowhere")
        llama.same("device")
        llama.evict()
        llama.same("host")
        recorded = len(trace.calls(trace.read(llama_on_device.trace_path), "cuGraphInstantiateWithFlags"))
        kill_workers(llama_on_device)
        llama.same("device")
        llama.evict()
        llama.same("host")
        llama_on_device.daemon.kill_and_wait()
        llama.compute_another()  # by its first call the engine sees the death, and then goes on with the next daemon
        llama.same("device")
        llama.evict()
        llama.same("host")
        records = trace.read(llama_on_device.trace_path)
        assert recorded == len(trace.calls(records, "cuGraphInstantiateWithFlags")) > 0
        assert len(trace.calls(records, "cuGraphLaunch")) > 10 * recorded
    sleep_and_wake(llama_on_device)
    with llama.running():
        llama.same("host")
        llama.same("device")
