"""The chain that the blocks of several groups form, and the keys in it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kvcached_client.vllm.orders import group_key
from kvcached_client.vllm.scheduling.chains import Chains, GroupKeys, unit_of
from kvcached_client.vllm.scheduling.request_state import RequestState
from tests.vllm_connector.rig import BLOCK, FakeRequest

#: Groups with blocks of one and of two hashes.
UNIT = unit_of([BLOCK, 2 * BLOCK], BLOCK)


@dataclass
class Listed:
    """A block in one of vLLM's lists."""

    block_id: int

    @property
    def is_null(self) -> bool:
        return not self.block_id


def chains(*lists: list[int]) -> Chains:
    """Chains of requests whose groups have these blocks now."""
    return Chains(BLOCK, unit=UNIT, live=lambda _: [[Listed(block) for block in each] for each in lists])


def test_unit_has_the_blocks_of_the_same_tokens() -> None:
    """Groups with blocks of different sizes have a unit of as few tokens as are whole blocks in each of them."""
    unit = unit_of([4, 6], 2)
    assert (unit.tokens, unit.hashes) == (12, 6)
    assert [(place.group, place.block, place.blocks) for place in unit.places] == [
        (0, 0, 3),
        (1, 0, 2),
        (0, 1, 3),
        (0, 2, 3),
        (1, 1, 2),
    ]
    assert [place.index_in_group(5) for place in unit.places] == [15, 10, 16, 17, 11]


def test_key_is_the_last_hash_in_a_block_and_its_group() -> None:
    """A block is known by the hash of the last tokens in it: an earlier one says nothing about the tokens behind it."""
    request = FakeRequest("r", range(4 * BLOCK))
    first, second, third, fourth = request.block_hashes
    expected = [(first, 0), (second, 0), (second, 1), (third, 0), (fourth, 0), (fourth, 1)]
    assert list(GroupKeys(request, UNIT)) == [group_key(block_hash, group) for block_hash, group in expected]


def test_prompts_that_part_inside_a_block_have_other_keys_for_it() -> None:
    """Of prompts with the same first half of a larger block, that block has different keys."""
    one = GroupKeys(FakeRequest("one", [*range(BLOCK), *range(BLOCK)]), UNIT)
    other = GroupKeys(FakeRequest("other", [*range(BLOCK), *reversed(range(BLOCK))]), UNIT)
    assert [mine == yours for mine, yours in zip(one, other, strict=True)] == [True, False, False]


@pytest.mark.parametrize("sizes", [[4, 8], [8, 4], [4, 8, 4], [12, 8, 4], [16, 4, 8]])
def test_equal_keys_mean_equal_chains_before(sizes: list[int]) -> None:
    """Wherever two prompts part, their chains have equal keys up to some depth and none at any depth behind it."""
    unit = unit_of(sizes, BLOCK)
    tokens = list(range(2 * unit.tokens))
    one = list(GroupKeys(FakeRequest("one", tokens), unit))
    for start in range(0, len(tokens), BLOCK):
        other = list(GroupKeys(FakeRequest("other", [*tokens[:start], *(-token for token in tokens[start:])]), unit))
        same = [mine == yours for mine, yours in zip(one, other, strict=True)]
        assert same == sorted(same, reverse=True)


def test_keys_of_groups_differ() -> None:
    """Blocks of the same tokens have another key in every group."""
    keys = list(GroupKeys(FakeRequest("r", range(9 * BLOCK)), unit_of([BLOCK] * 3, BLOCK)))
    assert len(keys) == len(set(keys)) == 27
    assert {len(key) for key in keys} == {16}


def test_keys_grow_with_whole_units() -> None:
    """Hashes of a unit that is not full have no key yet."""
    request = FakeRequest("r", range(3 * BLOCK))
    keys = GroupKeys(request, UNIT)
    assert len(keys) == len(keys[:]) == 3
    first = list(keys)
    request.append(*range(BLOCK))
    assert len(keys) == 6
    assert list(keys)[:3] == first


def test_keys_follow_a_request_that_gets_other_tokens() -> None:
    """If the hashes of a request change, so do its keys."""
    request, other = FakeRequest("r", range(4 * BLOCK)), FakeRequest("o", range(1, 4 * BLOCK + 1))
    keys = GroupKeys(request, UNIT)
    assert len(list(keys)) == 6
    request.block_hashes = other.block_hashes
    assert list(keys) == list(GroupKeys(other, UNIT))
    request.block_hashes = other.block_hashes[:2]
    assert list(keys) == list(GroupKeys(other, UNIT))[:3]


def test_loads_leave_out_what_has_left_the_window() -> None:
    """Null blocks interrupt the chain of a load."""
    tables = [[1, 2, 3, 4, 5, 6], [0, 0, 9]]
    assert list(chains().runs(tables, 0, 9)) == [(0, [1, 2]), (3, [3, 4]), (6, [5, 6, 9])]
    assert list(chains().runs(tables, 6, 9)) == [(6, [5, 6, 9])]


def test_live_blocks_end_where_vllm_keeps_none() -> None:
    """The blocks of a request end before one that has left the window, or that it does not have yet."""
    tracked = RequestState(FakeRequest("r", range(6 * BLOCK)), 0)
    assert chains([1, 2, 3, 4, 5, 6], [7, 8, 9]).live_run(tracked, 0, 9) == [1, 2, 7, 3, 4, 8, 5, 6, 9]
    assert chains([1, 2, 3, 4, 5, 6], [7, 0, 9]).live_run(tracked, 0, 9) == [1, 2, 7, 3, 4]
    assert chains([1, 2, 3, 4, 5, 6], [0, 8, 9]).live_run(tracked, 4, 9) == [4, 8, 5, 6, 9]
    assert chains([1, 2, 3], [7]).live_run(tracked, 0, 9) == [1, 2, 7, 3]


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (7, 0), (8, 3), (15, 3), (16, 6)])
def test_only_whole_units_count(tokens: int, blocks: int) -> None:
    """Tokens of a unit that is not full are in no block."""
    assert chains().blocks_in(tokens) == blocks


@pytest.mark.parametrize("tokens", range(1, 40))
def test_daemon_leaves_the_last_token_of_a_prompt(tokens: int) -> None:
    """The daemon counts tokens its own way, and its bound of a hit has as many whole units as vLLM's."""
    bound = (chains().daemon_tokens(tokens) - 1) // BLOCK
    assert bound // 3 == (tokens - 1) // (2 * BLOCK)
    assert chains().daemon_tokens(tokens) // BLOCK >= chains().blocks_in(tokens)


def test_one_group_is_counted_as_ever() -> None:
    """With one group, the chain is the request's blocks."""
    plain, request = Chains(BLOCK), FakeRequest("r", range(3 * BLOCK))
    assert RequestState(request, 0, group_keys=plain.group_keys(request)).chain is request.block_hashes
    assert (plain.unit_tokens, plain.unit_blocks, plain.blocks_in(11), plain.daemon_tokens(11)) == (BLOCK, 1, 2, 11)
    assert list(plain.runs([[4, 5, 6]], 1, 3)) == [(1, [5, 6])]


def test_groups_that_hashes_do_not_fit_are_refused() -> None:
    """A block that is not a whole number of hashes has no key."""
    with pytest.raises(ValueError, match="hashes of 4"):
        unit_of([4, 6], 4)
