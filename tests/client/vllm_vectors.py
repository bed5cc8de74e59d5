"""Makes `vllm_vectors.json` by vLLM's own code.

In an environment that has vLLM and xxhash: python tests/client/vllm_vectors.py > tests/client/vllm_vectors.json
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import vllm
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import Request

ALGORITHMS = ("sha256_cbor", "xxhash_cbor")
SEEDS = (None, "0", "kvcached: naïve seed")
LORA = ("sql-adapter", "/models/sql-adapter")
#: Block size, prompt, cache_salt, adapter. Every width of an integer is among the tokens.
PROMPTS: tuple[tuple[int, list[int], str, tuple[str, str] | None], ...] = (
    (4, [0, 23, 24, 255, 256, 65_535, 65_536, (1 << 31) - 1, 7], "", None),
    (4, list(range(16)), "tenant-é", None),
    (4, list(range(16)), "", LORA),
    (4, list(range(16)), "tenant", LORA),
    (32, [(7 * place) % 151_936 for place in range(100)], "", None),
    (300, list(range(600)), "x" * 300, LORA),
    (16, list(range(15)), "", None),
)


def hashes(algorithm: str, seed: str | None, prompt: tuple[int, list[int], str, tuple[str, str] | None]) -> list[str]:
    """What vLLM calls the full blocks of a prompt."""
    block_size, tokens, salt, lora = prompt
    os.environ.pop("PYTHONHASHSEED", None)
    if seed is not None:
        os.environ["PYTHONHASHSEED"] = seed
    function = get_hash_fn_by_name(algorithm)
    kv_cache_utils.init_none_hash(function)
    request = Request(
        request_id="r",
        prompt_token_ids=tokens,
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
        lora_request=LoRARequest(lora[0], 1, lora[1]) if lora is not None else None,
        cache_salt=salt or None,
        block_hasher=kv_cache_utils.get_request_block_hasher(block_size, function),
    )
    return [block.hex() for block in request.block_hashes]


def main() -> None:
    """Print the vectors."""
    vectors: list[dict[str, Any]] = []
    for algorithm in ALGORITHMS:
        for seed in SEEDS:
            if seed is None and algorithm.startswith("xxhash"):
                continue  # random
            for prompt in PROMPTS if seed is None else PROMPTS[:4]:
                block_size, tokens, salt, lora = prompt
                vectors.append(
                    {
                        "algorithm": algorithm,
                        "seed": seed,
                        "block_size": block_size,
                        "tokens": tokens,
                        "salt": salt,
                        "lora": lora,
                        "hashes": hashes(algorithm, seed, prompt),
                    }
                )
    lines = ",\n".join(json.dumps(vector, separators=(",", ":")) for vector in vectors)
    made_by = json.dumps(f"vLLM {vllm.__version__}, tests/client/vllm_vectors.py")
    sys.stdout.write(f'{{"made_by":{made_by},\n"vectors":[\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
