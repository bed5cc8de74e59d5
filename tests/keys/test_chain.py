"""Chains that grow, whatever their tokens come as."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client import keys
from kvcached_client.errors import BadRequest
from kvcached_client.keys import KeyChain, chain_root
from tests.client.test_interrupts import interrupted
from tests.keys import reference

_NAMESPACE = bytes(range(32))
_TOKENS = st.lists(st.integers(0, (1 << 31) - 1), max_size=200)
_ALGORITHMS = st.sampled_from(["blake3", "xxh3"])


@given(tokens=_TOKENS, block_size=st.integers(1, 20), cuts=st.lists(st.integers(0, 200)), algorithm=_ALGORITHMS)
def test_chain_is_the_same_however_it_grows(
    tokens: list[int], block_size: int, cuts: list[int], algorithm: str
) -> None:
    """Any split of the tokens into calls gives the keys of one call, which are those of the definition."""
    whole = KeyChain(_NAMESPACE, block_size, tokens, algorithm=algorithm)
    grown = KeyChain(_NAMESPACE, block_size, algorithm=algorithm)
    edges = sorted({0, len(tokens), *(min(cut, len(tokens)) for cut in cuts)})
    for start, stop in itertools.pairwise(edges):
        grown.extend(tokens[start:stop])
    expected = reference.keys(chain_root(_NAMESPACE), tokens, block_size, algorithm=algorithm)
    assert grown.keys == whole.keys == b"".join(expected)
    assert grown.token_count == whole.token_count == len(tokens)
    assert grown.block_count == len(expected)


@pytest.mark.skipif(keys.native_blake3_blocks is None, reason="the native helper was not built")
@pytest.mark.parametrize("algorithm", ["blake3", "xxh3"])
@given(block_size=st.integers(1, 256), count=st.integers(0, 2000), seed=st.integers(0, (1 << 31) - 1))
def test_chain_is_the_same_with_and_without_the_native_helper(
    algorithm: str, block_size: int, count: int, seed: int
) -> None:
    """Both paths give the same keys for any block size and length."""
    tokens = np.random.default_rng(seed).integers(0, 1 << 31, count, dtype=np.int32)
    fast = KeyChain(_NAMESPACE, block_size, tokens, algorithm=algorithm)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keys, f"native_{algorithm}_blocks", None)
        slow = KeyChain(_NAMESPACE, block_size, tokens, algorithm=algorithm)
    assert fast.keys == slow.keys


@pytest.mark.parametrize("count", [10, 500])
@pytest.mark.parametrize(
    "form",
    [
        tuple,
        range,
        lambda tokens: array("i", tokens),
        lambda tokens: array("q", tokens),
        lambda tokens: np.array(tokens, np.int32),
        lambda tokens: np.array(tokens, np.int64),
        lambda tokens: np.array(tokens, np.uint16),
        lambda tokens: np.array(tokens, ">i4"),
        lambda tokens: np.array([tokens, tokens], np.int32).T[:, 0],
        lambda tokens: list(np.array(tokens)),
        lambda tokens: np.array(tokens, "<i4").tobytes(),
        lambda tokens: bytearray(np.array(tokens, "<i4").tobytes()),
        lambda tokens: memoryview(np.array(tokens, "<i4").tobytes()),
        lambda tokens: np.array(tokens, np.int64).data,
    ],
    ids=[
        "tuple",
        "range",
        "array-int",
        "array-long",
        "int32",
        "int64",
        "uint16",
        "big-endian",
        "strided",
        "numpy-scalars",
        "bytes",
        "bytearray",
        "view-of-bytes",
        "view-of-integers",
    ],
)
def test_chain_takes_tokens_in_any_form(form: Callable[[Any], Any], count: int, hashing: str) -> None:
    """Sequences, arrays and packed bytes of the same tokens give the same keys."""
    tokens: list[int] | range = range(count) if form is range else list(range(count))
    made = form(count) if form is range else form(tokens)
    assert KeyChain(_NAMESPACE, 4, made).keys == KeyChain(_NAMESPACE, 4, list(range(count))).keys


@pytest.mark.parametrize(
    "tokens",
    [
        [-1],
        [1 << 31],
        [1 << 40],
        [1.0],
        [None],
        "text",
        [0] * 100 + [-1],
        [0] * 100 + [1 << 31],
        np.array([-1]),
        np.array([1 << 31]),
        np.array([1.0]),
        np.array([True]),
        np.zeros((2, 2), np.int32),
        np.array(5),
        array("i", [-5]),
        array("d", [0.0]),
        b"123",
        b"\xff\xff\xff\xff",
    ],
    ids=repr,
)
def test_chain_refuses_what_are_no_tokens_and_stays_as_it_was(tokens: Any) -> None:
    """Tokens outside 0..2^31-1, other types and shapes are the caller's error and leave the chain untouched."""
    chain = KeyChain(_NAMESPACE, 4, range(6))
    with pytest.raises(BadRequest):
        chain.extend(tokens)
    chain.extend([6, 7])
    assert chain.keys == KeyChain(_NAMESPACE, 4, range(8)).keys


