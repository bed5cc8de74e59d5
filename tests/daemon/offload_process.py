"""Processes of engines in offload mode: a scheduler with shards of its own, or one shard. They speak in lines.

    scheduler RUN_DIR INSTANCE SHARDS PAGE_BYTES OWN…   prints its session; OWN are the shards in this process
    shard RUN_DIR SHARDS PAGE_BYTES SHARD               joins when it is told a session

A block's bytes follow from its prompt's name, its depth and the shard, so that any process knows what must be there.
"""

from __future__ import annotations

import random
import sys
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.offload import Hold, OffloadClient, OffloadLayout, PreparedStore
from kvcached_client.offload_shard import BlockJob, JobSpan, OffloadShard
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.types import TransferId
from tests.client.offload_rig import HostTensor
from tests.line_process import outcome, say

LAYERS, BLOCK_SIZE, BLOCKS = 2, 4, 32
DEADLINE_MS = 10_000


class Order(msgspec.Struct, frozen=True):
    """A copy, as one process tells another."""

    transfer: int
    generation: int
    name: str
    start: int
    slots: list[int]


class ShardMemory:
    """One shard's tensors, which hold one prompt at a time, and its connection to the daemon."""

    def __init__(self, shard: int, page_bytes: int) -> None:
        self.shard = shard
        self.tensors = [HostTensor(np.zeros((BLOCKS, page_bytes), np.uint8)) for _ in range(LAYERS)]
        self.pages = EnginePages.of_tensors({f"layer {number}": each for number, each in enumerate(self.tensors)})
        self.link: OffloadShard | None = None

    def join(self, grant: SessionGrant) -> None:
        """Enter a session, and leave the one before."""
        joined = OffloadShard.join(grant, self.shard, self.pages, deadline_ms=DEADLINE_MS)
        if self.link is not None:
            self.link.close()
        self.link = joined

    def store(self, order: Order) -> None:
        """Compute the blocks and copy them out."""
        for depth in range(order.start, order.start + len(order.slots)):
            for number, tensor in enumerate(self.tensors):
                tensor.array[depth] = content(tensor, order.name, depth, number, self.shard)
        self._joined.store(job_of(order))

    def load(self, order: Order) -> tuple[list[int], bool]:
        """Copy the blocks in: which are bad, and whether the others are what they must be."""
        bad = self._joined.load(job_of(order))
        depths = [order.start + place for place in range(len(order.slots)) if place not in bad]
        return bad, all(
            (tensor.array[depth] == content(tensor, order.name, depth, number, self.shard)).all()
            for depth in depths
            for number, tensor in enumerate(self.tensors)
        )

    def close(self) -> None:
        """Leave the session."""
        self._joined.close()

    @property
    def _joined(self) -> OffloadShard:
        assert self.link is not None
        return self.link


class Scheduler:
    """One engine's session. Its leases are released at once: copies under way go on."""

    def __init__(
        self,
        run_dir: Path | str,
        instance: bytes,
        shards: int,
        page_bytes: int,
        deadline_ms: int = DEADLINE_MS,
        label: str = "tiny",
        *,
        read_only: bool = False,
    ) -> None:
        pages = ShardMemory(0, page_bytes).pages
        self.client = OffloadClient.connect(
            run_dir,
            engine="test engine",
            instance=instance,
            keyspace=b"k" * 32,
            label=label,
            layout=OffloadLayout(BLOCK_SIZE, shards, pages.block_bytes, pages.fingerprint),
            deadline_ms=deadline_ms,
            read_only=read_only,
        )
        self._requests = 0
        self.tenant = ""  #: whom the next prompts are for

    def hit(self, name: str, blocks: int) -> int:
        return self.client.match(keys_of(name, blocks), blocks * BLOCK_SIZE, full=True)

    def acquire(self, name: str, blocks: int) -> Hold:
        self._requests += 1
        request = f"request {self._requests}"
        keys = keys_of(name, blocks)
        return self.client.acquire(request, keys, blocks * BLOCK_SIZE, full=True, tenant=self.tenant)

    def prepare_store(self, name: str, blocks: int) -> tuple[PreparedStore, Order]:
        """A store of what a prompt lacks, which is one piece here."""
        lease, hit, _, _ = self.acquire(name, blocks)
        plan = self.client.prepare_store(lease, hit, keys_of(name, blocks)[16 * hit :])
        self.client.release(lease)
        start = plan.pieces[0].start if plan.pieces else hit
        return plan, Order(plan.transfer, plan.generation, name, start, plan.slots.tolist())

    def prepare_load(self, name: str, blocks: int) -> Order:
        """A load of all that is hit of a prompt."""
        lease, hit, _, _ = self.acquire(name, blocks)
        plan = self.client.prepare_load(lease, 0, hit)
        self.client.release(lease)
        return Order(plan.transfer, plan.generation, name, 0, plan.slots.tolist())


