"""vLLM's block keys, computed without vLLM, for tools that explain why a prompt missed.

vLLM hashes each full block together with the hash of the block before it and everything else that distinguishes
prompts. This module computes the algorithms that serialise as CBOR, which give the same hashes everywhere. The others
serialise as pickle, whose bytes depend on the versions of Python and vLLM; they are not supported. A block's key is the
first 16 bytes of its hash. Checked against hashes that vLLM 0.32 made (`tests/client/vllm_vectors.json`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from xxhash import xxh3_128_digest

from kvcached_client.errors import bad_value
from kvcached_client.keys import Tokens, pack_tokens
from kvcached_client.types import KEY_SIZE_BYTES, PackedKeys

#: vLLM derives the first block's parent from this if PYTHONHASHSEED is not set and the algorithm is cryptographic.
DEFAULT_SEED: Final = "vllm-none-hash"
#: Algorithms that serialise as pickle.
PICKLED_ALGORITHMS: Final = ("sha256", "xxhash")
#: Algorithms whose first parent is random unless PYTHONHASHSEED is set.
SECRET_SEED_ALGORITHMS: Final = ("xxhash", "xxhash_cbor")

_ALGORITHMS: Final[dict[str, Callable[[bytes], bytes]]] = {
    "sha256_cbor": lambda data: hashlib.sha256(data).digest(),
    "xxhash_cbor": xxh3_128_digest,
}
ALGORITHMS: Final = tuple(_ALGORITHMS)

_Value = int | bytes | str | None | Sequence["_Value"]


@dataclass(frozen=True, slots=True)
class VllmHashing:
    """An engine's hash settings, the same for all its requests.

    Attributes:
        block_size: tokens in a block.
        algorithm: vLLM's ``--prefix-caching-hash-algo``.
        seed: value of PYTHONHASHSEED in the engine; None if it is not set.
    """

    block_size: int
    algorithm: str = "sha256_cbor"
    seed: str | None = None


def block_keys(
    tokens: Tokens, hashing: VllmHashing, *, salt: str = "", lora: tuple[str, str] | None = None
) -> PackedKeys:
    """The keys of a prompt's full blocks, 16 bytes each.

    Args:
        tokens: tokens of the prompt; text only.
        hashing: the engine's hash settings.
        salt: the request's ``cache_salt``; "" for none.
        lora: name and path of the request's adapter.

    Raises:
        BadRequest: the algorithm cannot be computed here, its seed is unknown, or a value is malformed.
    """
    return PackedKeys(b"".join(block[:KEY_SIZE_BYTES] for block in block_hashes(tokens, hashing, salt=salt, lora=lora)))


def block_hashes(
    tokens: Tokens, hashing: VllmHashing, *, salt: str = "", lora: tuple[str, str] | None = None
) -> list[bytes]:
    """VLLM's whole hashes of a prompt's full blocks, as `block_keys` takes them."""
    if hashing.block_size < 1:
        raise bad_value(f"block size {hashing.block_size}", "blocks have at least one token")
    digest, parent = _start(hashing)
    every: list[_Value] = [("lora", *lora)] if lora is not None else []
    first: list[_Value] = [("cache_salt", salt)] if salt else []
    ids: list[int] = np.frombuffer(pack_tokens(tokens), "<i4").tolist()
    hashes: list[bytes] = []
    for end in range(hashing.block_size, len(ids) + 1, hashing.block_size):
        extra = every if hashes else every + first
        parent = digest(_cbor((parent, ids[end - hashing.block_size : end], extra or None)))
        hashes.append(parent)
    return hashes


def _start(hashing: VllmHashing) -> tuple[Callable[[bytes], bytes], bytes]:
    """The hash function, and the parent of the first block."""
    name = hashing.algorithm
    if name in PICKLED_ALGORITHMS:
        raise bad_value(
            f"hashes of {name!r} depend on pickle, and so on the engine's Python and vLLM",
            "start vLLM with --prefix-caching-hash-algo sha256_cbor",
        )
    if name not in _ALGORITHMS:
        raise bad_value(f"hash algorithm {name!r}", f"one of {', '.join(ALGORITHMS)}")
    seed = hashing.seed
    if seed is None:
        if name in SECRET_SEED_ALGORITHMS:
            raise bad_value(
                f"without PYTHONHASHSEED every engine begins its hashes of {name!r} at random",
                "set PYTHONHASHSEED for the engines and name its value, or use sha256_cbor",
            )
        seed = DEFAULT_SEED
    digest = _ALGORITHMS[name]
    return digest, digest(_cbor(seed))


def _cbor(value: _Value) -> bytes:
    """Canonical CBOR (RFC 8949): of integers, bytes, text, nothing, and sequences of these."""
    if value is None:
        return b"\xf6"
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        try:
            text = value.encode()
        except UnicodeEncodeError as error:
            raise bad_value(f"{value!r} cannot enter a hash: {error}", "use UTF-8 text") from None
        return _head(3, len(text)) + text
    return _head(4, len(value)) + b"".join(map(_cbor, value))


def _head(kind: int, number: int) -> bytes:
    """The head of a CBOR item: its kind, and its size or value, in as few bytes as possible."""
    if number < 24:  # noqa: PLR2004 - fits into the byte of the kind
        return bytes([kind << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * size:
            return bytes([kind << 5 | code]) + number.to_bytes(size, "big")
    raise bad_value(f"{number} in a hash", "use integers of 64 bits")
