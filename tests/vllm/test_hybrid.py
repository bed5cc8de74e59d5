"""Models whose groups of layers have caches of their own, with vLLM's hybrid cache manager on."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, ROUNDING, largest_difference, random_tokens
from tests.vllm.engine_runs import Answer, EngineRuns, engine_runs
from tests.vllm.server import environment, interpreter

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

WINDOW = 2 * BLOCK_SIZE
#: The daemon's default.
PREFETCH_THRESHOLD_BLOCKS = 4
#: In blocks: as long as the window, longer, and longer than two steps.
LENGTHS = (2, 3, 7, 12, 20)
SHARED = 9
PROMPTS = [random_tokens(f"hybrid {blocks}", blocks) for blocks in LENGTHS]
PROMPTS.append(PROMPTS[-1][: SHARED * BLOCK_SIZE] + random_tokens("another end", 5))
ALONE = [[prompt] for prompt in PROMPTS]


class Kind(NamedTuple):
    """A kind of engine: the model's family, options of vLLM, and tokens and blocks of which a hit is a multiple.

    With few blocks it is patient: a quarter of them may be held, and what a slow daemon leaves is not stored. Kernels
    may take fewer tokens than a block has. It is not exact where vLLM's kernels add in another order when a part of the
    prompt is there: on CPUs without AVX-512 they do so for wide heads.
    """

    family: str
    options: dict[str, Any]
    unit: int = BLOCK_SIZE
    blocks: int = 2
    is_patient: bool = False
    kernel_tokens: int = 0
    is_exact: bool = True

    @property
    def run(self) -> dict[str, Any]:
        """Arguments of `EngineRuns.run`."""
        return {"is_patient": self.is_patient, "kernel_tokens": self.kernel_tokens}

    def hit(self, tokens: int) -> int:
        """The longest hit of a prompt of so many tokens: the last token is computed."""
        return (tokens - 1) // self.unit * self.unit

    def hit_on_disk(self, tokens: int) -> int:
        """The same on disk, from which few blocks are not fetched."""
        hit = self.hit(tokens)
        return hit if hit // self.unit * self.blocks >= PREFETCH_THRESHOLD_BLOCKS else 0


FEW = {"num_gpu_blocks_override": 80, "max_num_batched_tokens": 96}
KINDS = {
    "windows beside full attention": Kind("gemma3", {}),
    "windows in larger blocks": Kind("gemma4", {}, 2 * BLOCK_SIZE, 3, is_exact=False),
    "windows only": Kind("mistral", {}, blocks=1),
    "attention sinks": Kind("gpt_oss", {"load_format": "dummy"}),
    "chunks": Kind("llama4", {}),
    "kernels of half a block": Kind(
        "mistral", {"hf_overrides": {"sliding_window": None}}, blocks=1, kernel_tokens=BLOCK_SIZE // 2
    ),
    "two shards": Kind("gemma3", {"tensor_parallel_size": 2}),
    "few blocks": Kind("gemma3", FEW, is_patient=True),
    "few blocks in two stages of two shards": Kind(
        "gemma3", FEW | {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}, is_patient=True
    ),
}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CacheDaemon]:
    """A daemon with storage."""
    daemon = CacheDaemon(tmp_path_factory.mktemp("hybrid"), slabs=64, has_storage=True)
    daemon.start()
    yield daemon
    daemon.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, daemon: CacheDaemon) -> Iterator[EngineRuns]:
    """Runs engines."""
    with engine_runs(tmp_path_factory.mktemp("engines") / "log", daemon.run_dir) as runs:
        yield runs


@pytest.mark.parametrize("name", KINDS)
def test_hits_after_restarts_come_to_what_vllm_computes(
    name: str, daemon: CacheDaemon, runs: EngineRuns, tmp_path: Path
) -> None:
    """What one engine stored others load from host memory, and from disk when the daemon is another one, too."""
    kind = KINDS[name]
    script = ("-m", "tests.vllm.tiny_hybrid", tmp_path, kind.family, "--window", str(WINDOW))
    subprocess.run([interpreter(), *script], cwd=ROOT, check=True)
    model = tmp_path / "model"
    expected = [turn[0] for turn in runs.run(model, ALONE, kernel_tokens=kind.kernel_tokens, **kind.options)]
    hits = [kind.hit(len(prompt)) for prompt in PROMPTS]
    shared = SHARED * BLOCK_SIZE // kind.unit * kind.unit

    first = runs.run(model, [*ALONE, *ALONE], name=name, **kind.run, **kind.options)
    answers = [turn[0] for turn in first]
    assert_same(answers, expected + expected, is_exact=kind.is_exact)
    assert [answer.cached for answer in answers] == [0] * len(LENGTHS) + [shared, *hits]
    daemon.until_idle()
    daemon.until(lambda stats: stats.counters["backed_up_blocks"] == stats.counters["stored_blocks"], "on disk")

    for is_cold in (False, True):
        if is_cold:
            daemon.stop()
            daemon.start()
            daemon.until_storage()
        again = runs.run(model, [*ALONE, PROMPTS], name=name, **kind.run, **kind.options)
        answers = [turn[0] for turn in again[:-1]]
        assert_same(answers, expected, is_exact=kind.is_exact)
        on_disk = [kind.hit_on_disk(len(prompt)) for prompt in PROMPTS]
        assert [answer.cached for answer in answers] == (on_disk if is_cold else hits)
        assert [answer.tokens for answer in again[-1]] == [answer.tokens for answer in expected]
        assert [answer.cached for answer in again[-1]] == hits
        daemon.until_idle()


#: Asks of kinds of layers whether vLLM keeps all blocks of a prompt for them, and whether they attend to what follows.
CHECKS = """
import torch
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec, MLAAttentionSpec, RSWASpec, SlidingWindowSpec, UniformTypeKVCacheSpecs
)
from kvcached_client.vllm.groups import keeps_all_blocks, looks_ahead

shape = {"block_size": 16, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float16}
whole = [FullAttentionSpec(**shape), MLAAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=4096)]
parts = [RSWASpec(**shape, rswa_window=32), SlidingWindowSpec(**shape, sliding_window=64)]
print([keeps_all_blocks(spec, 4096) for spec in [*whole, *parts]])
ahead = FullAttentionSpec(**shape, non_causal=True)
mixed = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs={"one": whole[0], "other": ahead})
print([looks_ahead(specs) for specs in [whole, parts, [*whole, ahead], [mixed]]])
"""


def test_what_layers_attend_to() -> None:
    """Windows that slide while a request runs leave blocks behind, also where vLLM calls them full attention.

    That a layer attends to tokens behind it is seen in any group, also in one whose layers differ.
    """
    done = subprocess.run(
        [interpreter(), "-P", "-c", CHECKS], env=environment(None), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-2:] == ["[True, True, True, False, False]", "[False, False, True, True]"]


def assert_same(answers: list[Answer], expected: list[Answer], *, is_exact: bool = True) -> None:
    """The same tokens with the same log-probabilities, to the last bit, or as sums in another order come out."""
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    if not is_exact:
        pairs = zip(answers, expected, strict=True)
        assert max(largest_difference(answer.logprobs, right.logprobs) for answer, right in pairs) < ROUNDING
        return
    assert [answer.logprobs for answer in answers] == [answer.logprobs for answer in expected]
