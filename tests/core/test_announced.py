"""What routers were told of one pool."""

from __future__ import annotations

from array import array

import pytest

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, IndexChange, Tier
from kvcached.core.slots.announced import Announced

TIER = Tier(b"root", 3, "model", "a", 0, 16)


def keys(letters: str) -> bytes:
    return b"".join(letter.encode() * 16 for letter in letters)


@pytest.fixture
def changes() -> list[IndexChange]:
    """What routers are told."""
    return []


@pytest.fixture
def announced(changes: list[IndexChange]) -> Announced:
    """Of a pool of eight slots, in which the chain abcd lies in slots 4, 5, 1, 2."""
    announced = Announced(changes, TIER, 8)
    announced.add(b"", keys("abcd"), array("i", [4, 2, 1, 2]))
    return announced


def test_blocks_are_told_with_what_comes_before_them(announced: Announced, changes: list[IndexChange]) -> None:
    """Blocks that are complete are told in the order of their chain, with the key before them."""
    announced.add(keys("d"), keys("e"), array("i", [7, 1]))

    assert changes == [BlocksStored(TIER, b"", keys("abcd")), BlocksStored(TIER, keys("d"), keys("e"))]
    assert announced.count == announced.recount() == 5


def test_blocks_behind_a_fence_are_not_told_as_gone(announced: Announced, changes: list[IndexChange]) -> None:
    """Of slots that leave, those are told whose blocks routers know of, and no others; the second time none."""
    changes.clear()

    announced.remove(array("i", [4, 4]))
    announced.remove(array("i", [4, 4]))

    assert changes == [BlocksRemoved(TIER, keys("ab"))]
    assert announced.count == announced.recount() == 2


def test_section_shows_chains_in_pieces(announced: Announced) -> None:
    """A section of the slots names each block once, with the key before it."""
    sections = [announced.section(first, 2, 9) for first in range(0, 8, 2)]

    assert sections == [
        ([BlocksStored(TIER, keys("b"), keys("c"))], 2),
        ([BlocksStored(TIER, keys("c"), keys("d"))], 4),
        ([BlocksStored(TIER, b"", keys("ab"))], 6),
        ([], 8),
    ]
    assert [announced.next_known(slot) for slot in (0, 3, 6)] == [1, 4, -1]


def test_section_of_many_stretches_says_where_to_go_on(announced: Announced) -> None:
    """No more stretches are told than are wanted; the next section begins with the next of them."""
    announced.add(b"", keys("x"), array("i", [7, 1]))
    (cd, ab, x) = announced.section(0, 8, 3)[0]

    assert announced.section(0, 8, 3) == ([cd, ab, x], 8)
    assert announced.section(0, 8, 2) == ([cd, ab], 7)
    assert announced.section(0, 8, 1) == ([cd], 4)
    assert announced.section(7, 8, 1) == ([x], 15)


def test_cleared_pool_tells_nothing_more_of_what_it_held(announced: Announced, changes: list[IndexChange]) -> None:
    """After a clear no block is told as gone again, and what comes belongs to the next generation."""
    changes.clear()

    announced.remove_all()
    announced.rename(b"other", 4)
    announced.remove(array("i", [1, 2, 4, 2]))
    announced.add(b"", keys("x"), array("i", [0, 1]))

    assert changes == [
        BlocksRemoved(TIER, keys("cdab")),
        BlocksStored(TIER._replace(namespace=b"other", generation=4), b"", keys("x")),
    ]


@pytest.mark.parametrize(("held", "is_named"), [(0, True), (1, True), (16_384, True), (16_385, False)])
def test_clear_names_blocks_that_are_few(held: int, is_named: bool, changes: list[IndexChange]) -> None:
    """A clear of an empty pool tells nothing, one of a few blocks names them, one of many says that all are gone."""
    announced = Announced(changes, TIER, 20_000)
    every = b"".join(number.to_bytes(16, "big") for number in range(held))
    announced.inherit(b"", every, array("i", [0, held]))

    announced.remove_all()

    expected: IndexChange = BlocksRemoved(TIER, every) if is_named else AllRemoved(TIER)
    assert changes == ([expected] if held else [])
    assert announced.count == announced.recount() == 0
