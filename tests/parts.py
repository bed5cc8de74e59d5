"""Parts of what there is to run: ``K/N`` is every Nth from the Kth on."""

from __future__ import annotations


def part(text: str) -> slice:
    """The places that belong to a part.

    Raises:
        ValueError: the text names none.
    """
    first, _, step = text.partition("/")
    if not (first.isdecimal() and step.isdecimal() and int(first) < int(step)):
        raise ValueError(f"{text!r} is no part: use K/N, whole numbers with K below N, as 0/2")
    return slice(int(first), None, int(step))
