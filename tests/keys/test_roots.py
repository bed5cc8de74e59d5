"""What enters the roots, and that nothing else can stand in for it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.errors import BadRequest
from kvcached_client.keys import KeyChain, chain_root, encode_fields, namespace_root
from tests.keys import reference

_IDENTITY: dict[str, Any] = {
    "model": "model",
    "revision": "main",
    "layout_fingerprint": "0" * 32,
    "block_size": 4,
    "shards": 2,
    "algorithm": "blake3",
    "generation": 0,
}
_FIELD = st.integers(-(1 << 63), (1 << 63) - 1) | st.text(max_size=12) | st.binary(max_size=12)


@given(st.lists(_FIELD, max_size=4), st.lists(_FIELD, max_size=4))
def test_encoding_is_injective(first: list[int | str | bytes], second: list[int | str | bytes]) -> None:
    """Two lists of fields have one encoding only if they are equal in types and values."""
    same = [(type(field), field) for field in first] == [(type(field), field) for field in second]
    assert (encode_fields(*first) == encode_fields(*second)) == same


@given(st.text(max_size=6), st.text(max_size=6), st.integers(0, 6))
def test_encoding_tells_where_a_field_ends(first: str, second: str, cut: int) -> None:
    """Moving letters from one field to the next changes the encoding."""
    joined = first + second
    moved = (joined[:cut], joined[cut:])
    assert (encode_fields(*moved) == encode_fields(first, second)) == (moved == (first, second))


@given(st.lists(_FIELD, max_size=4))
def test_encoding_is_the_documented_one(fields: list[int | str | bytes]) -> None:
    """The bytes are tag, length and payload of every field in order."""
    assert encode_fields(*fields) == reference.fields(*fields)


@pytest.mark.parametrize("field", [1 << 63, -(1 << 63) - 1, "\ud800"])
def test_encoding_refuses_what_has_no_bytes(field: int | str) -> None:
    """Integers beyond 64 bits and lone surrogates are the caller's error."""
    with pytest.raises(BadRequest):
        encode_fields(field)


@pytest.mark.parametrize(
    "change",
    [
        {"model": "other"},
        {"revision": "v2"},
        {"layout_fingerprint": "1" * 32},
        {"block_size": 8},
        {"shards": 4},
        {"algorithm": "xxh3"},
        {"generation": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_namespace_root_changes_with_every_field_of_the_identity(change: dict[str, Any]) -> None:
    """A namespace that differs in one field shares no key with the other."""
    tokens = range(16)
    mine = KeyChain(namespace_root(**_IDENTITY), 4, tokens)
    other = KeyChain(namespace_root(**(_IDENTITY | change)), 4, tokens)
    assert not _keys(mine) & _keys(other)


def test_chain_root_keeps_adapters_and_tenants_apart() -> None:
    """The same tokens under another adapter or salt share no key, also where the two names are swapped."""
    namespace = namespace_root(**_IDENTITY)
    names = [("", ""), ("a", ""), ("", "a"), ("a", "a"), ("aa", ""), ("", "aa")]
    chains = [_keys(KeyChain(namespace, 4, range(16), lora=lora, salt=salt)) for lora, salt in names]
    assert len(frozenset().union(*chains)) == 4 * len(names)


def test_chain_root_is_never_the_namespace_root() -> None:
    """A request without adapter and salt starts at a root of its own too."""
    namespace = namespace_root(**_IDENTITY)
    assert chain_root(namespace) != namespace


@pytest.mark.parametrize("change", [{"block_size": 0}, {"shards": 0}, {"generation": -1}, {"algorithm": "md5"}])
def test_namespace_root_refuses_impossible_values(change: dict[str, Any]) -> None:
    """Sizes of zero, a negative generation and an unknown algorithm are the caller's error."""
    with pytest.raises(BadRequest):
        namespace_root(**(_IDENTITY | change))


@pytest.mark.parametrize("namespace", [b"", bytes(16), bytes(33)])
def test_chain_root_refuses_a_namespace_of_another_length(namespace: bytes) -> None:
    """A namespace root has 32 bytes."""
    with pytest.raises(BadRequest, match="32"):
        chain_root(namespace)


def _keys(chain: KeyChain) -> frozenset[bytes]:
    return frozenset(chain.key_range(block, block + 1) for block in range(chain.block_count))


@pytest.mark.parametrize("names", [{"lora": None}, {"salt": None}, {"lora": 1.5}, {"lora": 3}, {"salt": b"3"}])
def test_name_that_is_no_text_is_refused_with_what_to_do(names: dict[str, Any]) -> None:
    """None is no adapter and no salt, and 3 is not "3": the error says which name is of what type, and what to do."""
    ((name, value),) = names.items()
    words = f"{name} cannot enter a key: it is a {type(value).__name__} .*leave lora or salt out"
    with pytest.raises(BadRequest, match=words):
        KeyChain(bytes(32), 16, **names)
