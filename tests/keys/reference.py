"""Block keys a second time, straight from `docs/keys.md`, token by token: what the package is compared with."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

from blake3 import blake3
from xxhash import xxh3_128_digest


class Span(NamedTuple):
    """A multimodal item of a request: `length` tokens from `start` on."""

    item_id: str | bytes
    start: int
    length: int


def fields(*values: int | str | bytes) -> bytes:
    """The typed, length-prefixed encoding."""
    encoded = b""
    for value in values:
        if isinstance(value, int):
            encoded += b"i" + struct.pack("<Iq", 8, value)
        elif isinstance(value, str):
            encoded += b"s" + struct.pack("<I", len(value.encode())) + value.encode()
        else:
            encoded += b"b" + struct.pack("<I", len(value)) + value
    return encoded


def namespace_root(
    model: str, revision: str, layout_fingerprint: str, block_size: int, shards: int, algorithm: str, generation: int
) -> bytes:
    """32 bytes."""
    material = fields(model, revision, layout_fingerprint, block_size, shards, algorithm, generation)
    return blake3(material, derive_key_context="kvcached block keys v1: namespace root").digest()


def chain_root(namespace: bytes, lora: str, salt: str) -> bytes:
    """32 bytes."""
    return blake3(fields(namespace, lora, salt), derive_key_context="kvcached block keys v1: chain root").digest()


def message(tokens: Sequence[int], block: int, block_size: int, items: Sequence[Span]) -> bytes:
    """What is hashed for a block, after its parent."""
    first, after = block * block_size, (block + 1) * block_size
    encoded = b"".join(struct.pack("<i", token) for token in tokens[first:after])
    for item in items:
        if item.start < after and item.start + item.length > first:
            encoded += fields(item.item_id, item.start - first, item.length)
    return encoded


def keys(
    state: bytes, tokens: Sequence[int], block_size: int, items: Sequence[Span] = (), algorithm: str = "blake3"
) -> list[bytes]:
    """The 16-byte keys of the complete blocks of `tokens`, from a chain root on."""
    found = []
    for block in range(len(tokens) // block_size):
        body = message(tokens, block, block_size, items)
        state = xxh3_128_digest(state[:16] + body) if algorithm == "xxh3" else blake3(body, key=state).digest()
        found.append(state[:16])
    return found
