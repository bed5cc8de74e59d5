from __future__ import annotations

import sys

from kvcached.core.forgotten import ENTRY_BYTES, ForgottenKeys
from kvcached_client.types import MissReason
from tests.core.engine import keys_of

ONE, TWO = b"1" * 32, b"2" * 32
EVICTED, CLEARED = MissReason.EVICTED, MissReason.CLEARED


def test_the_last_reason_of_a_block_counts() -> None:
    """A block that left the index more than once is told by its last way out."""
    forgotten = ForgottenKeys()
    keys = keys_of("abc")
    forgotten.add(ONE, EVICTED, bytearray(keys))
    forgotten.add(ONE, CLEARED, bytearray(keys[16:32]))

    assert [forgotten.find(ONE, keys[at : at + 16]) for at in (0, 16, 32)] == [EVICTED, CLEARED, EVICTED]
    assert forgotten.find(ONE, keys_of("d")) is None


def test_namespaces_are_told_apart() -> None:
    """Engines with keys of their own may use the same key in two namespaces: only the one that lost it says so."""
    forgotten = ForgottenKeys()
    forgotten.add(ONE, EVICTED, bytearray(keys_of("a")))

    assert (forgotten.find(ONE, keys_of("a")), forgotten.find(TWO, keys_of("a"))) == (EVICTED, None)


def test_bytes_across_two_keys_are_no_key() -> None:
    """A key is found where a key begins only, also behind a place where its bytes lie across two."""
    keys = bytearray(range(16)) + bytearray(range(16, 32))
    inner = bytes(keys[8:24])
    forgotten = ForgottenKeys()
    forgotten.add(ONE, EVICTED, keys)
    assert forgotten.find(ONE, inner) is None

    forgotten.add(ONE, CLEARED, keys + inner)
    assert forgotten.find(ONE, inner) is CLEARED


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    """Entries are dropped from the oldest on, however long or short they are."""
    forgotten = ForgottenKeys(bytes_max=10 * (ENTRY_BYTES + 16))
    for letter in "abcdefghijkl":
        forgotten.add(ONE, EVICTED, bytearray(keys_of(letter)))
    found = [forgotten.find(ONE, keys_of(letter)) is not None for letter in "abcdefghijkl"]
    assert found == [False] * 2 + [True] * 10

    forgotten.add(ONE, EVICTED, bytearray(1 << 20))
    assert forgotten.find(ONE, bytes(16)) is None  # more than there is room for


def test_an_entry_counts_as_the_memory_that_it_takes() -> None:
    """What an entry costs besides its keys is counted in full."""
    keys = bytearray(16)
    entry = (ONE, EVICTED, keys)

    assert sys.getsizeof(entry) + sys.getsizeof(keys) - len(keys) <= ENTRY_BYTES
