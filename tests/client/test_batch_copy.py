from __future__ import annotations

import ctypes
import random
from array import array

import pytest
import xxhash

from kvcached_client.blocks import copy as batch_copy


@pytest.fixture(params=["native", "ctypes"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to the same bytes; the native one only where it was built."""
    if request.param == "ctypes":
        monkeypatch.setattr(batch_copy, "native_copy_all", None)
        monkeypatch.setattr(batch_copy, "native_copy_summed", None)
    elif batch_copy.native_copy_all is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")


@pytest.mark.usefixtures("way")
def test_copy_all_copies_each_piece() -> None:
    """Every piece goes from its offset behind one address to its offset behind the other, and nothing else moves."""
    content = random.Random(1).randbytes(1000)
    source, destination = ctypes.create_string_buffer(content, 1000), ctypes.create_string_buffer(1000)
    pieces = array("q", [0, 990, 10, 500, 0, 100, 20, 300, 0, 999, 7, 1])

    batch_copy.copy_all(pieces, ctypes.addressof(destination), ctypes.addressof(source))

    expected = bytearray(1000)
    expected[0:10], expected[500:600], expected[999:] = content[990:], content[:100], content[7:8]
    assert destination.raw == expected


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(20))
def test_copy_all_is_exact_at_any_size_and_alignment(seed: int) -> None:
    """Small and large pieces at odd addresses arrive byte for byte, and the bytes around them stay."""
    generator = random.Random(seed)
    source = ctypes.create_string_buffer(generator.randbytes(200_000), 200_000)
    destination = ctypes.create_string_buffer(200_000)
    pieces, expected, end = array("q"), bytearray(200_000), 0
    while (end := end + generator.randrange(100)) < 150_000:
        size = generator.choice([0, 1, 63, 64, 65, 4095, 4096, 4097, generator.randrange(30_000)])
        start = generator.randrange(200_000 - size)
        pieces.extend((end, start, size))
        expected[end : end + size] = source.raw[start : start + size]
        end += size

    batch_copy.copy_all(pieces, ctypes.addressof(destination), ctypes.addressof(source))

    assert destination.raw == expected


@pytest.mark.usefixtures("way")
def test_copy_all_of_nothing_does_nothing() -> None:
    """An empty array of pieces is no mistake: a load may have no good block."""
    batch_copy.copy_all(array("q"), 0, 0)


@pytest.mark.usefixtures("way")
def test_copy_all_refuses_broken_triples() -> None:
    """Numbers that are no whole triples are refused."""
    with pytest.raises(ValueError, match=r"triples|shorter"):
        batch_copy.copy_all(array("q", [0, 0]), 0, 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("seed", range(20))
def test_copy_summed_copies_and_sums_each_group(seed: int) -> None:
    """Pieces arrive byte for byte wherever they lie, and the sums are xxh3_128 of each group's bytes."""
    generator = random.Random(seed)
    source = ctypes.create_string_buffer(generator.randbytes(1_500_000), 1_500_000)
    destination = ctypes.create_string_buffer(1_500_000)
    per_sum, unit = generator.choice([1, 2, 5]), generator.choice([1, 64, 64, 1024])
    pieces, expected, sums, end = array("q"), bytearray(1_500_000), [], 0
    for _ in range(6):
        content = b""
        for _ in range(per_sum):
            size = unit * generator.choice([0, 1, 4, 5, 15, 16, 17, 33, 8192 // unit])
            start, end = generator.randrange(1_500_000 - size), end + generator.choice([0, 0, 1, 64])
            pieces.extend((end, start, size))
            expected[end : end + size] = source.raw[start : start + size]
            content += source.raw[start : start + size]
            end += size
        sums.append(xxhash.xxh3_128_digest(content))

    found = batch_copy.copy_summed(pieces, per_sum, ctypes.addressof(destination), ctypes.addressof(source))

    assert found == b"".join(sums)
    assert destination.raw == expected


@pytest.mark.parametrize("stripes", [4, 5, 15, 16, 17, 31, 32, 33, 160, 1000])
def test_native_sum_is_xxh3(stripes: int) -> None:
    """The native sum is that of the xxhash package around every border of its rounds, and at once for pages."""
    if batch_copy.native_copy_summed is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    content = random.Random(stripes).randbytes(64 * stripes)
    source, destination = ctypes.create_string_buffer(content, len(content)), ctypes.create_string_buffer(len(content))
    pieces = array("q", [0, 0, len(content)])

    found = batch_copy.native_copy_summed(pieces, 1, ctypes.addressof(destination), ctypes.addressof(source))

    if found is None:
        pytest.skip("this processor has no AVX2")
    assert found == xxhash.xxh3_128_digest(content)
    assert destination.raw == content


@pytest.mark.parametrize("size", [0, 63, 192, 320 + 1])
def test_native_sum_leaves_other_sizes_alone(size: int) -> None:
    """Sizes that are not for it are not copied, and None says so."""
    if batch_copy.native_copy_summed is None:
        pytest.skip("the native helper was not built: pip install -e ., with a C compiler")
    source, destination = ctypes.create_string_buffer(b"x" * 400, 400), ctypes.create_string_buffer(400)
    pieces = array("q", [0, 0, size])

    assert batch_copy.native_copy_summed(pieces, 1, ctypes.addressof(destination), ctypes.addressof(source)) is None
    assert destination.raw == bytes(400)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("numbers", "per_sum"), [(3, 2), (9, 2), (3, 0), (3, -1)])
def test_copy_summed_refuses_broken_groups(numbers: int, per_sum: int) -> None:
    """Pieces that are no whole groups are refused, and none is copied."""
    source, destination = ctypes.create_string_buffer(b"x" * 256, 256), ctypes.create_string_buffer(256)
    pieces = array("q", [0, 0, 256] * (numbers // 3))

    with pytest.raises(ValueError, match="groups"):
        batch_copy.copy_summed(pieces, per_sum, ctypes.addressof(destination), ctypes.addressof(source))
    assert destination.raw == bytes(256)


@pytest.mark.usefixtures("way")
def test_copy_summed_of_nothing_has_no_sums() -> None:
    """An empty array of pieces is no mistake: a load may have no good block."""
    assert batch_copy.copy_summed(array("q"), 3, 0, 0) == b""
