"""Suite ``hash``: keys of a cold prompt of 128k tokens in blocks of 16."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from unittest.mock import patch

import numpy as np
from blake3 import blake3

from benchmarks.result import Result, Target, judge
from benchmarks.timing import interleave
from kvcached_client import keys

_TOKEN_COUNT = 131_072
_BLOCK_SIZE = 16
_NAMESPACE = bytes(32)


def run(rounds: int) -> Iterator[Result]:
    """Measure both ways to the keys.

    ``prompt_128k_ms`` is what this installation does: without the native helper it takes the pure path, and misses.
    ``prompt_128k_pure_ms`` never uses the helper; its floor chains the library's hash over the same bytes and keeps
    nothing. ``prompt_128k_list_ms`` is the first one with the tokens in a Python list. ``prompt_128k_xxh3_ms`` is the
    first one with the other algorithm.
    """
    tokens = np.random.default_rng(0).integers(0, 128_256, _TOKEN_COUNT, dtype=np.int32)
    token_list, packed = tokens.tolist(), tokens.tobytes()

    def pure() -> None:
        with patch.object(keys, "native_blake3_blocks", None):
            keys.KeyChain(_NAMESPACE, _BLOCK_SIZE, tokens)

    seconds = interleave(
        {
            "installed": lambda: keys.KeyChain(_NAMESPACE, _BLOCK_SIZE, tokens),
            "list": lambda: keys.KeyChain(_NAMESPACE, _BLOCK_SIZE, token_list),
            "xxh3": lambda: keys.KeyChain(_NAMESPACE, _BLOCK_SIZE, tokens, algorithm="xxh3"),
            "pure": pure,
            "bare": lambda: _bare_loop(packed),
        },
        rounds,
    )
    best_ms = {name: min(measured) * 1e3 for name, measured in seconds.items()}
    yield judge("hash", "prompt_128k_ms", best_ms["installed"], "ms", target=Target("value", "<=", 1.2))
    yield judge("hash", "prompt_128k_xxh3_ms", best_ms["xxh3"], "ms", floor=best_ms["installed"])
    yield judge("hash", "prompt_128k_list_ms", best_ms["list"], "ms")
    yield judge(
        "hash", "prompt_128k_pure_ms", best_ms["pure"], "ms", floor=best_ms["bare"], target=Target("ratio", "<=", 1.2)
    )


def _bare_loop(packed: bytes) -> None:
    state = _NAMESPACE
    for (message,) in struct.iter_unpack(f"{4 * _BLOCK_SIZE}s", packed):
        state = blake3(message, key=state).digest()
