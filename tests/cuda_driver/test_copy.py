from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from tests.cuda_driver.calls import (
    NEW_BATCH,
    ORDER_ANY,
    ORDER_DURING_CALL,
    ORDER_STREAM,
    CopyAttributes,
    Driver,
    Piece,
    on_device,
    on_host,
    peek,
    poke,
)
from tests.cuda_driver.conftest import StartDriver
from tests.cuda_driver.trace import calls, ran, read

INVALID, SUCCESS = "CUDA_ERROR_INVALID_VALUE", "CUDA_SUCCESS"
BOTH_ABIS = pytest.mark.parametrize("version", [12080, 13000])


def test_copy_reads_its_source_when_it_runs(driver: Driver) -> None:
    """Who changes the source of a copy before it is done changes what is copied."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    poke(host, b"early")
    driver.copy(device, host, 5, stream)
    poke(host, b"later")
    driver.finish(stream)
    assert peek(device, 5) == b"later"


def test_copy_to_the_host_is_not_there_before_somebody_waits(driver: Driver) -> None:
    """The bytes of a copy to pinned memory are not there when the call returns."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    driver.copy(host, device, 4, stream)
    assert peek(host, 4) == bytes(4)
    driver.finish(stream)
    assert peek(host, 4) == b"\xdb" * 4


def test_rows_go_where_their_pitches_say(driver: Driver, tmp_path: Path) -> None:
    """Rows of a copy have a distance of their own on each side, and nothing between them changes."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    poke(host, bytes(range(1, 31)))
    assert driver.copy_rows(on_device(device, 16), on_host(host, 10), 4, 3, stream) == SUCCESS
    driver.finish(stream)
    assert peek(device, 36) == bytes([1, 2, 3, 4, *[0xDB] * 12, 11, 12, 13, 14, *[0xDB] * 12, 21, 22, 23, 24])
    (copy,) = ran(read(tmp_path / "trace"), "copy")
    assert copy.arguments == {"sequence": 1, "count": 3, "bytes": 12, "to_device": 12, "to_host": 0}


def test_rows_keep_the_rules_of_copies(driver: Driver) -> None:
    """Rows are refused with a pitch below their width or above the device's, and beyond memory or in another kind."""
    stream, host, device = driver.stream(), driver.host(4096), driver.memory(2 << 20)
    assert driver.copy_rows(on_device(device, 64), on_host(host, 63), 64, 2, stream) == INVALID
    assert driver.copy_rows(on_device(device, 1 << 31), on_host(host, 64), 64, 2, stream) == INVALID
    assert driver.copy_rows(on_device(device, 1 << 20), on_host(host, 64), 64, 3, stream) == INVALID
    assert driver.copy_rows(on_device(host, 64), on_host(device, 64), 64, 2, stream) == INVALID
    assert driver.copy_rows(on_device(device, 1 << 20), on_host(host, 64), 64, 2, stream) == SUCCESS
    driver.finish(stream)


def test_rows_are_lines_of_planes(driver: Driver) -> None:
    """Of planes with several lines, the first ones are copied: distances can be greater than a pitch."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    poke(host, b"onetwo")
    assert driver.copy_rows(on_device(device, 10, 3), on_host(host, 3), 3, 2, stream) == SUCCESS
    assert driver.copy_rows(on_device(device, 10, 3), on_host(host, 3), 3, 2, stream, height=2) == INVALID
    driver.finish(stream)
    assert [peek(device + 30 * plane, 3) for plane in range(2)] == [b"one", b"two"]


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_read_when_they_are_copied(start_driver: StartDriver, seed: int) -> None:
    """Who changes the source of rows before they are copied changes what is copied, as with one copy."""
    driver = start_driver(seed=seed)
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    assert driver.copy_rows(on_device(device, 8), on_host(host, 8), 4, 8, stream) == SUCCESS
    poke(host, b"late" * 16)
    driver.finish(stream)
    assert [peek(device + 8 * row, 4) for row in range(8)] == [b"late"] * 8


@BOTH_ABIS
def test_batch_copies_each_piece(driver: Driver, tmp_path: Path, version: int) -> None:
    """Both ABIs of the batched copy move every piece, with one call and one operation."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    poke(host, bytes(range(200)))
    pieces = [(device + 10 * number, host + 10 * (19 - number), 10) for number in range(20)]
    assert driver.batch(pieces, stream, version=version) == SUCCESS
    driver.finish(stream)
    expected = b"".join(bytes(range(10 * (19 - number), 10 * (20 - number))) for number in range(20))
    assert peek(device, 200) == expected
    records = read(tmp_path / "trace")
    (call,) = [record for record in records if record.kind == "call" and record.name.startswith("cuMemcpyBatchAsync")]
    assert call.arguments == {"count": 20, "bytes": 200, "attributes": 1, "abi": version}
    (copy,) = ran(records, "copy")
    assert copy.arguments == {"sequence": 1, "count": 20, "bytes": 200, "to_device": 200, "to_host": 0}


