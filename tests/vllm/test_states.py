"""Models whose layers keep states: a hit after a restart comes to what vLLM computes."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, random_tokens
from tests.vllm.engine_runs import Answer, EngineRuns, engine_runs
from tests.vllm.server import environment, interpreter
from tests.vllm.test_hybrid import PREFETCH_THRESHOLD_BLOCKS, PROMPTS, SHARED, assert_same

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Of the convolutions; their states are of one token less.
WIDTH = 4
ALONE = [[prompt] for prompt in PROMPTS]


class Kind(NamedTuple):
    """A kind of engine: the model's family, options of vLLM, groups of states, and tokens in a block."""

    family: str
    options: dict[str, Any]
    states: int = 2
    block: int = BLOCK_SIZE

    def hit(self, tokens: int) -> int:
        """The hit of a prompt of so many tokens: vLLM keeps the states behind the last block before the last token."""
        return (tokens - 1) // self.block * self.block


#: vLLM's kernel for the CPU takes the heads of an LFM2 for tokens, and rotates them as if they were elsewhere in the
#: prompt, so that what it computes depends on what it computes beside. Its own code in Python does not.
ROTATED_IN_PYTHON = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
CONVOLUTIONS = Kind("lfm2", ROTATED_IN_PYTHON)
DELTA_NETS = Kind("qwen3_next", {"dtype": "bfloat16"}, states=3, block=9 * BLOCK_SIZE)
KINDS = {
    "short convolutions": CONVOLUTIONS,
    "delta nets": DELTA_NETS,
    "two shards of states": Kind("lfm2", ROTATED_IN_PYTHON | {"tensor_parallel_size": 2}),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """A daemon with storage."""
    daemon = CacheDaemon(tmp_path_factory.mktemp("states"), slabs=64, has_storage=True)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, daemon: CacheDaemon) -> Iterator[EngineRuns]:
    """Runs engines."""
    with engine_runs(tmp_path_factory.mktemp("engines") / "log", daemon.run_dir) as runs:
        yield runs


def written(kind: Kind, folder: Path) -> Path:
    """The folder of a model of a kind."""
    script = ("-m", "tests.vllm.tiny_hybrid", folder, kind.family, "--window", str(WIDTH))
    subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
    return folder / "model"


def cached(answers: list[Answer]) -> list[int]:
    return [answer.cached for answer in answers]


def alone(turns: list[list[Answer]]) -> list[Answer]:
    return [turn[0] for turn in turns]


@pytest.mark.parametrize("name", KINDS)
def test_hits_after_restarts_come_to_what_vllm_computes(
    name: str, daemon: CacheDaemon, runs: EngineRuns, tmp_path: Path
) -> None:
    """What one engine stored others load from host memory, and from disk when the daemon is another one, too.

    The longest prompt takes three steps, and a block of the delta nets is longer than a step.
    """
    kind = KINDS[name]
    model = written(kind, tmp_path)
    expected = alone(runs.run(model, ALONE, **kind.options))
    hits = [kind.hit(len(prompt)) for prompt in PROMPTS]

    first = alone(runs.run(model, [*ALONE, *ALONE], name=name, **kind.options))
    assert_same(first, expected + expected)
    assert cached(first[len(PROMPTS) :]) == hits
    daemon.until_idle()
    daemon.until(lambda stats: stats.counters["backed_up_blocks"] == stats.counters["stored_blocks"], "on disk")

    again = runs.run(model, [*ALONE, PROMPTS], name=name, **kind.options)
    assert_same(alone(again[:-1]), expected)
    assert cached(alone(again[:-1])) == hits
    assert cached(again[-1]) == hits
    if kind is not DELTA_NETS:  # rounded to 16 bits, sums depend on what is computed beside
        assert [answer.tokens for answer in again[-1]] == [answer.tokens for answer in expected]
    daemon.until_idle()

    daemon.stop()
    daemon.start()
    daemon.until_storage()
    longest = 4  # fewer blocks than the threshold are not fetched, and its prefix is not in memory yet
    assert hits[longest] // kind.block + kind.states >= PREFETCH_THRESHOLD_BLOCKS
    cold = alone(runs.run(model, [ALONE[longest]], name=name, **kind.options))
    assert_same(cold, expected[longest : longest + 1])
    assert cached(cold) == hits[longest : longest + 1]
    daemon.until_idle()


