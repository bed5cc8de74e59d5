"""Many headers at once: the same bytes as of one."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvcached.memory.header_table import HeaderTable
from kvcached_client.blocks import header as host_header


def test_claims_are_those_of_one_slot() -> None:
    """Claimed together, headers are the bytes of one claim each, and nothing beside them changes."""
    before = random.Random(1).randbytes(1280)
    memory = bytearray(before)

    HeaderTable(memoryview(memory)).claim(np.array([256, 0]), 11, 13)

    expected = bytearray(before)
    for place in (256, 0):
        expected[place : place + 128] = host_header.pack_claim(11, 13)
    assert memory == expected


def test_copied_headers_do_not_change() -> None:
    """A copy of headers is what they were, whatever is written later; cleared ones are zero, others are not touched."""
    before = random.Random(2).randbytes(1280)
    memory = bytearray(before)
    table = HeaderTable(memoryview(memory))

    copied = table.copy(256, 3)
    table.clear(128, 512)

    assert copied.tobytes() == before[256:640]
    assert memory == before[:128] + bytes(512) + before[640:]


class Watched:
    """Words of memory that keep the order in which columns are assigned."""

    def __init__(self) -> None:
        self.assigned: list[object] = []

    def __setitem__(self, place: object, value: object) -> None:
        self.assigned.append(place)


def test_first_word_of_a_claim_is_written_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks in between sees no claim, or a whole one."""
    table, watched = HeaderTable(memoryview(bytearray(256))), Watched()
    monkeypatch.setattr(table, "_words", watched)

    table.claim(np.array([128]), 11, 13)

    assert [place[1] for place in watched.assigned if isinstance(place, tuple)] == [slice(1, None), 0]
