"""vLLM's hashes without vLLM: the same as vLLM's own, which `vllm_vectors.py` has stored."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvcached_client import BadRequest
from kvcached_client.vllm.keys import ALGORITHMS, DEFAULT_SEED, VllmHashing, block_hashes, block_keys

STORED: dict[str, Any] = json.loads(Path(__file__).with_name("vllm_vectors.json").read_text())
VECTORS: list[dict[str, Any]] = STORED["vectors"]
TOKENS = list(range(16))
HASHING = VllmHashing(block_size=4)


def hashing_of(vector: dict[str, Any]) -> VllmHashing:
    return VllmHashing(block_size=vector["block_size"], algorithm=vector["algorithm"], seed=vector["seed"])


def lora_of(vector: dict[str, Any]) -> tuple[str, str] | None:
    return None if vector["lora"] is None else (vector["lora"][0], vector["lora"][1])


@pytest.mark.parametrize("vector", VECTORS)
def test_hashes_are_those_of_vllm(vector: dict[str, Any]) -> None:
    """Algorithms, seeds, salts, adapters, block sizes and every width of an integer give vLLM's hashes."""
    hashes = block_hashes(vector["tokens"], hashing_of(vector), salt=vector["salt"], lora=lora_of(vector))

    assert [each.hex() for each in hashes] == vector["hashes"]


def test_vectors_cover_the_algorithms_and_say_who_made_them() -> None:
    """Each algorithm that is computed here has vectors, made by a vLLM that is named."""
    assert {vector["algorithm"] for vector in VECTORS} == set(ALGORITHMS)
    assert STORED["made_by"].startswith("vLLM 0.")


def test_keys_are_the_first_16_bytes_of_hashes() -> None:
    """A block's key is what the connector sends: the beginning of its hash."""
    hashes = block_hashes(TOKENS, HASHING, salt="s")

    assert block_keys(TOKENS, HASHING, salt="s") == b"".join(each[:16] for each in hashes)
    assert block_keys(TOKENS[:3], HASHING) == b""


def test_the_default_seed_is_that_of_an_engine_without_pythonhashseed() -> None:
    """Naming vLLM's default seed is the same as naming none."""
    assert block_keys(TOKENS, HASHING) == block_keys(TOKENS, replace(HASHING, seed=DEFAULT_SEED))


@pytest.mark.parametrize(
    ("hashing", "fix"),
    [
        (replace(HASHING, algorithm="sha256"), "--prefix-caching-hash-algo sha256_cbor"),
        (replace(HASHING, algorithm="xxhash", seed="0"), "--prefix-caching-hash-algo sha256_cbor"),
        (replace(HASHING, algorithm="xxhash_cbor"), "PYTHONHASHSEED"),
        (replace(HASHING, algorithm="md5"), "sha256_cbor, xxhash_cbor"),
        (replace(HASHING, block_size=0), "at least one token"),
    ],
)
def test_what_cannot_be_computed_is_refused_with_a_fix(hashing: VllmHashing, fix: str) -> None:
    """Pickled and random hashes are refused, and the message says how to start the engine instead."""
    with pytest.raises(BadRequest) as caught:
        block_keys(TOKENS, hashing)

    assert fix in caught.value.fix


@pytest.mark.parametrize("salt", ["\ud800", "a\udfffb"])
def test_text_that_is_no_unicode_is_refused(salt: str) -> None:
    """A salt that vLLM could not have hashed is refused as the caller's mistake."""
    with pytest.raises(BadRequest):
        block_keys(TOKENS, HASHING, salt=salt)
