"""The headers of a device pool: what a daemon writes into them, and what the next one believes of it."""

from __future__ import annotations

import os
import random
from array import array
from collections.abc import Iterator

import pytest

from kvcached.memory.device_headers import DeviceHeaders
from kvcached.recovery.scan import FoundBlocks, scan_device
from kvcached.recovery.takeover import stored
from kvcached_client.blocks.header import HeaderKind
from tests.recovery.pools import KIND

SLOTS = 40
KEYS = random.Random(3).randbytes(16 * 6)


@pytest.fixture
def headers() -> Iterator[DeviceHeaders]:
    made = DeviceHeaders.make("test", SLOTS)
    yield made
    made.close()


def write(headers: DeviceHeaders, slots: list[int], *, depth: int = 0, kind: HeaderKind = KIND, epoch: int = 7) -> None:
    """Blocks from `depth` on of one chain, in these ranges."""
    count = sum(slots[1::2])
    parent = KEYS[(depth - 1) * 16 : depth * 16] if depth else b""
    headers.write(kind, depth, parent, KEYS[depth * 16 : (depth + count) * 16], array("i", slots), epoch)


def found(headers: DeviceHeaders, kind: HeaderKind = KIND) -> dict[int, tuple[bytes, bytes, int]]:
    """What the next daemon finds in the same memory: key, parent and depth by slot."""
    again = DeviceHeaders(os.dup(headers.descriptor), SLOTS)
    try:
        return by_slot(scan_device(again.table, kind))
    finally:
        again.close()


def by_slot(blocks: FoundBlocks) -> dict[int, tuple[bytes, bytes, int]]:
    rows = zip(blocks.slots.tolist(), blocks.keys, blocks.parents, blocks.depths.tolist(), strict=True)
    return {slot: (key.tobytes(), parent.tobytes(), depth) for slot, key, parent, depth in rows}


def test_written_headers_are_found(headers: DeviceHeaders) -> None:
    """The next daemon finds each block in its slot, with its parent and its depth."""
    write(headers, [30, 2, 5, 1])
    write(headers, [0, 1, 39, 1], depth=3)

    keys = [KEYS[at : at + 16] for at in range(0, len(KEYS), 16)]
    assert found(headers) == {
        30: (keys[0], bytes(16), 0),
        31: (keys[1], keys[0], 1),
        5: (keys[2], keys[1], 2),
        0: (keys[3], keys[2], 3),
        39: (keys[4], keys[3], 4),
    }


def test_cleared_headers_are_not_found(headers: DeviceHeaders) -> None:
    """A slot that was cleared holds no block, and one that was not still does."""
    write(headers, [10, 4])
    headers.clear(array("i", [11, 2]))

    assert found(headers).keys() == {10, 13}


def test_only_what_was_taken_over_stays(headers: DeviceHeaders) -> None:
    """What the next daemon does not take over, no later one finds."""
    write(headers, [10, 4])
    headers.keep_only(array("i", [13, 1, 10, 1]))

    assert found(headers).keys() == {10, 13}


@pytest.mark.parametrize(
    "kind",
    [KIND._replace(generation=6), KIND._replace(namespace=b"other" * 3 + b"!"), KIND._replace(fingerprint=KEYS[:16])],
)
def test_headers_of_another_content_are_not_found(headers: DeviceHeaders, kind: HeaderKind) -> None:
    """Blocks of an earlier generation, another namespace or another layout are none of this one's."""
    write(headers, [10, 4])

    assert found(headers, kind) == {}


@pytest.mark.parametrize("written", range(0, 128, 8))
def test_torn_header_is_not_found(headers: DeviceHeaders, written: int) -> None:
    """A header of which only the first bytes, or only the last ones, were written is none."""
    write(headers, [3, 1])
    whole = os.pread(headers.descriptor, 128, 3 * 128)
    for torn in (whole[:written] + bytes(128 - written), bytes(written + 8) + whole[written + 8 :]):
        os.pwrite(headers.descriptor, torn, 3 * 128)
        assert found(headers) == {}
    os.pwrite(headers.descriptor, whole, 3 * 128)
    assert found(headers).keys() == {3}


@pytest.mark.parametrize("bit", range(0, 1024, 37))
def test_flipped_bit_loses_the_block(headers: DeviceHeaders, bit: int) -> None:
    """A damaged header is none; others are found."""
    write(headers, [3, 2])
    header = bytearray(os.pread(headers.descriptor, 128, 3 * 128))
    header[bit // 8] ^= 1 << bit % 8
    os.pwrite(headers.descriptor, header, 3 * 128)

    assert found(headers).keys() == {4}


def test_later_headers_are_younger(headers: DeviceHeaders) -> None:
    """The next daemon knows which blocks came last, over several lives of the daemon."""
    write(headers, [20, 1], epoch=7)
    write(headers, [3, 1], epoch=7)
    next_life = DeviceHeaders(os.dup(headers.descriptor), SLOTS)
    write(next_life, [30, 1], epoch=8)
    next_life.close()

    blocks = stored(scan_device(headers.table, KIND))
    assert [slot for _, slot in sorted(zip(blocks.ages.tolist(), blocks.slots.tolist(), strict=True))] == [20, 3, 30]
