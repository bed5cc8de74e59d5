"""Engines for the crash harness. They pass every failpoint of the client, and speak in lines.

    python -m tests.faults.engine managed|offload RUN_DIR RECORD

Commands: ``work NAME`` computes a prompt, stores it and reads it back; ``again NAME`` is the same on a new session;
``end`` closes the session. Answers: ``done HITS`` with the blocks that were read back, or the error that ended it.
RECORD is the expected state: a line with the name of each prompt whose commit was answered.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import ExitStack
from functools import partial
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvcached_client import Client, Lease, MappedPool, map_pool
from kvcached_client.blocks import copy as block_copy
from kvcached_client.offload import new_instance
from tests.daemon import offload_process
from tests.daemon.offload_process import Scheduler, ShardMemory
from tests.daemon.test_host_tier import wait_until
from tests.line_process import outcome, say

BLOCKS, BLOCK_SIZE, SLOTS = 4, 4, 16
OFFLOAD_BLOCKS, PAGE_BYTES = 8, 4096
#: Longer than a busy machine keeps a process waiting, shorter than a test.
DEADLINE_MS = 3000


class WrongBytes(Exception):
    """A hit holds other bytes than were stored under its name."""


class FaultyEngine(ABC):
    """An engine of one process: a session, and the memory of its only shard."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        with ExitStack() as parts:
            self._connect(parts)
            self._parts = parts.pop_all()

    @abstractmethod
    def _connect(self, parts: ExitStack) -> None:
        """Open a session; what has to be closed goes to `parts`."""

    def close(self) -> None:
        """End the session."""
        self._parts.close()

    @abstractmethod
    def store(self, name: str) -> None:
        """Compute a prompt; when it returns, what the daemon knows of it can be found."""

    @abstractmethod
    def read(self, name: str) -> int:
        """How many blocks of a prompt are hit.

        Raises:
            WrongBytes: they are not what was stored.
        """

    @abstractmethod
    def forget(self) -> None:
        """Lose what this engine has in its own memory, so that the next read comes from the host pool."""


class ManagedEngine(FaultyEngine):
    """An engine on a device pool of the daemon."""

    def _connect(self, parts: ExitStack) -> None:
        self.client = parts.enter_context(Client.connect(self.run_dir, deadline_ms=DEADLINE_MS))
        self.pool = parts.enter_context(map_pool(self.client.session, 0, deadline_ms=DEADLINE_MS))

    def store(self, name: str) -> None:
        chain = self.client.chain(tokens_of(name))
        with self.client.acquire(f"compute {name}", chain, full=True) as lease:
            for layer in range(self.pool.layout.groups[0].layers):
                pages = self.pool.pages(layer)
                pages[lease.block_table[lease.hit_blocks :]] = pages_of(name, layer, pages.shape[1])[lease.hit_blocks :]
            lease.commit(chain.token_count)
        wait_until(self.run_dir, lambda stats: not any(stats.transfers.values()))

    def read(self, name: str) -> int:
        chain = self.client.chain(tokens_of(name))
        with self.client.acquire(f"read {name}", chain, full=True) as lease:
            hit = lease.wait_loaded() // BLOCK_SIZE
            check_pages(self.pool, lease, name, hit)
            return hit

    def forget(self) -> None:
        with self.client.acquire("forget", self.client.chain(range(SLOTS * BLOCK_SIZE)), full=True) as lease:
            for layer in range(self.pool.layout.groups[0].layers):
                self.pool.pages(layer)[lease.block_table] ^= 0xFF


class OffloadEngine(FaultyEngine):
    """An engine that keeps its own device memory. Those of one process are one engine that connects anew."""

    instance = new_instance()
    label = "tiny"

    def _connect(self, parts: ExitStack) -> None:
        self.scheduler = Scheduler(self.run_dir, self.instance, 1, PAGE_BYTES, DEADLINE_MS, self.label)
        parts.enter_context(self.scheduler.client)
        self.shard = ShardMemory(0, PAGE_BYTES)
        self.shard.join(self.scheduler.client.session)
        assert self.shard.link is not None
        parts.enter_context(self.shard.link)

    def store(self, name: str) -> None:
        plan, order = self.scheduler.prepare_store(name, OFFLOAD_BLOCKS)
        if plan.transfer:
            self.shard.store(order)

    def read(self, name: str) -> int:
        if not self.scheduler.hit(name, OFFLOAD_BLOCKS):
            return 0
        order = self.scheduler.prepare_load(name, OFFLOAD_BLOCKS)
        bad, right = self.shard.load(order)
        if not right:
            raise WrongBytes(name)
        return bad[0] if bad else len(order.slots)

    def forget(self) -> None:
        for tensor in self.shard.tensors:
            tensor.array[:] = 0


ENGINES: dict[str, type[FaultyEngine]] = {"managed": ManagedEngine, "offload": OffloadEngine}


def tokens_of(name: str) -> list[int]:
    """A prompt of four blocks of which no other one has the first."""
    return [*blake2b(name.encode(), digest_size=BLOCK_SIZE).digest(), *range(BLOCK_SIZE * (BLOCKS - 1))]


def pages_of(name: str, layer: int, page_bytes: int) -> npt.NDArray[np.uint8]:
    """What one layer of a prompt's blocks holds."""
    random = np.random.default_rng([layer, *name.encode()])
    return random.integers(0, 256, (BLOCKS, page_bytes), np.uint8)


def check_pages(pool: MappedPool, lease: Lease, name: str, hit: int) -> None:
    """That the first blocks of a lease hold what was stored.

    Raises:
        WrongBytes: they do not.
    """
    for layer in range(pool.layout.groups[0].layers):
        pages = pool.pages(layer)
        if not np.array_equal(pages[lease.block_table[:hit]], pages_of(name, layer, pages.shape[1])[:hit]):
            raise WrongBytes(name)


class Program:
    """An engine as a program: it connects when there is work for it.

    Args:
        kind: of `ENGINES`.
        run_dir: the daemon's.
        record: the expected state.
    """

    def __init__(self, kind: str, run_dir: str, record: str) -> None:
        self._kind = ENGINES[kind]
        self._run_dir = Path(run_dir)
        self._record = Path(record)
        self._engine: FaultyEngine | None = None

    def carry_out(self, command: str, name: str) -> str:
        """Do what a line says; returns what became of it."""
        if command != "work":
            self._close()
        if command == "end":
            return "ended"
        if self._engine is None:
            self._engine = self._kind(self._run_dir)
        self._engine.store(name)
        with self._record.open("a") as lines:
            lines.write(f"{name}\n")
        self._engine.forget()
        return f"done {self._engine.read(name)}"

    def _close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.close()


def main(kind: str, run_dir: str, record: str) -> None:
    """Do what the lines say."""
    block_copy.PIECES_MAX = 4  # type: ignore[misc] # so that a copy of a few blocks has a middle
    offload_process.DEADLINE_MS = DEADLINE_MS  # of its shards
    program = Program(kind, run_dir, record)
    say("ready")
    for line in sys.stdin:
        command, _, name = line.strip().partition(" ")
        say(outcome(partial(program.carry_out, command, name), WrongBytes))


if __name__ == "__main__":
    main(*sys.argv[1:])
