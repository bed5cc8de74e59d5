"""Engines in offload mode that only load: real processes, and a kernel that keeps them from writing host memory."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.errors import Refused
from kvcached_client.offload import new_instance
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import Order, Scheduler, ShardMemory
from tests.line_process import LineProcess

USER, PAGE_BYTES, BLOCKS = 12_011, 4096, 4
CONFIG = f"""
session_ttl_ms = 20_000
[host]
size_bytes = 4194304
slab_bytes = 1048576
verify = "never"
[offload]
[access]
[[access.engine]]
users = ["{USER}"]
read_only = true
"""


@pytest.fixture
def daemon() -> Iterator[RunningDaemon]:
    """A daemon whose run directory other users reach, with a stored prompt."""
    with tempfile.TemporaryDirectory(dir="/run" if os.geteuid() == 0 else None) as directory:
        Path(directory).chmod(0o755)
        with started(Path(directory), CONFIG) as running:
            with engine(running, read_only=False) as (scheduler, memory):
                _, order = scheduler.prepare_store("prompt", BLOCKS)
                memory.store(order)
            yield running


@contextmanager
def engine(daemon: RunningDaemon, *, read_only: bool) -> Iterator[tuple[Scheduler, ShardMemory]]:
    scheduler, memory = (
        Scheduler(daemon.run_dir, new_instance(), 1, PAGE_BYTES, read_only=read_only),
        ShardMemory(0, PAGE_BYTES),
    )
    with scheduler.client:
        memory.join(scheduler.client.session)
        assert memory.link is not None
        with memory.link:
            yield scheduler, memory


@contextmanager
def reader(daemon: RunningDaemon, *, uid: int | None = None) -> Iterator[LineProcess]:
    """A reader, perhaps of another user."""
    program = ("tests.daemon.stray_writer", str(daemon.run_dir), new_instance().hex())
    user = () if uid is None else ("tests.daemon.as_user", str(uid), str(uid))
    child = LineProcess(*user, *program)
    try:
        assert child.hear() == "joined"
        yield child
    finally:
        child.end()


def test_stray_write_of_a_reader_ends_it_and_changes_nothing(daemon: RunningDaemon) -> None:
    """A reader gets the right bytes; the kernel refuses it a writable mapping, and its write is its end."""
    with reader(daemon) as stray:
        assert stray.ask(f"load prompt {BLOCKS}") == "([], True)"
        assert stray.ask("remap").startswith("PermissionError")
        assert stray.ask("stray") == ""
        assert stray.process.wait() == -signal.SIGSEGV

    with engine(daemon, read_only=True) as (scheduler, memory):
        assert memory.load(scheduler.prepare_load("prompt", BLOCKS)) == ([], True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_reader_of_another_user_cannot_open_the_memory_again_to_write_it(daemon: RunningDaemon) -> None:
    """Its table says read_only: it asks for nothing, is told so, and the memory's mode keeps it from the way around."""
    with reader(daemon, uid=USER) as other:
        assert other.ask(f"load prompt {BLOCKS}") == "([], True)"
        assert other.ask("remap").startswith("PermissionError")
        assert other.ask("reopen").startswith("PermissionError")


def test_reader_stores_nothing(daemon: RunningDaemon) -> None:
    """What a reader offers is passed over; its shard refuses to store; it may clear nothing."""
    with engine(daemon, read_only=True) as (scheduler, memory):
        plan, order = scheduler.prepare_store("longer prompt", BLOCKS)

        assert scheduler.client.read_only
        assert (plan.transfer, plan.depth, order.slots) == (0, BLOCKS, [])
        with pytest.raises(Refused, match="maps the host pool read-only"):
            memory.store(Order(1, 0, "longer prompt", 0, [0]))
        with pytest.raises(Refused, match="this session is read-only"):
            scheduler.client.clear()
        assert scheduler.hit("longer prompt", BLOCKS) == 0
    with Admin.connect(daemon.run_dir) as own:
        assert own.stats().counters["store_declined_blocks"] == BLOCKS
