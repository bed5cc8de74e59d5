"""What the suite sglang stands on, as far as it runs without SGLang."""

from __future__ import annotations

import contextlib
import json
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import sglang_environment, sglang_pairs
from benchmarks.__main__ import main
from benchmarks.local_model import MODELS, daemon_config
from benchmarks.programs import daemon_process, touch_host_pool
from benchmarks.result import Result
from benchmarks.sglang_environment import STORAGES, Storage, running_engine
from tests.host_pool_file import host_pool_file

ROUNDS = 3


def test_suite_without_sglang_says_what_to_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where SGLang's environment is missing, nothing is measured; the message names the command that builds it."""
    monkeypatch.setenv("SGLANG_VENV", str(tmp_path))
    with pytest.raises(SystemExit, match="make sglang-env"):
        main(["sglang", "--rounds", "10"])


@pytest.mark.parametrize("storage", STORAGES)
def test_engine_is_started_with_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, storage: Storage) -> None:
    """Each storage is what SGLang is told to use; without one there is a hierarchical cache all the same."""
    environment, script = tmp_path / "environment", tmp_path / "engine.py"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(sys.executable)
    monkeypatch.setenv("SGLANG_VENV", str(environment))
    script.write_text(
        textwrap.dedent("""
            import json, os, sys
            print("{}", flush=True)
            for line in sys.stdin:
                told = {"options": json.loads(sys.argv[1]), "run_dir": os.environ["KVCACHED_RUN_DIR"]}
                print(json.dumps(told), flush=True)
        """)
    )
    monkeypatch.setattr(sglang_environment, "_SCRIPT", script)
    run_dir = tmp_path / "run"
    with running_engine("a", tmp_path, tmp_path, cache_tokens=64, storage=storage, run_dir=run_dir) as engine:
        told = engine.generate([[1]], 1)
        assert engine.cpu_s() > 0
    options = told["options"]
    assert (options["enable_hierarchical_cache"], options["max_total_tokens"]) == (True, 64)
    backends = {"plain": None, "kvcached": "dynamic", "file": "file"}
    assert options.get("hicache_storage_backend") == backends[storage]
    extra = json.loads(options.get("hicache_storage_backend_extra_config", "{}"))
    assert extra.get("class_name") == ("KvcachedStorage" if storage == "kvcached" else None)
    assert told["run_dir"] == str(run_dir)


def test_host_pool_is_resident_before_it_is_measured(tmp_path: Path) -> None:
    """All of a daemon's host pool takes up memory once it is touched, and next to nothing of it before."""
    size_bytes = (16 << 20) * 2
    with daemon_process(daemon_config(0), tmp_path) as process:
        pool = host_pool_file(process.pid)
        assert pool.stat().st_blocks * 512 < size_bytes // 2
        touch_host_pool(process)
        assert pool.stat().st_blocks * 512 == size_bytes


class FakeEngine:
    """Takes a second without storage, two with kvcached, and says something else with files."""

    asked: list[Storage]

    def __init__(self, storage: Storage) -> None:
        self._storage, self._cpu_s = storage, 0.0

    def wait_until_ready(self) -> None:
        """At once."""

    def cpu_s(self) -> float:
        self._cpu_s += 0.5
        return self._cpu_s

    def generate(self, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
        self.asked.append(self._storage)
        return {
            "seconds": 2.0 if self._storage == "kvcached" else 1.0,
            "first_token_seconds": [0.25] * len(prompts),
            "storage_tokens": 0 if self._storage == "plain" else sum(map(len, prompts)),
            "tokens": [[7 if self._storage == "file" else 8] * tokens for _ in prompts],
        }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Result]:
    """By metric, with fake engines."""

    @contextlib.contextmanager
    def start(*_: object, storage: Storage, **__: object) -> Iterator[FakeEngine]:
        yield FakeEngine(storage)

    monkeypatch.setattr(FakeEngine, "asked", [], raising=False)
    monkeypatch.setattr(sglang_pairs, "running_engine", start)
    monkeypatch.setattr(sglang_pairs, "make_model", lambda *_: tmp_path)
    monkeypatch.setattr(sglang_pairs, "interpreter", lambda: Path(sys.executable))
    monkeypatch.setattr(sglang_pairs, "daemon_process", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(sglang_pairs, "touch_host_pool", lambda _: None)
    monkeypatch.setattr(sglang_pairs, "_QUIET_S", 0.0)
    found = sglang_pairs.misses_and_hits(MODELS["tiny"], tmp_path, ROUNDS)
    return {result.metric: result for result in found}


def test_every_share_of_hits_has_its_figures(results: dict[str, Result]) -> None:
    """For both storages and each share there are time, first token, CPU time and hits, with intervals."""
    names = {
        f"{storage}_{what}_{share}_over_plain_{part}ratio"
        for storage in STORAGES[1:]
        for what in ("time", "first_token", "cpu")
        for share in (0, *sglang_pairs.SHARES_PERCENT)
        for part in ("", "low_", "high_")
    }
    assert names <= results.keys()


def test_figures_are_those_of_the_turns(results: dict[str, Result]) -> None:
    """Ratios are to the engine without storage, hits a part of all tokens, and other outputs are counted."""
    for share in (0, *sglang_pairs.SHARES_PERCENT):
        assert results[f"kvcached_time_{share}_over_plain_ratio"].value == pytest.approx(2.0)
        assert results[f"file_time_{share}_over_plain_ratio"].value == pytest.approx(1.0)
        assert results[f"file_hit_{share}_percent"].value == pytest.approx(100.0)
        assert results[f"kvcached_outputs_that_differ_{share}"].ok is True
        assert results[f"file_outputs_that_differ_{share}"].value == ROUNDS * sglang_pairs._PROMPTS


def test_only_the_cost_of_misses_is_promised(results: dict[str, Result]) -> None:
    """Time and first token where nothing hits have a target, and outputs have to be the same."""
    promised = {metric for metric, result in results.items() if result.target and "differ" not in metric}
    assert promised == {"kvcached_time_0_over_plain_ratio", "kvcached_first_token_0_over_plain_ratio"}


def test_engines_take_turns(results: dict[str, Result]) -> None:
    """In three rounds each engine is first once; a turn is all its prompts."""
    assert results
    first_round = FakeEngine.asked[: 3 * len(STORAGES)]
    assert {first_round[place] for place in range(0, len(first_round), len(STORAGES))} == set(STORAGES)
