"""The published vectors, recomputed by the package both ways and by an independent reading of the definition."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kvcached_client.keys import KeyChain, chain_root, namespace_root
from tests.keys import reference

_VECTORS = json.loads(Path(__file__).with_name("vectors.json").read_text(encoding="utf-8"))


def _by_name(vectors: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", vectors, ids=[vector["name"] for vector in vectors])


def _spans(vector: dict[str, Any]) -> list[reference.Span]:
    return [
        reference.Span(
            item["id"] if isinstance(item["id"], str) else bytes.fromhex(item["id"]["hex"]),
            item["start"],
            item["length"],
        )
        for item in vector["items"]
    ]


@_by_name(_VECTORS["namespaces"])
def test_namespace_vector_is_the_root_of_its_arguments(vector: dict[str, Any]) -> None:
    """The package derives the published root."""
    assert namespace_root(**vector["arguments"]).hex() == vector["root"]


@_by_name(_VECTORS["namespaces"])
def test_namespace_vector_follows_from_the_definition(vector: dict[str, Any]) -> None:
    """The documented encoding and the library's BLAKE3 alone give the published root."""
    assert reference.namespace_root(**vector["arguments"]).hex() == vector["root"]


@_by_name(_VECTORS["chains"])
def test_chain_vector_has_the_keys_of_its_tokens(vector: dict[str, Any], hashing: str) -> None:
    """The package computes the published root and keys, with the native helper and without it."""
    namespace = bytes.fromhex(vector["namespace"])
    chain = KeyChain(
        namespace, vector["block_size"], lora=vector["lora"], salt=vector["salt"], algorithm=vector["algorithm"]
    )
    for span in _spans(vector):
        chain.add_item(*span)
    chain.extend(vector["tokens"])
    assert chain_root(namespace, lora=vector["lora"], salt=vector["salt"]).hex() == vector["root"]
    assert chain.keys.hex() == "".join(vector["keys"])


@_by_name(_VECTORS["chains"])
def test_chain_vector_follows_from_the_definition(vector: dict[str, Any]) -> None:
    """The documented encoding and the libraries' hashes alone give the published root and keys."""
    root = reference.chain_root(bytes.fromhex(vector["namespace"]), vector["lora"], vector["salt"])
    keys = reference.keys(root, vector["tokens"], vector["block_size"], _spans(vector), vector["algorithm"])
    assert root.hex() == vector["root"]
    assert [key.hex() for key in keys] == vector["keys"]


def test_vectors_are_those_of_the_worked_example_in_the_document() -> None:
    """docs/keys.md prints the roots and keys of the first vectors."""
    document = (Path(__file__).parents[2] / "docs" / "keys.md").read_text(encoding="utf-8")
    namespace, chain = _VECTORS["namespaces"][0], _VECTORS["chains"][0]
    for value in (namespace["root"], chain["root"], *chain["keys"]):
        assert value in document