@pytest.mark.parametrize("tokens", [(), [], b"", np.array([]), np.array([], np.int32)], ids=repr)
def test_chain_takes_no_tokens_at_all(tokens: Any) -> None:
    """An empty extension of any form changes nothing."""
    chain = KeyChain(_NAMESPACE, 4, tokens)
    assert (chain.keys, chain.token_count) == (b"", 0)


def test_chain_names_the_token_that_it_refuses() -> None:
    """The error carries the offending value and the range."""
    with pytest.raises(BadRequest, match=r"token 2147483648.*0 to 2147483647"):
        KeyChain(_NAMESPACE, 4, [1, 1 << 31])


def test_chain_counts_the_unfinished_block() -> None:
    """Tokens after the last complete block count as tokens, not as a block."""
    chain = KeyChain(_NAMESPACE, 16, range(17))
    assert (chain.block_size, chain.block_count, chain.token_count, len(chain.keys)) == (16, 1, 17, 16)


def test_chain_hands_out_ranges_of_keys() -> None:
    """`key_range` is a slice of `keys`, by block."""
    chain = KeyChain(_NAMESPACE, 2, range(8))
    assert chain.key_range(0, 4) == chain.keys
    assert chain.key_range(1, 3) == chain.keys[16:48]
    assert chain.key_range(4, 4) == b""


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 5)])
def test_chain_refuses_ranges_beyond_its_blocks(start: int, stop: int) -> None:
    """A range that leaves the complete blocks is the caller's error, never a short answer."""
    with pytest.raises(BadRequest, match="4 complete blocks"):
        KeyChain(_NAMESPACE, 2, range(9)).key_range(start, stop)


def test_chain_refuses_an_unknown_algorithm() -> None:
    """A daemon that names an algorithm of the future gets a clear error, not other keys."""
    with pytest.raises(BadRequest, match="sha512"):
        KeyChain(_NAMESPACE, 4, algorithm="sha512")


def test_chain_refuses_blocks_without_tokens() -> None:
    """A block has at least one token."""
    with pytest.raises(BadRequest, match="block_size 0"):
        KeyChain(_NAMESPACE, 0)


@pytest.mark.parametrize("algorithm", ["blake3", "xxh3"])
def test_fork_goes_on_by_itself(algorithm: str) -> None:
    """Both ends of a fork have the keys of their own tokens and items, whichever grows first."""
    first, more, other = list(range(10)), list(range(50, 57)), list(range(90, 99))
    chain = KeyChain(_NAMESPACE, 4, first, algorithm=algorithm)
    fork = chain.fork()
    chain.add_item("image", 12, 3)
    chain.extend(more)
    fork.extend(other)

    assert fork.keys == KeyChain(_NAMESPACE, 4, first + other, algorithm=algorithm).keys
    assert chain.keys != KeyChain(_NAMESPACE, 4, first + more, algorithm=algorithm).keys
    assert chain.block_count == 4
    assert not fork.splits_item(13)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40), st.booleans()), max_size=30))
