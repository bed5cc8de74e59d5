"""Transfers through a real worker process, spoken to by hand."""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.sealed import SharedMemory, sealed_memfd
from kvcached.process.seqpacket import receive, send
from kvcached.worker.messages import (
    REPLY_SIZE_BYTES_MAX,
    Done,
    Hurry,
    Probe,
    Request,
    Shutdown,
    Work,
    WorkerConfig,
    decode_report,
    decode_request,
    encode,
)
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.blocks.progress import STATE_DONE, STATE_FAILED
from tests.worker.groups import SLOTS, read_block, tiny_layout
from tests.worker.host_rigs import (
    BLOCK_BYTES,
    FINGERPRINT,
    HOST,
    NAMESPACE,
    SHARD,
    SHARDS,
    block_place,
    load_of,
    put_block,
    span_of,
    store_of,
)

PATIENCE_S = 20
LAYOUT = tiny_layout("layer_first", SHARDS)


class Worker:
    """A worker process with a host pool, past its greeting."""

    def __init__(self, run_dir: str, made: ExitStack) -> None:
        self.sequence = 0
        host = sealed_memfd("test-host", HOST.size_bytes)
        made.callback(os.close, host)
        self.host = SharedMemory(host, HOST.size_bytes)
        made.callback(self.host.close)
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        made.callback(self.connection.close)
        config = WorkerConfig(
            replica="default",
            shard=SHARD,
            geometry=pool_geometry(LAYOUT, SLOTS),
            pretouch_bytes=0,
            host=HOST,
            namespace=NAMESPACE,
            fingerprint=FINGERPRINT,
        )
        memory = ShardMemory.make("test", config.geometry.size_bytes)
        made.callback(memory.close)
        _, self.page, *self.events = memory.for_engine
        self.pool = SharedMemory(memory.descriptor, config.geometry.size_bytes)
        made.callback(self.pool.close)
        with theirs:
            send(self.connection, encode(config), (*memory.for_worker, host))
            with Path(f"{run_dir}/worker.log").open("wb") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "kvcached.worker.main", str(theirs.fileno())],
                    pass_fds=(theirs.fileno(),),
                    stderr=log,
                )
            made.callback(self.process.wait)
            made.callback(self.process.kill)
        assert select.select([self.connection], [], [], PATIENCE_S)[0]
        assert receive(self.connection, REPLY_SIZE_BYTES_MAX, 0) is not None

    def order(self, work: Work) -> int:
        self.sequence += 1
        self.connection.sendall(encode(Request(sequence=self.sequence, work=work)))
        return self.sequence

    def ack(self) -> Done:
        assert select.select([self.connection], [], [], PATIENCE_S)[0]
        message = decode_report(self.connection.recv(REPLY_SIZE_BYTES_MAX))
        assert isinstance(message, Done)
        return message

    def entry(self, index: int) -> tuple[int, int]:
        """Transfer and state of an entry of the progress page."""
        content = os.pread(self.page, 16, index * 64)
        return int.from_bytes(content[:8], "little"), int.from_bytes(content[12:], "little")


@pytest.fixture
def worker(run_dir: str) -> Iterator[Worker]:
    with ExitStack() as made:
        yield Worker(run_dir, made)


def test_worker_stores_and_loads(worker: Worker) -> None:
    """Blocks go from the pool into the host pool and back into other slots, and the reader of the page is woken."""
    blocks = [bytes([number]) * BLOCK_BYTES for number in (1, 2)]
    for slot, block in enumerate(blocks, 4):
        put_block(worker.pool.view, LAYOUT, slot, block)

    assert worker.order(store_of(span_of([(4, 2)], [(6, 2)]))) == 1
    assert worker.ack() == Done(sequence=1)
    assert worker.order(load_of(span_of([(9, 2)], [(6, 2)]), progress=8, transfer=20)) == 2
    assert worker.ack() == Done(sequence=2)

    assert [bytes(worker.host.view[block_place(slot) :][:BLOCK_BYTES]) for slot in (6, 7)] == blocks
    assert [read_block(bytes(worker.pool.view), LAYOUT, SLOTS, slot) for slot in (9, 10)] == blocks
    assert worker.entry(8) == (20, STATE_DONE)
    assert os.eventfd_read(worker.events[8]) > 0


def test_worker_names_corrupt_blocks(worker: Worker) -> None:
    """An ack names the blocks that are not what was stored, and is no error."""
    worker.order(store_of(span_of([(4, 3)], [(0, 3)])))
    assert worker.ack().error == ""
    worker.host.view[block_place(1)] ^= 1

    worker.order(load_of(span_of([(9, 3)], [(0, 3)]), progress=0, transfer=20))

    assert worker.ack() == Done(sequence=2, corrupt=(1,))
    assert worker.entry(0) == (20, STATE_FAILED)


def test_worker_acknowledges_everything_once(worker: Worker) -> None:
    """Loads, stores, hurries, failing ones and the shutdown get one ack each, in whatever order."""
    span = span_of([(0, 1)], [(0, 1)])
    works: list[Work] = [
        store_of(span, transfer=30),
        store_of(span_of([(0, 1)], [(99, 1)])),
        Hurry(transfer=30),
        Hurry(transfer=31),
        load_of(span_of([(99, 1)], [(0, 1)]), transfer=50, progress=30),
        Probe(source=5, target=5, seed=0),
    ]
    for work in works:
        worker.order(work)
    acks = {ack.sequence: ack for ack in [worker.ack() for _ in works]}
    worker.order(Shutdown())

    assert worker.ack() == Done(sequence=7)
    assert worker.process.wait(PATIENCE_S) == 0
    assert sorted(acks) == [1, 2, 3, 4, 5, 6]
    assert [sequence for sequence, ack in sorted(acks.items()) if ack.error] == [2, 5, 6]
    assert acks[2].error == "BadRequest: bad_value: job: host slots from 99 to 99 of 21 (name those that exist)"
    assert worker.entry(30) == (50, STATE_FAILED)


def test_refused_load_is_told_to_its_reader(worker: Worker) -> None:
    """A load that the worker does not take is acknowledged as failed, and failed in the page, too."""
    worker.sequence = 5
    worker.order(load_of(span_of([(0, 1)], [(0, 1)]), transfer=60, progress=2))

    assert worker.ack() == Done(sequence=6, error="sequence 6 after 0")
    assert worker.entry(2) == (60, STATE_FAILED)


@pytest.mark.parametrize("packed", [b"abc", bytes(12), "text", 7], ids=["no number", "no pair", "text", "a number"])
def test_ranges_that_are_no_pairs_are_no_request(packed: object) -> None:
    """Slot ranges that are no pairs of int32 are refused when a request is decoded, and none of it is carried out."""
    work = {"op": "load", "transfer": 1, "generation": 1, "progress": 0, "verify": True}
    spans = [[0, b"", bytes(16), packed, bytes(8)]]

    with pytest.raises(msgspec.DecodeError):
        decode_request(msgspec.msgpack.encode({"sequence": 1, "work": {**work, "spans": spans}}))


def test_ranges_of_a_request_arrive_as_they_were() -> None:
    """What a worker decodes is the request that was sent, with its ranges of slots."""
    request = Request(sequence=1, work=load_of(span_of([(3, 2), (9, 1)], [(6, 3)])))

    assert decode_request(encode(request)) == request
