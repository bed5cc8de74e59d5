from __future__ import annotations

import sys

from kvcached.core.eviction.eviction_log import PIECE_OVERHEAD_BYTES, RUN_OVERHEAD_BYTES, EvictionLog
from kvcached_client.types import MissReason
from tests.core.engine import Engine, keys_of, make_cache

ONE, TWO = b"1" * 32, b"2" * 32
EVICTED, CLEARED = MissReason.EVICTED, MissReason.CLEARED
#: Of a piece of one run of one block.
SMALLEST = PIECE_OVERHEAD_BYTES + RUN_OVERHEAD_BYTES + 16


def gone(*texts: str) -> list[bytearray]:
    """Runs by their blocks' letters."""
    return [bytearray(keys_of(text)) for text in texts]


def test_the_last_reason_of_a_block_counts() -> None:
    """A block that left the index more than once is told by its last way out."""
    forgotten = EvictionLog()
    keys = keys_of("abc")
    forgotten.add(ONE, EVICTED, gone("xyz", "abc"))
    forgotten.add(ONE, CLEARED, [bytearray(keys[16:32])])

    assert [forgotten.find(ONE, keys[at : at + 16]) for at in (0, 16, 32)] == [EVICTED, CLEARED, EVICTED]
    assert forgotten.find(ONE, keys_of("d")) is None


def test_namespaces_are_told_apart() -> None:
    """Engines with keys of their own may use the same key in two namespaces: only the one that lost it says so."""
    forgotten = EvictionLog()
    forgotten.add(ONE, EVICTED, gone("a"))

    assert (forgotten.find(ONE, keys_of("a")), forgotten.find(TWO, keys_of("a"))) == (EVICTED, None)


def test_bytes_across_two_keys_are_no_key() -> None:
    """A key is found where a key begins only, also behind a place where its bytes lie across two."""
    keys = bytearray(range(32))
    inner = bytes(keys[8:24])
    forgotten = EvictionLog()
    forgotten.add(ONE, EVICTED, [keys])
    assert forgotten.find(ONE, inner) is None

    forgotten.add(ONE, CLEARED, [keys + inner])
    assert forgotten.find(ONE, inner) is CLEARED


def test_memory_is_bounded_and_the_oldest_goes_first() -> None:
    """However short pieces are, as many as fit are kept, from the newest on."""
    forgotten = EvictionLog(bytes_max=10 * SMALLEST)
    for letter in "abcdefghijkl":
        forgotten.add(ONE, EVICTED, gone(letter))
    forgotten.trim()

    assert [forgotten.find(ONE, keys_of(letter)) for letter in "abcdefghijkl"] == [None] * 2 + [EVICTED] * 10


def test_of_a_piece_that_is_too_large_the_end_is_kept() -> None:
    """Runs leave the deepest first, and a prompt misses the first block that it lacks; one alone may be too large."""
    forgotten = EvictionLog(bytes_max=3 * SMALLEST)
    forgotten.add(ONE, EVICTED, gone(*"abcdefghi"))
    forgotten.trim()
    kept = [letter for letter in "abcdefghi" if forgotten.find(ONE, keys_of(letter))]
    assert kept == list("abcdefghi")[-len(kept) :]
    assert 3 <= len(kept) < 9

    forgotten.add(ONE, EVICTED, gone("x" * 100))
    forgotten.trim()
    assert forgotten.find(ONE, keys_of("x")) is None


def test_what_is_counted_is_what_it_takes() -> None:
    """What runs and pieces cost besides their keys is counted in full."""
    keys = bytearray(16)
    piece = (ONE, EVICTED, [keys], 1 << 20)
    slot = 8

    assert sys.getsizeof(keys) - len(keys) + slot <= RUN_OVERHEAD_BYTES
    assert sys.getsizeof(piece) + sys.getsizeof([]) + sys.getsizeof(1 << 20) + slot <= PIECE_OVERHEAD_BYTES


def test_a_cache_trims_when_nobody_waits() -> None:
    """Evictions only add; the bound is kept by what comes after each request."""
    cache = make_cache(slots=4)
    cache.eviction_log.bytes_max = 0
    engine = Engine(cache)
    engine.store("abc")
    engine.store("xyz")
    assert cache.eviction_log.size_bytes > 0

    cache.settle()
    assert cache.eviction_log.size_bytes == 0
