"""Blocks go from a device to the host pool and back as they were, in as few calls as there are batches."""

from __future__ import annotations

import pytest

from kvcached_client.cuda.driver import CALL_PIECES_MAX
from tests.cuda.conftest import RunProgram
from tests.cuda_driver.trace import Record, broken_rules, calls, ran

#: Of one layer of a block of `programs`: K and V of 2 heads of 8 float16, 16 tokens.
PAGE_BYTES = 2 * 2 * 8 * 2 * 16
#: CU_EVENT_BLOCKING_SYNC
SLEEPS = 1


def batches(records: list[Record]) -> list[Record]:
    return calls(records, "cuMemcpyBatchAsync")


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("seed", [1, 2])
def test_loaded_blocks_are_those_that_were_stored(run_program: RunProgram, order: str, verify: bool, seed: int) -> None:
    """Whatever a device delays and reorders, blocks come back as they were stored; no rule of the driver is broken."""
    done = run_program("round_trip", order, verify, seed=seed)

    assert done.said == 0
    assert broken_rules(done.records) == []
    assert done.granules == 0
    assert not calls(done.records, "cuMemcpyAsync")


def test_transfer_of_a_batch_is_one_call(run_program: RunProgram) -> None:
    """A store is one call of the driver, a whole load as well, a load by layers one for each layer."""
    done = run_program("round_trip", "layer_first", True, 2)

    blocks, layers = 10, 3
    assert [each.arguments["count"] for each in batches(done.records)] == [
        *(blocks * layers, blocks * layers),  # a store, a load
        *(blocks * layers, blocks, blocks, blocks),  # a store, a load by layers
    ]
    layer_bytes = blocks * PAGE_BYTES
    assert [each.arguments["bytes"] for each in ran(done.records, "copy")] == [
        *([layer_bytes * layers] * 3),  # every byte once
        *([layer_bytes] * layers),
    ]


@pytest.mark.parametrize("verify", [True, False])
def test_blocks_are_summed_by_threads(run_program: RunProgram, verify: bool) -> None:
    """Checksums that several threads make are those of the blocks: loads find none that differs."""
    done = run_program("summed_by_threads", verify)

    assert done.said == 0
    assert broken_rules(done.records) == []
    assert done.granules == 0


def test_large_batches_are_several_calls(run_program: RunProgram) -> None:
    """The driver prepares all pieces of a call before the device begins: many pieces are told some at a time."""
    done = run_program("round_trip", "layer_first", True, 2, 1, 20, True)

    blocks, layers = 10, 20
    assert done.said == 0
    assert broken_rules(done.records) == []
    counts = [each.arguments["count"] for each in batches(done.records)]
    assert counts == [CALL_PIECES_MAX, blocks * layers - CALL_PIECES_MAX] * 3 + [blocks] * layers


def test_layers_of_a_block_are_rows_of_one_copy(run_program: RunProgram) -> None:
    """A store and a load are a copy for each block; a load by layers takes 16 small layers of each at once.

    The last four layers are too few for rows.
    """
    done = run_program("small_round_trip", "layer_first", True, 20)

    blocks, layers = 10, 20
    assert done.said == 0
    assert broken_rules(done.records) == []
    depths = [each.arguments["depth"] for each in calls(done.records, "cuMemcpy3DAsync")]
    assert depths == [layers] * 3 * blocks + [16] * blocks  # two stores, a load, a load by layers
    assert [each.arguments["count"] for each in batches(done.records)] == [4 * blocks]
    assert sum(each.arguments["bytes"] for each in ran(done.records, "copy")) == 4 * blocks * layers * PAGE_BYTES


def test_layers_of_few_blocks_are_loaded_some_at_once(run_program: RunProgram) -> None:
    """A batch of a layer would take longer to plan than to copy. The next layer is said to be there as ever."""
    done = run_program("short_round_trip", 20)

    blocks, layers = 10, 20
    assert done.said == 0
    assert broken_rules(done.records) == []
    depths = [each.arguments["depth"] for each in calls(done.records, "cuMemcpy3DAsync")]
    assert depths == [layers] * 3 * blocks + [8] * 2 * blocks
    assert [each.arguments["count"] for each in batches(done.records)] == [4 * blocks]


@pytest.mark.parametrize("layers", [2, 20])
def test_rows_are_in_one_allocation(run_program: RunProgram, layers: int) -> None:
    """Layers in allocations of their own are no rows, be they at even distances: a driver refuses such a copy."""
    done = run_program("small_round_trip", "layer_first", True, layers, True)

    assert done.said == 0
    assert broken_rules(done.records) == []
    assert len(calls(done.records, "cuMemGetAddressRange")) == layers
    assert not calls(done.records, "cuMemcpy3DAsync")
    assert sum(each.arguments["count"] for each in batches(done.records)) == 4 * 10 * layers


