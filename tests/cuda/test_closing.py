"""Closing what a device still works on: nothing is unmapped, unregistered or given up under a kernel or a copy."""

from __future__ import annotations

import pytest

from tests.cuda.conftest import RunProgram
from tests.cuda.test_offload import BLOCKS, WHOLE, Node, node
from tests.cuda.test_pool import OnDevice, ended, on_device
from tests.cuda_driver import trace
from tests.line_process import LineProcess

__all__ = ["node", "on_device"]


def closing_engine(on_device: OnDevice) -> LineProcess:
    engine = LineProcess("tests.cuda.closing_engine", str(on_device.daemon.run_dir))
    assert engine.hear() == "ready"
    return engine


def last(records: list[trace.Record], process: int, name: str) -> int:
    """When a process has last done it: a call, or an operation of a stream."""
    return max(record.order for record in records if (record.process, record.name) == (process, name))


def test_pool_is_given_up_after_the_kernels_on_it(on_device: OnDevice) -> None:
    """With its last view a pool is unmapped, and the daemon told, when the queued kernels have run."""
    with ended(closing_engine(on_device)) as engine:
        assert engine.ask("drop 0") == "told [True] over True"
        pid = engine.process.pid
    records = trace.read(on_device.trace_path)
    assert last(records, pid, "host function") < last(records, pid, "cuMemUnmap")


def test_process_that_ends_gives_its_pool_up_after_the_kernels_on_it(on_device: OnDevice) -> None:
    """A process that ends in order, with a view of a closed pool, tells the daemon when the queued kernels have run."""
    with ended(closing_engine(on_device)) as engine:
        assert engine.ask("exit 0") == "closed"
        engine.finish()
        assert engine.hear() == "told [True]"


def test_forgotten_pool_is_unmapped_after_the_kernels_on_it(on_device: OnDevice) -> None:
    """Without a close, too: the last view that goes waits for the queued kernels."""
    with ended(closing_engine(on_device)) as engine:
        assert engine.ask("forget 0") == "over True"
        pid = engine.process.pid
    records = trace.read(on_device.trace_path)
    assert last(records, pid, "host function") < last(records, pid, "cuMemUnmap")


def test_gates_are_unregistered_after_the_streams_have_passed(on_device: OnDevice) -> None:
    """A stream that has not come to its wait yet finds the gate registered."""
    with ended(closing_engine(on_device)) as engine:
        assert engine.ask("close_gates 0") == "over True"


def test_copier_is_closed_after_the_copies_that_are_queued(run_program: RunProgram) -> None:
    """Copies that nobody takes any more are done before the host pool is unregistered."""
    ran = run_program("closed_in_a_copy", delay_us=20_000)
    assert trace.broken_rules(ran.records) == []
    copies = [record.order for record in trace.ran(ran.records, "copy")]
    (closed, *_) = [record.order for record in trace.calls(ran.records, "cuMemHostUnregister")]
    assert len(copies) == ran.said
    assert max(copies) < closed


@pytest.mark.parametrize("what", ["store", "load"])
def test_shard_is_closed_after_the_copy_of_another_thread(node: Node, what: str) -> None:
    """`OffloadShard.close` in one thread waits for the copy of another one, and its host pool is unregistered then."""
    with node.engine(leave=False) as engine:
        pid = engine.process.pid
        assert engine.ask(f"store a {BLOCKS}") == "done"
        assert engine.ask(f"close_under_{what} {'b' if what == 'store' else 'a'} {BLOCKS}") == "whole True"
    records = node.records()
    assert trace.broken_rules(records) == []
    assert last(records, pid, "copy") < last(records, pid, "cuMemHostUnregister")
    with node.engine() as other:
        assert other.ask(f"load a {BLOCKS}") == WHOLE
        if what == "store":
            assert other.ask(f"load b {BLOCKS}") == WHOLE
