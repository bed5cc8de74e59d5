"""Multimodal items: what they add to keys, and which spans are refused."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached_client.errors import BadRequest
from kvcached_client.keys import KeyChain, chain_root
from tests.keys import reference
from tests.keys.reference import Span

_NAMESPACE = bytes(range(32))
_PLACEHOLDER = 7


def _chain(count: int, *spans: Span, block_size: int = 4) -> KeyChain:
    chain = KeyChain(_NAMESPACE, block_size)
    for span in spans:
        chain.add_item(*span)
    chain.extend([_PLACEHOLDER] * count)
    return chain


def _shared_blocks(first: KeyChain, second: KeyChain) -> int:
    blocks = min(first.block_count, second.block_count)
    return sum(first.key_range(i, i + 1) == second.key_range(i, i + 1) for i in range(blocks))


@st.composite
def _spans(draw: st.DrawFn) -> list[Span]:
    spans, end = [], 0
    for name in draw(st.lists(st.text(min_size=1, max_size=3) | st.binary(min_size=1, max_size=3), max_size=5)):
        start = end + draw(st.integers(0, 9))
        spans.append(Span(name, start, draw(st.integers(1, 20))))
        end = start + spans[-1].length
    return spans


@given(_spans(), st.integers(1, 9), st.integers(0, 90), st.integers(1, 30))
def test_items_give_the_keys_of_the_definition(spans: list[Span], block_size: int, count: int, step: int) -> None:
    """Any items, block size and pace of growth give the documented keys."""
    tokens = list(range(count))
    chain = KeyChain(_NAMESPACE, block_size)
    for span in spans:
        chain.add_item(*span)
    for start in range(0, count, step):
        chain.extend(tokens[start : start + step])
    assert chain.keys == b"".join(reference.keys(chain_root(_NAMESPACE), tokens, block_size, spans))


def test_items_are_named_as_the_request_grows() -> None:
    """An item may be added after earlier blocks are complete, also in the middle of an unfinished one."""
    late = KeyChain(_NAMESPACE, 4, [_PLACEHOLDER] * 6)
    late.add_item("image", 4, 5)
    late.extend([_PLACEHOLDER] * 6)
    assert late.keys == _chain(12, Span("image", 4, 5)).keys


def test_items_change_their_blocks_and_all_later_ones_only() -> None:
    """Blocks before an item keep the keys of plain text; its own and all later ones differ."""
    plain, image = _chain(20), _chain(20, Span("image", 9, 2))
    assert plain.key_range(0, 2) == image.key_range(0, 2)
    assert _shared_blocks(plain, image) == 2


@pytest.mark.parametrize(
    "other",
    [Span("another", 1, 6), Span(b"image", 1, 6), Span("image", 2, 5), Span("image", 0, 7), Span("image", 1, 7)],
    ids=["id", "type of the id", "later start", "earlier start", "length"],
)
def test_items_that_differ_share_no_block(other: Span) -> None:
    """Under equal placeholder tokens, another id, place or length gives other keys."""
    assert _shared_blocks(_chain(12, Span("image", 1, 6)), _chain(12, other)) == 0


def test_items_over_many_blocks_differ_block_by_block() -> None:
    """Blocks that show different parts of one item hash different messages: the part is in the message."""
    span = Span("image", 0, 12)
    messages = {reference.message([_PLACEHOLDER] * 12, block, 4, [span]) for block in range(3)}
    assert len(messages) == 3
    assert _chain(12, span).keys == b"".join(reference.keys(chain_root(_NAMESPACE), [_PLACEHOLDER] * 12, 4, [span]))


@pytest.mark.parametrize(
    ("item_id", "start", "length"),
    [
        ("", 8, 1),
        (b"", 8, 1),
        ("\ud800", 8, 1),
        ("image", 8, 0),
        ("image", 8, -1),
        ("image", -1, 4),
        ("image", 3, 9),
        ("image", 1 << 63, 1),
    ],
    ids=["no id", "no bytes", "no text", "no tokens", "negative length", "negative start", "hashed", "beyond 64 bits"],
)
def test_items_that_cannot_be_are_refused_and_leave_no_trace(item_id: str | bytes, start: int, length: int) -> None:
    """A malformed span, or one that reaches into a complete block, is the caller's error."""
    chain = KeyChain(_NAMESPACE, 4, [_PLACEHOLDER] * 6)
    with pytest.raises(BadRequest):
        chain.add_item(item_id, start, length)
    chain.extend([_PLACEHOLDER] * 6)
    assert chain.keys == _chain(12).keys


def test_items_may_neither_overlap_nor_go_back() -> None:
    """The second item starts where the first one ends, or later."""
    chain = KeyChain(_NAMESPACE, 4)
    chain.add_item("first", 4, 4)
    for start in (0, 4, 7):
        with pytest.raises(BadRequest, match="from 8 on"):
            chain.add_item("second", start, 2)
    chain.add_item("second", 8, 2)


def test_boundary_splits_an_item_only_strictly_inside_it() -> None:
    """The edges of an item split nothing."""
    chain = _chain(0, Span("image", 3, 4))
    assert [tokens for tokens in range(12) if chain.splits_item(tokens)] == [4, 5, 6]


def test_hit_rounds_down_to_whole_items() -> None:
    """A hit that ends inside an item shrinks to the block before the item, over several items if need be."""
    chain = _chain(40, Span("first", 2, 8), Span("second", 11, 8), Span("third", 28, 4))
    assert [chain.whole_item_blocks(blocks) for blocks in range(9)] == [0, 0, 0, 0, 0, 5, 6, 7, 8]