def test_forks_share_keys_and_nothing_else(steps: list[tuple[int, int, bool]]) -> None:
    """However chains fork and grow, each has the keys of its own tokens, and any range of them."""
    chains: list[tuple[KeyChain, list[int]]] = [(KeyChain(_NAMESPACE, 2), [])]
    for which, count, forks in steps:
        chain, tokens = chains[which % len(chains)]
        if forks:
            chain, tokens = chain.fork(), tokens.copy()
            chains.append((chain, tokens))
        chain.extend(range(which, which + count))
        tokens.extend(range(which, which + count))
    for chain, tokens in chains:
        whole = KeyChain(_NAMESPACE, 2, tokens)
        blocks = whole.block_count
        assert (chain.keys, chain.block_count, chain.token_count) == (whole.keys, blocks, len(tokens))
        for start, stop in ((0, blocks // 3), (blocks // 3, blocks), (blocks // 2, blocks // 2), (blocks, blocks)):
            assert chain.key_range(start, stop) == whole.keys[16 * start : 16 * stop]


@given(st.lists(st.integers(0, 9), max_size=12), st.booleans())
def test_chain_gives_back_its_tokens(sizes: list[int], forks: bool) -> None:
    """However tokens come, the chain that keeps them has those of each complete block; one that does not has none."""
    chain, tokens = KeyChain(_NAMESPACE, 4, keeps_tokens=True), list[int]()
    for first, size in enumerate(sizes):
        if forks:
            other, chain = chain, chain.fork()
            other.extend([7] * 9)
        chain.extend(range(first, first + size))
        tokens.extend(range(first, first + size))

    blocks = chain.block_count
    for start, stop in ((0, blocks), (blocks // 2, blocks), (0, blocks // 3)):
        packed = chain.token_range(start, stop)
        assert packed is not None
        assert np.frombuffer(packed, "<i4").tolist() == tokens[4 * start : 4 * stop]
    assert KeyChain(_NAMESPACE, 4, tokens).token_range(0, blocks) is None
    with pytest.raises(BadRequest):
        chain.token_range(0, blocks + 1)


@pytest.mark.parametrize("names", [{"salt": "a"}, {"lora": "b"}])
def test_tokens_behind_a_salt_or_an_adapter_are_not_kept(names: dict[str, str]) -> None:
    """Their tokens alone name a prompt without salt and adapter."""
    assert KeyChain(_NAMESPACE, 4, range(8), keeps_tokens=True, **names).token_range(0, 2) is None


def test_tokens_from_the_first_item_on_are_unknown() -> None:
    """From the block of the first multimodal item on, tokens do not say what the prompt is: they are -1."""
    chain = KeyChain(_NAMESPACE, 4, range(4), keeps_tokens=True)
    chain.add_item("image", 9, 2)
    chain.extend(range(4, 16))

    packed = chain.token_range(1, 4)
    assert packed is not None
    assert np.frombuffer(packed, "<i4").tolist() == [4, 5, 6, 7, *[-1] * 8]


@pytest.mark.parametrize("has_items", [False, True])
def test_interrupted_extension_is_whole_or_has_not_been(has_items: bool) -> None:
    """Wherever an exception of a signal handler ends it, the chain goes on with all of the tokens or with none."""

    def begun() -> KeyChain:
        chain = KeyChain(_NAMESPACE, 4, keeps_tokens=True)
        if has_items:
            chain.add_item("image", 9, 6)
        chain.extend(range(6))
        return chain

    def state(chain: KeyChain) -> tuple[object, ...]:
        blocks = chain.block_count
        return chain.keys, chain.token_count, chain.token_range(0, blocks), chain.key_range(blocks // 2, blocks)

    without, whole = begun(), begun()
    whole.extend(range(6, 24))
    for chain in (without, whole):
        chain.extend(range(24, 40))
    is_interrupted, number, seen = True, 0, set[object]()
    while is_interrupted:
        number += 1
        chain = begun()
        is_interrupted = interrupted(lambda: chain.extend(range(6, 24)), number)  # noqa: B023 - called here
        chain.extend(range(24, 40))
        seen.add(state(chain))
    assert number > 10
    assert seen == {state(without), state(whole)}
