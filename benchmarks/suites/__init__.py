"""The suites. Each is a module with ``run(rounds: int) -> Iterator[Result]``, imported only when it is asked for."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Final, cast

from benchmarks.result import Result

#: Name on the command line and in results, and the module behind it.
SUITES: Final[dict[str, str]] = {
    "copy": "benchmarks.suites.copy",
    "cuda": "benchmarks.suites.cuda",
    "door": "benchmarks.suites.door",
    "events": "benchmarks.suites.events",
    "faults": "benchmarks.suites.faults",
    "floods": "benchmarks.suites.floods",
    "hash": "benchmarks.suites.block_keys",
    "index": "benchmarks.suites.index",
    "looking": "benchmarks.suites.looking",
    "request": "benchmarks.suites.request",
    "rpc": "benchmarks.suites.rpc",
    "saturation": "benchmarks.suites.saturation",
    "sglang": "benchmarks.suites.sglang",
    "storage": "benchmarks.suites.storage",
    "vllm": "benchmarks.suites.vllm",
    "vllm-hits": "benchmarks.suites.vllm_hits",
    "vllm-queue": "benchmarks.suites.vllm_queue",
}
#: Those that need nothing but the development environment, and wait for nothing: `cuda` needs a device, `faults` does
#: little but wait, `door` and `floods` take every processor, and the others need vLLM or SGLang.
_ASKED_FOR: Final = frozenset({"cuda", "door", "faults", "floods", "sglang", "vllm", "vllm-hits", "vllm-queue"})
DEFAULT_SUITES: Final = tuple(name for name in SUITES if name not in _ASKED_FOR)


def load_suite(name: str) -> Callable[[int], Iterator[Result]]:
    """The `run` function of a suite; KeyError if there is none of that name."""
    return cast("Callable[[int], Iterator[Result]]", importlib.import_module(SUITES[name]).run)
