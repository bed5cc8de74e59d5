"""The example engine as its README has it run: against the configurations that are shipped."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached.config.schema import load_config
from kvcached_client.blocks.layout import layout_from_model_config
from tests.project.daemon_process import clean_environment, running_daemon
from tests.project.source_tree import ROOT

MODEL = ROOT / "examples/llama_engine/small-llama"
#: A busy machine takes its time to import torch.
PATIENCE_S = 200
pytestmark = pytest.mark.timeout(PATIENCE_S + 40)


def run_engine(run_dir: Path, *options: str, requests: str = "") -> subprocess.CompletedProcess[str]:
    """The example engine, from its start to the end of its requests."""
    return subprocess.run(
        [sys.executable, "-m", "examples.llama_engine", "serve", "--run-dir", str(run_dir), *options],
        cwd=ROOT,
        env=clean_environment(),
        input=requests,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The run directory of a daemon that serves configs/cpu-tp1.toml."""
    directory = tmp_path_factory.mktemp("example") / "run"
    with running_daemon(ROOT / "configs/cpu-tp1.toml", directory):
        yield directory


@pytest.mark.parametrize("shards", [1, 2])
def test_small_llama_fits_the_configurations(shards: int) -> None:
    """The model beside the example has the layout of the replica in configs/cpu-tp1.toml and cpu-tp2.toml."""
    (replica,) = load_config(ROOT / f"configs/cpu-tp{shards}.toml", environment={}).replica
    model = json.loads((MODEL / "config.json").read_text())

    assert layout_from_model_config(model, block_size=replica.block_size, shards=shards) == replica.layout


@pytest.mark.full
def test_example_answers_the_prompt_of_its_readme(run_dir: Path) -> None:
    """The request in the example's README, on the model and configuration it names, gets as many tokens as it wants."""
    pytest.importorskip("torch")
    readme = (MODEL.parent / "README.md").read_text()
    (request,) = (line for line in readme.splitlines() if line.startswith('[{"prompt"'))

    finished = run_engine(run_dir, "--model", str(MODEL), requests=f"{request}\n")

    ready, answer = map(json.loads, finished.stdout.splitlines())
    assert (finished.returncode, ready) == (0, {"ready": True})
    assert (len(answer[0]["tokens"]), answer[0]["finish_reason"]) == (8, "length")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--model", "no/such/model"], "no/such/model/config.json"),
        (["--model", str(MODEL), "--tp", "2"], "this model on 2 shards needs"),
        (["--model", str(MODEL), "--tp", "3"], "3"),
        (["--model", str(MODEL), "--replica", "other"], "other"),
    ],
)
@pytest.mark.full
def test_example_that_does_not_fit_says_so_in_a_line(options: list[str], expected: str, run_dir: Path) -> None:
    """A wrong model, number of shards or replica is one line on stderr and exit status 2."""
    finished = run_engine(run_dir, *options)

    assert (finished.returncode, finished.stdout) == (2, "")
    (line,) = finished.stderr.splitlines()
    assert expected in line


def test_example_without_a_daemon_says_so_in_a_line(tmp_path: Path) -> None:
    """Without a daemon the example ends with one line on stderr and exit status 4."""
    finished = run_engine(tmp_path, "--model", str(MODEL))

    assert (finished.returncode, finished.stdout, len(finished.stderr.splitlines())) == (4, "", 1)
