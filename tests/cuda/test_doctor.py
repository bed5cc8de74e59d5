"""`kvcached doctor --cuda` tries what it tells of, and says what to do about each refusal."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda.conftest import ROOT
from tests.cuda_driver.device import live_granules, settings

pytestmark = pytest.mark.usefixtures("bindings")


@pytest.fixture
def bindings() -> None:
    """Skips where the bindings are not installed."""
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


def doctor(library: Path, device: Path, **values: object) -> tuple[int, dict[str, tuple[str, str]]]:
    """The command's exit code, and of each check its level and its text."""
    environment = {**os.environ, **settings(directory=device, **values), "LD_LIBRARY_PATH": str(library.parent)}
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", "doctor", "--cuda", "--json"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    findings = json.loads(done.stdout)["findings"]
    assert all(bool(each["fix"]) == (each["level"] != "ok") for each in findings)
    return done.returncode, {each["check"]: (each["level"], each["text"]) for each in findings}


def test_machine_that_can_do_everything(library: Path, device: Path) -> None:
    """Every mechanism of every device is tried and found well; nothing is left on the device."""
    code, found = doctor(library, device, devices=2)

    assert code == 0
    assert {level for level, _ in found.values()} == {"ok"}
    mechanisms = {"shared memory", "replaced memory", "scattered copies", "copy engines", "host registration"}
    mechanisms |= {"stream values", "compute mode"}
    assert mechanisms == {name.partition(": ")[2] for name in found if name.startswith("device 1: ")}
    assert found["device 1: host registration"][1].endswith("; memory node 1")
    assert live_granules(device) == 0


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        ("refused_export=1", {"shared memory", "replaced memory", "scattered copies"}),
        ("out_of_memory=1", {"shared memory", "replaced memory", "scattered copies"}),
        ("refused_values=1", {"stream values"}),
        (
            "refused_registration=1",
            {"shared memory", "replaced memory", "scattered copies", "host registration", "stream values"},
        ),
    ],
)
def test_refused_mechanism(library: Path, device: Path, fault: str, broken: set[str]) -> None:
    """What the driver refuses fails, with the driver's words; the other checks go on."""
    code, found = doctor(library, device, faults=fault)

    assert code == 1
    failed = {name: text for name, (level, text) in found.items() if level == "fail"}
    assert set(failed) == {f"device 0: {each}" for each in broken}
    assert all("CUDA_ERROR_" in text for text in failed.values())


@pytest.mark.parametrize(("mode", "words"), [(2, "prohibited: no process"), (3, "exclusive process: only one process")])
def test_device_that_several_processes_may_not_use(library: Path, device: Path, mode: int, words: str) -> None:
    """A compute mode but the default one is named, with the command that changes it, though this process got in."""
    code, found = doctor(library, device, compute_mode=mode)

    assert code == 1
    assert found["device 0: compute mode"][0] == "fail"
    assert found["device 0: compute mode"][1].startswith(words)
    level, text = found["device 0"]
    assert level == ("ok" if mode == 3 else "fail")
    assert ("nvidia-smi -c DEFAULT" in text) == (mode == 2)


def test_old_driver_is_a_warning(library: Path, device: Path) -> None:
    """A driver without copies in batches works, and is told to be slow."""
    code, found = doctor(library, device, version=12010)

    assert (code, found["cuda driver"][0]) == (0, "warn")


@pytest.mark.parametrize("call", [1, 5, 9])
def test_device_that_is_lost(library: Path, device: Path, call: int) -> None:
    """A device that falls off while it is checked is a failure, not a crash."""
    code, found = doctor(library, device, faults=f"device_lost=@{call}")

    assert code == 1
    assert found["device 0"][0] == "fail"


def test_driver_that_knows_no_memory_nodes(library: Path, device: Path) -> None:
    """Drivers before CUDA 12.2 do not tell of memory nodes, and that is no fault."""
    code, found = doctor(library, device, version=12010)

    assert code == 0
    assert found["device 0: host registration"][1].endswith("; memory node -1")
