from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence

import pytest

from kvcached.worker.copier import SlotRun
from kvcached.worker.copier_host import HostCopier
from kvcached.worker.geometry import pool_geometry
from kvcached.worker.memory import PoolMemory
from kvcached.worker.messages import COMMANDS_IN_FLIGHT_MAX, Ack, Command, Copy, Probe, Shutdown, Work
from kvcached.worker.stream import CommandStream, CorruptCopy, probe
from kvcached_client.types import pack_ranges
from tests.worker.groups import SLOTS, tiny_layout

GEOMETRY = pool_geometry(tiny_layout(), SLOTS)


@pytest.fixture
def memory() -> Iterator[PoolMemory]:
    pool = PoolMemory("kvcached-test", GEOMETRY.size_bytes)
    yield pool
    pool.close()


class LossyCopier(HostCopier):
    """Does not copy at all."""

    def copy(self, runs: Sequence[SlotRun]) -> None:
        pass


class ScribblingCopier(HostCopier):
    """Copies, and spoils the source on the way."""

    def copy(self, runs: Sequence[SlotRun]) -> None:
        super().copy(runs)
        self.zero(runs[0].source)


class GatedCopier(HostCopier):
    """Copies when it is let."""

    def __init__(self, address: int) -> None:
        super().__init__(GEOMETRY, address)
        self.entered = threading.Event()
        self.gate = threading.Event()

    def copy(self, runs: Sequence[SlotRun]) -> None:
        self.entered.set()
        assert self.gate.wait(20)
        super().copy(runs)


def is_zero(copier: HostCopier, slot: int) -> bool:
    return copier.checksum(slot) == copier.checksum(SLOTS - 1)


def test_probe_passes_and_leaves_zeros(memory: PoolMemory) -> None:
    """A probe of a working copier passes, and both slots are zero afterwards."""
    copier = HostCopier(GEOMETRY, memory.address)

    probe(copier, GEOMETRY.slot_bytes, Probe(source=0, target=1, seed=9))

    assert is_zero(copier, 0)
    assert is_zero(copier, 1)


@pytest.mark.parametrize(("kind", "spoilt"), [(LossyCopier, 3), (ScribblingCopier, 2)])
def test_probe_detects_corruption(memory: PoolMemory, kind: type[HostCopier], spoilt: int) -> None:
    """A probe names the slot that does not read as written, and still leaves zeros."""
    copier = kind(GEOMETRY, memory.address)

    with pytest.raises(CorruptCopy, match=f"probe 2 → 3, seed 9: slot {spoilt} has checksum"):
        probe(copier, GEOMETRY.slot_bytes, Probe(source=2, target=3, seed=9))

    assert is_zero(copier, 2)
    assert is_zero(copier, 3)


class Running:
    """A stream whose acks can be awaited."""

    def __init__(self, copier: HostCopier) -> None:
        self.acks: queue.Queue[Ack] = queue.Queue()
        self.ended = threading.Event()
        self.stream = CommandStream(copier, GEOMETRY.slot_bytes, self.acks.put, self.ended.set)
        self.stream.start()

    def submit(self, sequence: int, work: Work) -> bool:
        return self.stream.submit(Command(sequence=sequence, work=work))

    def shut_down(self, sequence: int) -> None:
        assert self.submit(sequence, Shutdown())
        assert self.ended.wait(20)


def copy_of(source: int, target: int) -> Copy:
    return Copy(sources=pack_ranges([(source, 1)]), targets=pack_ranges([(target, 1)]))


def test_stream_acknowledges_each_command_once_in_order(memory: PoolMemory) -> None:
    """Every command gets exactly one ack, in order; those that fail say why, and do not stop the next."""
    running = Running(HostCopier(GEOMETRY, memory.address))
    odd = Copy(sources=b"abc", targets=b"")

    works: list[Work] = [copy_of(0, 1), copy_of(0, 99), odd, Probe(source=4, target=4, seed=0)]
    for sequence, work in enumerate(works, 1):
        assert running.submit(sequence, work)
    running.shut_down(5)

    acks = [running.acks.get_nowait() for _ in range(running.acks.qsize())]
    assert [ack.sequence for ack in acks] == [1, 2, 3, 4, 5]
    assert [ack.error for ack in acks] == [
        "",
        f"ValueError: slots [99, 100) are not in a pool of {SLOTS}",
        "ValueError: slot ranges of 3 bytes are no pairs of int32",
        "ValueError: slot 4 is a target and named twice",
        "",
    ]


def test_stream_takes_commands_while_a_copy_runs(memory: PoolMemory) -> None:
    """A long copy does not hold up the caller: commands queue behind it up to the limit, then are turned away."""
    copier = GatedCopier(memory.address)
    running = Running(copier)
    assert running.submit(1, copy_of(0, 1))
    assert copier.entered.wait(20)

    taken = [running.submit(2 + index, copy_of(0, 1)) for index in range(COMMANDS_IN_FLIGHT_MAX + 1)]
    acknowledged_early = running.acks.qsize()
    copier.gate.set()
    for _ in range(COMMANDS_IN_FLIGHT_MAX + 1):
        running.acks.get(timeout=20)
    running.shut_down(1000)

    assert taken == [True] * COMMANDS_IN_FLIGHT_MAX + [False]
    assert acknowledged_early == 0


def test_stream_ends_when_acks_cannot_be_sent(memory: PoolMemory) -> None:
    """A stream whose acks reach nobody ends instead of copying on."""
    ended = threading.Event()

    def broken(ack: Ack) -> None:
        raise BrokenPipeError

    stream = CommandStream(HostCopier(GEOMETRY, memory.address), GEOMETRY.slot_bytes, broken, ended.set)
    stream.start()

    assert stream.submit(Command(sequence=1, work=copy_of(0, 1)))
    assert ended.wait(20)
