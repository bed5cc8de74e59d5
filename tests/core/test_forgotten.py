from __future__ import annotations

import sys

from kvcached.core.forgotten import BATCH_BYTES, BATCH_OVERHEAD_BYTES, ForgottenKeys
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
    """However short pieces are, as many as fit are kept, from the newest on; of one that is too large its end."""
    forgotten = ForgottenKeys(bytes_max=10 * (BATCH_OVERHEAD_BYTES + 16))
    letters = "abcdefghijkl"
    for number, letter in enumerate(letters):
        forgotten.add(ONE if number % 2 else TWO, EVICTED, bytearray(keys_of(letter)))
    found = [forgotten.find(ONE if number % 2 else TWO, keys_of(letter)) for number, letter in enumerate(letters)]
    assert found == [None] * 2 + [EVICTED] * 10

    many = b"".join(number.to_bytes(16, "big") for number in range(1000))
    forgotten.add(TWO, CLEARED, bytearray(many))
    assert [forgotten.find(TWO, many[at : at + 16]) for at in (0, 800 * 16, 999 * 16)] == [None, None, CLEARED]
    assert forgotten.find(ONE, keys_of("l")) is None


def test_a_batch_holds_what_leaves_together() -> None:
    """Blocks that leave for one reason are gathered up to a limit: many short runs cost what a long one does."""
    forgotten = ForgottenKeys()
    runs = 3 * BATCH_BYTES // 32
    for number in range(runs):
        forgotten.add(ONE, EVICTED, bytearray(number.to_bytes(16, "big") * 2))

    assert len(forgotten._batches) == 3
    assert all(forgotten.find(ONE, number.to_bytes(16, "big")) for number in (0, runs // 2, runs - 1))


def test_a_batch_counts_as_the_memory_that_it_takes() -> None:
    """What a batch costs besides its keys is counted in full."""
    keys = bytearray(16)
    batch = (ONE, EVICTED, keys)

    assert sys.getsizeof(batch) + sys.getsizeof(keys) - len(keys) <= BATCH_OVERHEAD_BYTES
