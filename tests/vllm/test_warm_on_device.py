"""Stock vLLM's CPU build on memory of the fake CUDA device that belongs to the daemon: the whole chain, with kills."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.cuda_driver import trace
from tests.cuda_driver.conftest import device, library
from tests.cuda_driver.device import GRANULE_BYTES, live_granules
from tests.project.source_tree import ROOT
from tests.vllm.completions import BLOCK_SIZE
from tests.vllm.fake_device import offer_device
from tests.vllm.server import interpreter
from tests.vllm.test_states import CONVOLUTIONS, WIDTH
from tests.vllm.warm_loop import PROMPTS, ROOMY, SMALL, Groups, WarmLoop

__all__ = ["device", "library"]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KILLS = 4
SHARE_MIN = 0.95
ON_DEVICE = ("on_device", "warm_up", "async_scheduling")
ORDER = list(range(PROMPTS))


class Kind(NamedTuple):
    """Engines on the device.

    Attributes:
        delay_us: the longest time that a stream is late.
        groups: of a model that is made for the test; None = of the one that all tests have.
    """

    delay_us: int = 3000
    groups: Groups | None = None

    def model(self, folder: Path, models: Path) -> Path:
        """The folder of the model."""
        if self.groups is None:
            return models / "model"
        script = ("-m", "tests.vllm.tiny_hybrid", folder, self.groups.name, "--window", str(WIDTH))
        subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
        return folder / "model"


STATES = Kind(groups=Groups(CONVOLUTIONS.family, BLOCK_SIZE, CONVOLUTIONS.options))


@pytest.fixture
def loop(
    library: Path,
    device: Path,
    tmp_path: Path,
    models: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> Iterator[WarmLoop]:
    """Engines whose KV cache is on the device. Nothing of it is left afterwards, no rule was broken, no engine copied.

    A parameter is their kind.
    """
    kind: Kind = getattr(request, "param", Kind())
    model = kind.model(tmp_path, models)
    traced = offer_device(monkeypatch, library, device, tmp_path, delay_us=kind.delay_us, seed=1)
    loop = WarmLoop(tmp_path, model, seed=11, faults=ON_DEVICE, groups=kind.groups)
    with loop.running(tmp_path):
        yield loop
    records = trace.read(traced)
    assert trace.broken_rules(records) == []
    assert live_granules(device) == 0
    engines = {record.process for record in trace.calls(records, "cuStreamWriteValue32")}
    copying = {record.process for record in trace.calls(records, "cuMemcpyBatchAsync")}
    assert engines
    assert not engines & copying


def test_killed_engine_comes_back_warm(loop: WarmLoop, device: Path, tmp_path: Path) -> None:
    """All answers are stock vLLM's, and blocks are found in vLLM's own cache, though it has warmed up over them."""
    for number in range(KILLS):
        loop.kill_once(number)
    loop.daemon.kill()
    loop.daemon.start()
    loop.finish()
    outcome = loop.outcome
    assert outcome.wrong == 0, outcome
    assert outcome.answers > 2 * PROMPTS, outcome
    assert outcome.adopted > 0, outcome
    assert outcome.share >= SHARE_MIN, outcome
    assert live_granules(device) == (ROOMY + SMALL) // GRANULE_BYTES
    assert trace.calls(trace.read(tmp_path / "trace"), "cuMemcpyBatchAsync")


@pytest.mark.parametrize("loop", [Kind(400_000)], ids=["late streams"], indirect=True)
def test_as_many_blocks_are_found_as_on_the_cpu(loop: WarmLoop) -> None:
    """The last steps of an engine are reported when it has no request any more, and before the next one."""
    adopted = []
    for faults in (("async_scheduling",), ON_DEVICE):
        loop.live(ROOMY, ORDER, faults=faults)
        adopted.append(loop.live(ROOMY, ORDER, faults=faults).adopted)
    assert adopted[0] == adopted[1] > 300


@pytest.mark.parametrize("loop", [Kind(), STATES], ids=["blocks", "states"], indirect=True)
def test_engine_that_warms_up_over_its_blocks_answers_wrongly(loop: WarmLoop) -> None:
    """The comparison would see blocks that were overwritten while vLLM warmed up, without scratch memory."""
    assert loop.live(ROOMY, ORDER, faults=ON_DEVICE).wrong(loop.expected) == 0
    again = loop.live(ROOMY, ORDER, faults=ON_DEVICE)
    assert (again.wrong(loop.expected), again.adopted > 100) == (0, True)
    assert all(answer.cached for answer in again.answers)
    assert loop.live(ROOMY, ORDER, faults=(*ON_DEVICE, "no_scratch")).wrong(loop.expected) > 0