def keys_of(name: str, blocks: int) -> bytes:
    """The keys of a prompt's blocks; prompts of different names share none."""
    return b"".join(f"{name}/{depth}".encode().ljust(16) for depth in range(blocks))


def content(tensor: HostTensor, name: str, depth: int, number: int, shard: int) -> npt.NDArray[np.uint8]:
    """The bytes of one layer of one block on one shard."""
    block = random.Random(f"{name} {depth} {number} {shard}").randbytes(64)
    return np.resize(np.frombuffer(block, np.uint8), tensor.array.shape[1])


def job_of(order: Order) -> BlockJob:
    end = order.start + len(order.slots)
    keys = keys_of(order.name, end)
    span = JobSpan(
        depth=order.start,
        parent=keys[16 * (order.start - 1) : 16 * order.start] if order.start else b"",
        keys=keys[16 * order.start :],
        blocks=np.arange(order.start, end),
        slots=np.array(order.slots, np.int32),
    )
    return BlockJob(TransferId(order.transfer), order.generation, (span,))


def run_scheduler(run_dir: str, instance: str, shards: str, page_bytes: str, *own: str) -> None:
    """Commands: ``prepare NAME BLOCKS``, ``copy``, ``hit NAME BLOCKS``, ``reconnect``, ``bye``."""
    scheduler = Scheduler(run_dir, bytes.fromhex(instance), int(shards), int(page_bytes))
    memories = [ShardMemory(int(shard), int(page_bytes)) for shard in own]
    earlier: list[Scheduler] = []  # sessions that have not said goodbye
    order: Order | None = None
    for memory in memories:
        memory.join(scheduler.client.session)
    say(scheduler.client.session.to_bytes().hex())
    for command, *words in map(str.split, sys.stdin):
        match command:
            case "prepare":
                _, order = scheduler.prepare_store(words[0], int(words[1]))
                say(msgspec.json.encode(order).decode())
            case "copy":
                assert order is not None
                say("begins")
                say(outcome(partial(store_all, memories, order)))
            case "hit":
                say(outcome(partial(scheduler.hit, words[0], int(words[1]))))
            case "reconnect":
                earlier.append(scheduler)
                scheduler = Scheduler(run_dir, bytes.fromhex(instance), int(shards), int(page_bytes))
                say(scheduler.client.session.to_bytes().hex())
            case "bye":
                scheduler.client.close()
                say("bye")


def run_shard(_: str, __: str, page_bytes: str, shard: str) -> None:
    """Commands: ``join GRANT``, ``copy ORDER``, ``close``."""
    memory = ShardMemory(int(shard), int(page_bytes))
    for line in sys.stdin:
        command, _, argument = line.strip().partition(" ")
        match command:
            case "join":
                say(outcome(partial(memory.join, SessionGrant.from_bytes(bytes.fromhex(argument)))))
            case "copy":
                order = msgspec.json.decode(argument, type=Order)
                say("begins")
                say(outcome(partial(memory.store, order)))
            case "close":
                say(outcome(memory.close))


def store_all(memories: list[ShardMemory], order: Order) -> None:
    """Each shard computes and copies its part."""
    for memory in memories:
        memory.store(order)


if __name__ == "__main__":
    if sys.argv[1] == "scheduler":
        run_scheduler(*sys.argv[2:])
    else:
        run_shard(*sys.argv[2:])