#: Checks groups of states as vLLM describes them.
CHECKS = """
import torch
from vllm.v1.kv_cache_interface import MambaSpec
from kvcached_client.vllm.groups import check_states

def states(checkpoints):
    return MambaSpec(
        block_size=64, shapes=((2, 3),), dtypes=(torch.float32,), mamba_cache_mode="align",
        num_prefill_checkpoint_blocks=checkpoints,
    )

check_states([states(0)], 16)
check_states([states(1)], 64)
try:
    check_states([states(1)], 16)
except ValueError as error:
    print(error)
"""


def test_states_in_the_middle_of_a_step_are_refused_where_hashes_are_finer_than_blocks() -> None:
    """VLLM then takes the state at which such a step begins for that at the end of its block."""
    done = subprocess.run(
        [interpreter(), "-P", "-c", CHECKS], env=environment(None), capture_output=True, text=True, check=True
    )
    assert "leave out --prefix-match-unit" in done.stdout.splitlines()[-1]


def test_prompts_that_part_share_the_states_where_they_part(
    daemon: CacheDaemon, runs: EngineRuns, tmp_path: Path
) -> None:
    """VLLM keeps states where a prompt parts from an earlier one, and a later engine continues a third prompt there."""
    model = written(CONVOLUTIONS, tmp_path)
    common = random_tokens("common", SHARED)
    first, second, third = (common + random_tokens(f"end {number}", 5) for number in range(3))
    expected = alone(runs.run(model, [[third]], **CONVOLUTIONS.options))
    # With so few tokens in a step, the second prompt begins when the first is computed.
    options = CONVOLUTIONS.options | {"max_num_batched_tokens": BLOCK_SIZE}
    runs.run(model, [[first, second]], name="parting", **options)
    daemon.until_idle()
    answers = alone(runs.run(model, [[third]], name="parting", **CONVOLUTIONS.options))
    assert_same(answers, expected)
    assert cached(answers) == [SHARED * BLOCK_SIZE]


def test_states_at_every_step_are_stored_if_vllm_keeps_them(
    daemon: CacheDaemon, runs: EngineRuns, tmp_path: Path
) -> None:
    """With states at more boundaries, a hit of a prompt that parts from a stored one ends at the last before that."""
    model = written(CONVOLUTIONS, tmp_path)
    options = CONVOLUTIONS.options | {
        "prefix_cache_retention_interval": 2 * BLOCK_SIZE,
        "max_num_batched_tokens": 2 * BLOCK_SIZE,
    }
    expected = alone(runs.run(model, ALONE, **options))
    answers = alone(runs.run(model, ALONE, name="dense", **options))
    assert_same(answers, expected)
    assert cached(answers) == [0] * (len(PROMPTS) - 1) + [SHARED // 2 * 2 * BLOCK_SIZE]


def test_requests_that_lose_their_blocks_compute_the_same(
    daemon: CacheDaemon, runs: EngineRuns, tmp_path: Path
) -> None:
    """With few blocks, vLLM preempts requests, and stores hold what it lacks: each answer is the same all the same."""
    model = written(CONVOLUTIONS, tmp_path)
    options = CONVOLUTIONS.options | {"num_gpu_blocks_override": 72, "max_num_batched_tokens": 3 * BLOCK_SIZE}
    expected = alone(runs.run(model, ALONE, **options))
    for _ in range(2):
        together = runs.run(model, [PROMPTS, *ALONE, PROMPTS], name="few", **options)
        assert_same(alone(together[1:-1]), expected)
        for turn in (together[0], together[-1]):
            assert [answer.tokens for answer in turn] == [answer.tokens for answer in expected]
        daemon.until_idle()
    assert cached(alone(together[1:-1])) == [CONVOLUTIONS.hit(len(prompt)) for prompt in PROMPTS]
