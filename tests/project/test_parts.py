"""What a part of the tests is."""

from __future__ import annotations

import pytest

from tests.parts import part


def test_parts_together_are_everything_once() -> None:
    """Each place is in exactly one of the parts."""
    places = list(range(17))
    assert sorted(place for number in range(3) for place in places[part(f"{number}/3")]) == places
    assert places[part("0/1")] == places


@pytest.mark.parametrize("text", ["", "2", "2/2", "-1/2", "a/b", "0/0", "1/2/3"])
def test_text_that_names_no_part_is_refused(text: str) -> None:
    """The error says what a part looks like."""
    with pytest.raises(ValueError, match="use K/N"):
        part(text)
