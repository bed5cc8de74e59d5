"""The canonical layout of blocks, from the tensors of a shard: the same on any number of shards, or none."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvcached_client.blocks.canonical import canonical_layout
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.blocks.pages import EnginePages
from tests.client.offload_rig import HostTensor

HEADS, TOKENS, CONTENT, BLOCKS = 8, 4, 16, 5


def heads_first(heads: int) -> npt.NDArray[Any]:
    """As vLLM has it on CPUs: [blocks, heads, tokens, content]."""
    return np.zeros((BLOCKS, heads, TOKENS, CONTENT), "float16")


def tokens_first(heads: int) -> npt.NDArray[Any]:
    """As most kernels on GPUs have it: the same dimensions, with the tokens outside the heads in memory."""
    return np.zeros((BLOCKS, TOKENS, heads, CONTENT), "float16").transpose(0, 2, 1, 3)


def keys_and_values_apart(heads: int) -> npt.NDArray[Any]:
    """[2, blocks, heads, tokens, dim]."""
    return np.zeros((2, BLOCKS, heads, TOKENS, CONTENT // 2), "float16")


def layout(*arrays: npt.NDArray[Any], heads: int = HEADS, shards: int = 0) -> CanonicalLayout | None:
    """That of these tensors; without a number of shards, of as many as have all heads together."""
    tensors = {f"layer {number}": HostTensor(array) for number, array in enumerate(arrays)}
    return canonical_layout(EnginePages.of_tensors(tensors), shards or heads // arrays[0].shape[-3], heads, -3)


@pytest.mark.parametrize(
    ("make", "runs"),
    [(heads_first, 2), (tokens_first, 2 * TOKENS), (keys_and_values_apart, 4)],
    ids=["heads first", "tokens first", "K and V apart"],
)
def test_layout_is_the_same_on_any_number_of_shards(make: Any, runs: int) -> None:
    """Shards that divide the heads have one canonical layout: a part for each head, and the runs of all layers."""
    found = {shards: layout(make(HEADS // shards), make(HEADS // shards)) for shards in (1, 2, 4, 8)}

    first = found[1]
    assert first is not None
    assert (first.parts, first.runs) == (HEADS, runs)
    assert set(found.values()) == {first}


def test_other_bytes_have_another_layout() -> None:
    """Another order of the bytes, another size of heads, other layers or elements are told apart."""
    others = [
        layout(heads_first(2)),
        layout(tokens_first(2)),
        layout(keys_and_values_apart(2)),
        layout(heads_first(2), heads_first(2)),
        layout(heads_first(2)[..., :8].copy()),
        layout(heads_first(2).astype("int16")),
        layout(heads_first(2), heads=4),
    ]

    assert None not in others
    assert len(set(others)) == len(others)


def test_more_heads_than_parts_are_joined() -> None:
    """Of 96 heads two make a part, so that a part is never divided between up to 48 shards."""
    found = layout(heads_first(96), heads=96)

    assert found is not None
    assert (found.parts, found.runs) == (48, 1)
    assert layout(heads_first(2), heads=96) == found
    assert layout(heads_first(1), heads=96) is None


@pytest.mark.parametrize(
    ("arrays", "heads"),
    [
        ([heads_first(2), heads_first(4)], HEADS),
        ([heads_first(2), heads_first(2)[..., :8].copy()], HEADS),
        ([heads_first(3)], HEADS),
        ([np.zeros((BLOCKS, 16), "float16")], HEADS),
    ],
    ids=["numbers of heads", "sizes of heads", "no equal parts", "no heads"],
)
def test_blocks_that_cannot_be_cut_have_none(arrays: list[npt.NDArray[Any]], heads: int) -> None:
    """Where heads are not alike on every shard, blocks have no canonical layout."""
    assert layout(*arrays, heads=heads, shards=4) is None


@pytest.mark.parametrize(("here", "shards"), [(1, 16), (4, 4), (8, 2), (2, 2)])
def test_shards_that_do_not_divide_the_heads_have_none(here: int, shards: int) -> None:
    """Where shards repeat heads, or have slots for K and for V in place of heads, they have no canonical layout."""
    assert layout(heads_first(here), shards=shards) is None


def test_single_head_is_the_same_on_any_number_of_shards() -> None:
    """Every shard of a model with one head has all of it, and the layout is one part."""
    found = {shards: layout(heads_first(1), heads=1, shards=shards) for shards in (1, 2, 8)}

    assert found[1] is not None
    assert found[1].parts == 1
    assert set(found.values()) == {found[1]}


def test_part_of_another_tensors_page_has_none() -> None:
    """Where tensors share a page, as states do with attention, its bytes are not of heads alone."""
    whole = heads_first(2)
    inside = whole.reshape(BLOCKS, -1)[:, :64].reshape(BLOCKS, 2, 2, 16)

    assert layout(whole, inside) is None


def test_single_head_whose_place_is_unknown_has_none() -> None:
    """A shard may give its only head any stride: if that is not the size of a head, its place is unknown."""
    whole = heads_first(1)
    odd = np.lib.stride_tricks.as_strided(whole, whole.shape, (whole.strides[0], 6, *whole.strides[2:]))

    assert layout(whole, shards=HEADS) is not None
    assert layout(odd, shards=HEADS) is None


def test_tensors_on_the_same_pages_count_once() -> None:
    """A layer that uses another one's pages adds no runs."""
    shared = heads_first(2)
    found = layout(shared, shared)

    assert found is not None
    assert found.runs == 1


def test_layout_divides_blocks_of_its_size_only() -> None:
    """Blocks that are not so many runs of so many parts, or parts that shards would share, are refused."""
    cut = CanonicalLayout(fingerprint=bytes(16), parts=4, runs=3)

    assert all(cut.divides(4 * 3 * 16 // shards, shards) for shards in (1, 2, 4))
    assert not cut.divides(4 * 3 * 16 + 1, 1)
    assert not cut.divides(4 * 3 * 16, 3)
    assert not cut.divides(4 * 3 * 15, 1)  # smaller than any head
