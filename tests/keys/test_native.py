"""The native helper against the library it stands in for."""

from __future__ import annotations

import threading
from random import Random

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_128_digest

native = pytest.importorskip("kvcached_client._native_keys", reason="the native helper was not built")

_ROOT = bytes(range(32))


@given(st.binary(min_size=32, max_size=32), st.integers(1, 256), st.integers(0, 5), st.randoms(use_true_random=False))
def test_native_agrees_with_the_library(parent: bytes, block_size: int, blocks: int, random: Random) -> None:
    """Any parent, block size and contents chain to the keys and the state that the library's keyed hash gives."""
    data = random.randbytes(4 * block_size * blocks)
    keys, state = b"", parent
    for start in range(0, len(data), 4 * block_size):
        state = blake3(data[start : start + 4 * block_size], key=state).digest()
        keys += state[:16]
    assert native.blake3_blocks(parent, data, block_size) == (keys, state)


@given(st.binary(min_size=16, max_size=16), st.integers(1, 56), st.integers(0, 5), st.randoms(use_true_random=False))
def test_native_xxh3_agrees_with_the_library(parent: bytes, block_size: int, blocks: int, random: Random) -> None:
    """The same for xxh3 and every block size that the helper hashes."""
    data = random.randbytes(4 * block_size * blocks)
    keys, state = b"", parent
    for start in range(0, len(data), 4 * block_size):
        state = xxh3_128_digest(state + data[start : start + 4 * block_size])
        keys += state
    assert native.xxh3_blocks(parent, data, block_size) == (keys, state)


def test_native_serves_threads_at_once() -> None:
    """Long prompts, hashed without the GIL by four threads at once, give the keys of one thread."""
    data = bytes(4 * 131_072)
    expected = native.blake3_blocks(_ROOT, data, 16)
    found: list[tuple[bytes, bytes]] = []
    threads = [threading.Thread(target=lambda: found.append(native.blake3_blocks(_ROOT, data, 16))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [expected] * 4


@pytest.mark.parametrize(
    ("parent", "data", "block_size"),
    [(b"short", b"", 16), (_ROOT, b"", 0), (_ROOT, b"", -1), (_ROOT, b"", 257), (_ROOT, bytes(63), 16)],
)
def test_native_refuses_what_it_cannot_hash(parent: bytes, data: bytes, block_size: int) -> None:
    """A parent, block size or length outside the contract raises instead of reading past a buffer."""
    with pytest.raises(ValueError, match=r"parent has|block_size|whole blocks"):
        native.blake3_blocks(parent, data, block_size)


@pytest.mark.parametrize(("parent", "data", "block_size"), [(bytes(32), b"", 16), (bytes(16), b"", 57)])
def test_native_xxh3_refuses_what_it_cannot_hash(parent: bytes, data: bytes, block_size: int) -> None:
    """A parent of another length or a block that is too large for one go raises."""
    with pytest.raises(ValueError, match=r"parent has|block_size"):
        native.xxh3_blocks(parent, data, block_size)