@pytest.mark.parametrize("layers", [1, 20])
def test_end_of_a_transfer_is_waited_for_in_a_loop_once_it_has_begun(run_program: RunProgram, layers: int) -> None:
    """To wake up takes longer than to copy the end. Until the device comes to it, whoever waits sleeps."""
    done = run_program("round_trip", "layer_first", True, 4, 1, layers)

    flags = {each.arguments["event"]: each.arguments["flags"] for each in calls(done.records, "cuEventCreate")}
    recorded = {each.arguments["event"]: each for each in calls(done.records, "cuEventRecord")}
    waits = [each.arguments["event"] for each in calls(done.records, "cuEventSynchronize")]
    copied = batches(done.records) + calls(done.records, "cuMemcpy3DAsync")
    ends = [at for at, event in enumerate(waits) if not flags[event] & SLEEPS]
    assert len(ends) == 8  # four stores, two loads, two loads by layers
    for at in ends:
        before, end = recorded[waits[at - 1]], recorded[waits[at]]
        assert flags[waits[at - 1]] & SLEEPS
        assert before.stream == end.stream
        between = [each for each in copied if before.order < each.order < end.order]
        assert {each.stream for each in between} == {end.stream}


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_blocks_of_many_layers_are_those_that_were_stored(run_program: RunProgram, verify: bool, seed: int) -> None:
    """Whatever a device delays and reorders, blocks that are copied as rows come back as they were stored."""
    done = run_program("round_trip", "layer_first", verify, 4, 1, 9 + seed, seed=seed)

    assert done.said == 0
    assert broken_rules(done.records) == []
    assert done.granules == 0


def test_neighbours_are_one_copy(run_program: RunProgram) -> None:
    """Blocks that follow each other on both sides are one copy, within a slab: each slab begins with headers."""
    done = run_program("neighbours", 1 << 20)

    slots_per_slab = done.said
    assert slots_per_slab < 24 <= 2 * slots_per_slab
    assert [each.arguments["count"] for each in batches(done.records)] == [2]


def test_copies_stay_within_what_is_registered_at_once(run_program: RunProgram) -> None:
    """Parts of the host pool that are registered at once are whole slabs, as no copy has bytes of two of them."""
    done = run_program("neighbours", 0x18000)

    assert broken_rules(done.records) == []
    assert len(calls(done.records, "cuMemHostRegister")) == 8  # one for each slab


def test_layer_is_there_when_it_is_said_to_be(run_program: RunProgram) -> None:
    """A load by layers tells of a layer once the device has all of its bytes."""
    done = run_program("layer_by_layer", delay_us=30_000)

    assert done.said == [[0x11], [0x11] * 2, [0x11] * 3]


def test_changed_bytes_are_found(run_program: RunProgram) -> None:
    """Blocks whose stored bytes have changed are named, be it all of them, and no layer is said to be there."""
    done = run_program("corrupt")

    assert done.said == [[1], [1], [0, 1], [0, 1]]
    assert broken_rules(done.records) == []


def test_older_driver_copies_one_by_one(run_program: RunProgram) -> None:
    """A driver without batches gets a call for each piece, and the bytes are the same."""
    done = run_program("round_trip", "layer_first", True, version=12000)

    assert done.said == 0
    assert calls(done.records, "cuMemcpyAsync")
    assert not batches(done.records)


def test_memory_that_cannot_be_registered_is_copied_all_the_same(run_program: RunProgram) -> None:
    """Where the driver registers only some of the host pool, a warning says so, and the bytes are the same."""
    done = run_program("round_trip", "layer_first", True, faults="refused_registration=@2")

    assert done.said == 0
    assert "131072 of 524288 bytes of the host pool are registered" in done.log


def test_failed_copy_is_an_error(run_program: RunProgram) -> None:
    """A copy that the device breaks off fails its transfer, and every later one of the context."""
    done = run_program("failing", faults="launch_failure=@2")

    assert done.said
    assert set(done.said) == {"CUDA_ERROR_LAUNCH_FAILED"}


def test_abandoned_copies_are_over_before_memory_goes(run_program: RunProgram) -> None:
    """Who stops taking batches waits for those that are queued: their memory may go then."""
    done = run_program("abandoned", delay_us=3000)

    assert broken_rules(done.records) == []
    assert ran(done.records)
    assert done.granules == 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_load_is_over_while_a_store_is_held_up(run_program: RunProgram, seed: int) -> None:
    """A worker copies both ways at once, each on a stream of its own: a load does not wait for a store's copies."""
    done = run_program("both_directions", seed=seed)

    load, store = 2, 1
    assert done.said == [load, store, 0x11]
    assert broken_rules(done.records) == []
    assert len({each.stream for each in batches(done.records)}) == 2
    assert done.granules == 0