@BOTH_ABIS
@pytest.mark.parametrize("stream", [0, 1])
def test_batch_refuses_the_null_and_the_legacy_stream(driver: Driver, stream: int, version: int) -> None:
    """A batched copy runs on a stream that was created."""
    piece = (driver.memory(), driver.host(), 8)
    assert driver.batch([piece], stream, version=version) == INVALID


def test_old_batch_tells_the_copy_at_fault(driver: Driver) -> None:
    """The old ABI gives the index of the copy that was refused, and none for a mistake of the whole batch."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    good = [(device + 8 * number, host + 8 * number, 8) for number in range(3)]
    bad: list[Piece] = [*good, (driver.reserve(), host, 8)]
    assert driver.batch_failed_at(bad, stream) == (INVALID, 3)
    assert driver.batch_failed_at(good, stream, order=0) == (INVALID, 2**64 - 1)
    assert driver.batch_failed_at(good, 0) == (INVALID, 2**64 - 1)


def test_copies_of_a_batch_are_independent(driver: Driver) -> None:
    """A batch is refused in which two copies write the same bytes, or one reads what another writes."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    assert driver.batch([(device, host, 16), (device + 15, host + 16, 16)], stream) == INVALID
    assert driver.batch([(device, host, 16), (device + 64, device + 15, 16)], stream) == INVALID
    assert driver.batch([(device, host, 16), (device + 16, host, 16)], stream) == SUCCESS


def test_attributes_of_a_batch(driver: Driver) -> None:
    """Indices of attributes begin at 0, go up and stay below the count; there are no more of them than copies."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    function = NEW_BATCH(driver.symbol("cuMemcpyBatchAsync", 13000))
    to = (ctypes.c_ulonglong * 2)(device, device + 8)
    from_, sizes = (ctypes.c_ulonglong * 2)(host, host + 8), (ctypes.c_size_t * 2)(8, 8)
    attributes = (CopyAttributes * 3)(*(CopyAttributes(ORDER_STREAM) for _ in range(3)))
    results = []
    for given in ([0, 1], [0], [1], [0, 0], [0, 2], [0, 1, 2]):
        indices = (ctypes.c_size_t * 3)(*given)
        results.append(driver.error_name(function(to, from_, sizes, 2, attributes, indices, len(given), stream)))
    assert results == [SUCCESS, SUCCESS, INVALID, INVALID, INVALID, INVALID]


def first_bytes_that_arrive(driver: Driver) -> tuple[int, ...]:
    """The order in which the pieces of a batch are done: a bad one in the midst ends the batch."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    poke(host, b"\1" * 16)
    gone = driver.memory()
    assert driver.batch([*((device + n, host + n, 1) for n in range(8)), (host + 64, gone, 1)], stream) == SUCCESS
    driver.call("cuMemUnmap", gone, 2 << 20)
    driver.attempt("cuStreamSynchronize", stream)
    return tuple(number for number in range(8) if peek(device + number) == b"\1")


def test_copies_of_a_batch_run_in_any_order(start_driver: StartDriver) -> None:
    """Which pieces of a batch are done when it fails depends on the seed, and on nothing else."""
    seen = [first_bytes_that_arrive(start_driver(seed=seed)) for seed in (1, 1, 2, 3, 4)]
    assert seen[0] == seen[1]
    assert len(set(seen)) > 2
    assert any(pieces != tuple(range(len(pieces))) for pieces in seen)


def what_a_store_reads(driver: Driver, order: int) -> bytes:
    """A forward pass writes a block, and a batch of the same stream stores it."""
    stream, host, device = driver.stream(), driver.host(), driver.memory()
    driver.launch(stream, lambda: poke(device, b"new!"))
    assert driver.batch([(host, device, 4)], stream, order=order) == SUCCESS
    driver.finish(stream)
    return peek(host, 4)


