"""One vLLM engine that does what it is told: JSON lines on stdin, an answer to each on stdout. Not imported by anybody.

    python -P benchmarks/vllm_engine.py '{"model": FOLDER, …}'

Runs in vLLM's environment, away from the checkout, so that kvcached-client is imported from where it is installed. The
first line out tells that it is ready. A command is ``{"prompts": [[…], …], "tokens": N}``: all at once, greedily.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

from vllm import LLM, SamplingParams, TokensPrompt

#: vLLM refuses to drop its cache while blocks are held, as those are that a store reads; it has no event for the end.
_RESET_TIMEOUT_S: Final = 60
_RETRY_S: Final = 0.0005


def generate(engine: LLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Complete all prompts, then drop vLLM's own prefix cache.

    Returns:
        Seconds until the last token, and until nothing was left to store either; tokens of prompts that were cached;
        what came out.
    """
    sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
    start = perf_counter()
    outputs = engine.generate([TokensPrompt(prompt_token_ids=prompt) for prompt in prompts], sampling, use_tqdm=False)
    seconds = perf_counter() - start
    _reset(engine)
    return {
        "seconds": seconds,
        "settled_seconds": perf_counter() - start,
        "cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs),
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
    }


def _reset(engine: LLM) -> None:
    end = perf_counter() + _RESET_TIMEOUT_S
    while not engine.reset_prefix_cache():
        if perf_counter() > end:
            raise TimeoutError(f"blocks are still held after {_RESET_TIMEOUT_S} s")
        time.sleep(_RETRY_S)


@contextmanager
def _answers() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Answers go to stdout; whatever else is written there goes to stderr, as vLLM logs to stdout."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)

        def answer(document: dict[str, Any]) -> None:
            stdout.write(json.dumps(document) + "\n")
            stdout.flush()

        yield answer


def main() -> None:
    """Start the engine and carry out commands until stdin ends."""
    with _answers() as answer:
        engine = LLM(**json.loads(sys.argv[1]))
        answer({})
        for line in sys.stdin:
            answer(generate(engine, **json.loads(line)))


if __name__ == "__main__":
    main()
