"""The replay of recorded requests under each eviction policy."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.eviction_command import CAPACITIES_PERCENT, Options, hit_percent, parse, run
from benchmarks.replay_trace import RECORDED_BLOCK_TOKENS, TRACE, read_trace
from kvcached.core.eviction.by_priority import POLICIES


def trace_of(folder: Path, *prompts: list[int]) -> Path:
    """A trace of prompts of full blocks."""
    path = folder / "trace.jsonl.gz"
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for at, ids in enumerate(prompts):
            tokens = len(ids) * RECORDED_BLOCK_TOKENS
            file.write(
                json.dumps({"timestamp": at, "input_length": tokens, "output_length": 1, "hash_ids": ids}) + "\n"
            )
    return path


def test_eviction_replay_counts_block_hits(tmp_path: Path) -> None:
    """A pool that holds everything hits what was there before; one that holds no prompt hits nothing."""
    requests = read_trace(trace_of(tmp_path, [1, 2, 3], [1, 2, 4], [9]))

    for policy in POLICIES:
        assert hit_percent(requests, policy, 100) == 100 * 2 / 7
        assert hit_percent(requests, policy, 1) == 0


def test_eviction_replay_tells_each_policy_at_each_size(tmp_path: Path) -> None:
    """There is a result for every policy and size of the pool, beside that of lru."""
    prompts = [[number // 2, number // 2 + 1000] for number in range(1200)]  # each comes twice
    results = list(run(Options(trace_of(tmp_path, *prompts), json=False)))

    assert len(results) == len(POLICIES) * len(CAPACITIES_PERCENT)
    assert parse([]).trace == TRACE