def test_only_stream_order_waits_for_the_forward_pass(start_driver: StartDriver) -> None:
    """A copy in STREAM order reads what the work before it wrote; DURING_API_CALL never does, ANY does by seed."""
    old, new = b"\xdb" * 4, b"new!"
    assert {what_a_store_reads(start_driver(seed=seed), ORDER_STREAM) for seed in range(4)} == {new}
    assert {what_a_store_reads(start_driver(seed=seed), ORDER_DURING_CALL) for seed in range(4)} == {old}
    assert {what_a_store_reads(start_driver(seed=seed), ORDER_ANY) for seed in range(6)} == {old, new}


def test_source_is_free_after_the_call_only_where_the_order_says_so(start_driver: StartDriver) -> None:
    """The source may change after a call with DURING_API_CALL; with ANY some seeds read the change."""
    found: dict[int, set[bytes]] = {}
    for order, seeds in ((ORDER_DURING_CALL, range(4)), (ORDER_ANY, range(6))):
        for seed in seeds:
            driver = start_driver(seed=seed)
            stream, host, device = driver.stream(), driver.host(), driver.memory()
            poke(host, b"right")
            driver.batch([(device, host, 5)], stream, order=order)
            poke(host, b"wrong")
            driver.finish(stream)
            found.setdefault(order, set()).add(peek(device, 5))
    assert found == {ORDER_DURING_CALL: {b"right"}, ORDER_ANY: {b"right", b"wrong"}}


def test_pageable_memory_may_make_a_copy_wait(start_driver: StartDriver) -> None:
    """With pageable memory an asynchronous copy returns before it is done with some seeds, after it with others."""
    done = set()
    for seed in range(6):
        driver, pageable = start_driver(seed=seed), ctypes.create_string_buffer(4)
        stream, device = driver.stream(), driver.memory()
        driver.copy(ctypes.addressof(pageable), device, 4, stream)
        done.add(pageable.raw == b"\xdb" * 4)
        driver.finish(stream)
        assert pageable.raw == b"\xdb" * 4
    assert done == {True, False}


def test_synchronous_copies_wait_as_documented(driver: Driver) -> None:
    """From the device to the host cuMemcpy returns when the copy is done; between device memories it does not."""
    device, other, host = driver.memory(), driver.memory(), ctypes.create_string_buffer(b"pageable")
    driver.call("cuMemcpyHtoD_v2", device, host, 8)
    host.raw = b"replaced!"  # it was staged
    driver.call("cuMemcpyDtoD_v2", other, device, 8)
    assert peek(other, 8) == b"\xdb" * 8
    result = ctypes.create_string_buffer(8)
    driver.call("cuMemcpyDtoH_v2", result, other, 8)
    assert result.raw == b"pageable"


def test_directions_are_checked(driver: Driver) -> None:
    """A call with a direction in its name refuses addresses of another side."""
    stream, device, host = driver.stream(), driver.memory(), driver.host()
    assert driver.attempt("cuMemcpyHtoDAsync_v2", host, device, 8, stream) == INVALID
    assert driver.attempt("cuMemcpyDtoHAsync_v2", device, host, 8, stream) == INVALID
    assert driver.attempt("cuMemcpyDtoDAsync_v2", device, host, 8, stream) == INVALID
    assert driver.attempt("cuMemcpyHtoDAsync_v2", device, host, 8, stream) == SUCCESS


def test_fill_runs_on_its_stream(driver: Driver) -> None:
    """A fill sets every byte of its range and no other, when its stream gets to it."""
    stream, device = driver.stream(), driver.memory()
    driver.call("cuMemsetD8Async", device + 1, 7, 10_000, stream)
    assert peek(device + 1) == b"\xdb"
    driver.finish(stream)
    assert peek(device, 10_002) == b"\xdb" + b"\7" * 10_000 + b"\xdb"


def test_pointer_to_nothing_is_an_error_and_no_crash(driver: Driver, tmp_path: Path) -> None:
    """A copy from an address where nothing is fails, and the process goes on."""
    stream, device = driver.stream(), driver.memory()
    results = set()
    for _ in range(2):
        results.add(driver.attempt("cuMemcpyAsync", device, 1 << 46, 8, stream))
        results.add(driver.attempt("cuStreamSynchronize", stream))
    assert "CUDA_ERROR_ILLEGAL_ADDRESS" in results or INVALID in results
    assert calls(read(tmp_path / "trace"), "cuMemcpyAsync")
