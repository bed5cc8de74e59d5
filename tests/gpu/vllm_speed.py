"""What kvcached gives vLLM on a device, and what it takes: ``python -m tests.gpu.vllm_speed``.

Needs vLLM beside what kvcached needs. Two engines of a model in the shape of a large one, whose weights mean nothing,
take turns, one of them with a connector. In each round, in an order that changes, both answer a new long prompt, and
the same again; then the one with the connector forgets its own prefix cache, and has the prompt from the host pool.
Both answer many new prompts at once, of which nothing is found anywhere: what that takes longer is what kvcached costs.

JSON on stdout: each figure is the best of all rounds, and the median; ratios are of both. stderr gets each round, too.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable
from statistics import median
from typing import Final

from tests.gpu.vllm_answers import tokens_of
from tests.gpu.vllm_engine import GIB, GRAPHS, OPTIONS, Engine, Place, Report, connected, describe_model, place
from tests.vllm.tiny_model import Shape

_LAYERS, _HEADS, _HEADS_OF_A_KV_HEAD, _HEAD_DIM = 32, 32, 4, 128
#: A long prompt has so many times the tokens of each of many short ones.
_TIMES_LONGER: Final = 8
_PROMPTS, _ANSWER_TOKENS = 32, 64
_TRIALS: Final = ("computed", "own_cache", "unknown_prompts")
_WHICH: Final[dict[str, Callable[[list[float]], float]]] = {"best": min, "median": median}


class Rounds:
    """Of two engines that take turns.

    Args:
        where: the place.
        shape: of the model.
        options: of both engines.
        tokens: of a long prompt.
    """

    def __init__(self, where: Place, shape: Shape, options: Report, tokens: int) -> None:
        folder = where.folder / "large"
        describe_model(folder, shape.config() | {"max_position_embeddings": 2 * tokens})
        lengths = {"max_model_len": tokens + _ANSWER_TOKENS, "max_num_batched_tokens": tokens}
        options = options | lengths | {"model": str(folder), "load_format": "dummy"}
        self._tokens = tokens
        self._source = random.Random(3)
        self._with = where.forks.start(connected(options, "KvcachedConnector", {"weights_version": "large"}))
        self._without = where.forks.start(options)
        self._seconds: dict[str, list[float]] = {}
        self._found: list[int] = []

    def run(self, number: int) -> None:
        """One round. The first one, 0, warms up, and does not count."""
        engines = [("with", self._with), ("without", self._without)]
        taken: dict[str, float] = {}
        for name, engine in engines if number % 2 else engines[::-1]:
            long = [tokens_of(self._source, self._tokens)]
            many = [tokens_of(self._source, self._tokens // _TIMES_LONGER) for _ in range(_PROMPTS)]
            taken |= {f"{trial}_{name}": self._time(engine, long) for trial in _TRIALS[:2]}
            if engine is self._with:
                taken["host_pool_with"] = self._time(engine, long, forget=True)
            taken[f"{_TRIALS[2]}_{name}"] = self._time(engine, many, tokens=_ANSWER_TOKENS)
        sys.stderr.write(f"round {number}: {json.dumps(taken)}\n")
        if number:
            for trial, seconds in taken.items():
                self._seconds.setdefault(trial, []).append(seconds)

    def report(self) -> Report:
        """Milliseconds, and ratios of the engine with a connector to the one without."""
        all_ms = {trial: [1e3 * each for each in seconds] for trial, seconds in self._seconds.items()}
        ms = {trial: {name: which(some) for name, which in _WHICH.items()} for trial, some in all_ms.items()}
        ratios = {
            trial: {name: ms[f"{trial}_with"][name] / ms[f"{trial}_without"][name] for name in _WHICH}
            for trial in _TRIALS
        }
        found = {"prompt_tokens": self._tokens, "found_of_a_prompt": min(self._found)}
        return found | {"ms": ms, "with_over_without": ratios, "rounds_ms": all_ms}

    def close(self) -> None:
        """End the engines."""
        self._with.stop()
        self._without.stop()

    def _time(self, engine: Engine, prompts: list[list[int]], *, tokens: int = 1, forget: bool = False) -> float:
        turn = engine.ask(prompts, tokens=tokens, forget=forget, at_once=True, words=False)
        if forget:
            self._found.append(turn["answers"][0]["cached"])
        (seconds,) = turn["seconds"]
        return float(seconds)


def main() -> int:
    """All rounds."""
    parser = argparse.ArgumentParser(description="vLLM's times on a device, with and without kvcached")
    parser.add_argument("--rounds", type=int, default=10, help="behind one that warms up (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=8192, help="of a long prompt (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=_LAYERS, help="of the model (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=_HEADS, help="of the model (default: %(default)s)")
    parser.add_argument("--cache-gib", type=float, default=8, help="of each engine's own (default: %(default)s)")
    parser.add_argument("--host-gib", type=float, default=16, help="of the host pool (default: %(default)s)")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error("--rounds must be at least 1")
    shape = Shape(arguments.layers, arguments.heads, arguments.heads // _HEADS_OF_A_KV_HEAD, _HEAD_DIM)
    options = OPTIONS | GRAPHS | {"max_num_seqs": 64, "kv_cache_memory_bytes": int(arguments.cache_gib * GIB)}
    with place(host_gib=arguments.host_gib, device_gib=0) as where:
        rounds = Rounds(where, shape, options, arguments.tokens)
        for number in range(arguments.rounds + 1):
            rounds.run(number)
        report = {"layers": arguments.layers} | rounds.report()
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        sys.stdout.flush()  # before the engines end: what is told is not lost with them
        rounds.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
