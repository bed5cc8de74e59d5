"""One SGLang engine that does what it is told: JSON lines on stdin, an answer to each on stdout. Imported by nobody.

    python -P benchmarks/sglang_engine.py '{"model_path": FOLDER, …}'

Runs in SGLang's environment, away from the checkout, so that kvcached-client is imported from where it is installed.
The first line out tells that it is ready. A command is ``{"prompts": [[…], …], "tokens": N}``: all at once, greedily.
When stdin ends, it ends once all pages are stored.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Final

import sglang

#: SGLang refuses to drop its pages while it copies some, and has no event for the end of that.
_STORE_TIMEOUT_S: Final = 60
_RETRY_S: Final = 0.05


def generate(engine: sglang.Engine, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Complete all prompts.

    Returns:
        Seconds until the last token, and until the first one of each prompt; tokens of all prompts that were cached in
        any way, and those that came from the storage; what came out.
    """
    sampling = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
    start = perf_counter()

    async def complete(prompt: list[int]) -> tuple[float, dict[str, Any]]:
        first_s, last = 0.0, {}
        async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
            first_s, last = first_s or perf_counter() - start, answer
        return first_s, last

    async def complete_all() -> list[tuple[float, dict[str, Any]]]:
        return await asyncio.gather(*map(complete, prompts))

    answers = engine.loop.run_until_complete(complete_all())
    seconds = perf_counter() - start
    told = [answer["meta_info"] for _, answer in answers]
    return {
        "seconds": seconds,
        "first_token_seconds": [first_s for first_s, _ in answers],
        "cached_tokens": sum(each["cached_tokens"] for each in told),
        "storage_tokens": sum((each.get("cached_tokens_details") or {}).get("storage", 0) for each in told),
        "tokens": [answer["output_ids"] for _, answer in answers],
    }


def _settle(engine: sglang.Engine) -> None:
    """Until all pages are stored."""
    end = perf_counter() + _STORE_TIMEOUT_S
    while not engine.flush_cache().success:
        if perf_counter() > end:
            raise TimeoutError(f"pages are still copied after {_STORE_TIMEOUT_S} s")
        time.sleep(_RETRY_S)


@contextmanager
def _answers() -> Iterator[Callable[[dict[str, Any]], None]]:
    """Answers go to stdout; whatever else is written there goes to stderr, as SGLang logs to stdout."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as stdout:
        os.dup2(2, 1)

        def answer(document: dict[str, Any]) -> None:
            stdout.write(json.dumps(document) + "\n")
            stdout.flush()

        yield answer


def main() -> None:
    """Start the engine and carry out commands until stdin ends."""
    with _answers() as answer:
        engine = sglang.Engine(**json.loads(sys.argv[1]))
        answer({})
        for line in sys.stdin:
            answer(generate(engine, **json.loads(line)))
        _settle(engine)
        engine.shutdown()


if __name__ == "__main__":
    main()
