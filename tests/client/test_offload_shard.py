"""A shard in offload mode and its daemon: joining, what is said after copies, failures, and no way into a child."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import select
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from kvcached_client import (
    BadRequest,
    DaemonFailure,
    DaemonUnreachable,
    DeadlineExceeded,
    Refused,
    RequestError,
    SessionGrant,
    Stale,
    offload_shard,
)
from kvcached_client.blocks.mapping import huge_pages
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.offload_shard import STORES_PER_REPORT_MAX, BlockJob, OffloadShard
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.protocol.engine import Header, Request, Settled, TransferDone, error_reply
from kvcached_client.transport import steps
from kvcached_client.transport.attach import AttachConnection
from kvcached_client.types import TransferId, Verify
from tests.client.descriptors import held_here_and_in_a_child
from tests.client.fake_daemon import SILENCE, TOKEN, FakeDaemon
from tests.client.offload_rig import FINGERPRINT, NAMESPACE, job, layer, span
from tests.client.progress_page import sealed_memory

SLABS, SLAB_BYTES = 2, 16384
#: Of the host pool: a part is a page of headers, and 4 blocks.
SLOTS, HEADER_PLACE, BLOCK_PLACE = 8, 8192, 8192 + 4096
TENSORS = [layer(6, 512), layer(6, 512, seed=1)]


def pages() -> EnginePages:
    return EnginePages.of_tensors({str(index): tensor for index, tensor in enumerate(TENSORS)})


def offer(daemon: FakeDaemon, descriptor: int | None, **changes: Any) -> SessionGrant:
    daemon.memory = descriptor
    told: dict[str, Any] = {
        "shard": 1,
        "shards": 2,
        "epoch": 11,
        "slabs": SLABS,
        "slab_bytes": SLAB_BYTES,
        "block_bytes": 1024,
        "namespace": NAMESPACE * 2,
        "fingerprint": pages().fingerprint,
        "verify": Verify.ALWAYS,
    }
    daemon.joined_host = JoinedHost(**{**told, **changes})
    return SessionGrant(id=3, token=TOKEN, run_dir=str(daemon.run_dir))


@pytest.fixture
def pool(memory: list[int]) -> int:
    """The host pool's sealed memory."""
    memory.append(sealed_memory(SLABS * SLAB_BYTES))
    return memory[-1]


@pytest.fixture
def shard(daemon: FakeDaemon, pool: int) -> Iterator[OffloadShard]:
    """Shard 1 of 2, joined."""
    with OffloadShard.join(offer(daemon, pool), 1, pages(), deadline_ms=2000) as joined:
        yield joined


def store_job() -> BlockJob:
    return job(span([1, 4, 2], [0, 1, 5]))


def load_job() -> BlockJob:
    return job(span([0, 3, 5], [0, 1, 5]), transfer=9)


def told(daemon: FakeDaemon, shard: OffloadShard) -> list[tuple[Request, list[bytes]]]:
    """What the shard has said, its ids apart, once all of it was answered."""
    shard._reports.wait()
    return [(msgspec.structs.replace(request, id=0), frames) for request, frames in daemon.requests]


def commit(error: str = "") -> TransferDone:
    return TransferDone(id=0, session=3, token=TOKEN, kind="store", transfer=3, shard=1, error=error)


def complete(error: str = "") -> TransferDone:
    return TransferDone(id=0, session=3, token=TOKEN, kind="load", transfer=9, shard=1, error=error)


def test_store_and_load_go_through_the_daemons_memory(daemon: FakeDaemon, shard: OffloadShard, pool: int) -> None:
    """Stored blocks are in the shard's own part of the host pool; loads bring them back; the daemon is told of both."""
    shard.store(store_job())

    content = os.pread(pool, SLABS * SLAB_BYTES, 0)
    for slot, block in ((0, 1), (1, 4), (5, 2)):
        place = slot // 4 * SLAB_BYTES + BLOCK_PLACE + slot % 4 * 1024
        assert content[place : place + 1024] == b"".join(tensor.array[block].tobytes() for tensor in TENSORS)
    assert content[HEADER_PLACE + 16 : HEADER_PLACE + 32] == NAMESPACE
    assert content[HEADER_PLACE + 32 : HEADER_PLACE + 48] == pages().fingerprint
    assert content[:HEADER_PLACE] == bytes(HEADER_PLACE)

    assert shard.load(load_job()) == []

    for tensor in TENSORS:
        assert (tensor.array[[0, 3, 5]] == tensor.array[[1, 4, 2]]).all()
    assert told(daemon, shard) == [(commit(), []), (complete(), [])]
    assert (shard.shard, shard.epoch) == (1, 11)


def test_stores_go_together_and_are_told_together(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """Several stores are one copy and one report; each block has the header of its own store."""
    stores = job(span([1, 4], [0, 1])), replace(job(span([2], [5], depth=3), transfer=4), generation=8)
    shard.store_all(stores)

    assert told(daemon, shard) == [(msgspec.structs.replace(commit(), more=(4,)), [])]
    assert shard.load(job(span([0, 3], [0, 1]), transfer=9)) == []
    assert shard.load(replace(job(span([5], [5], depth=3), transfer=10), generation=8)) == []
    assert shard.load(job(span([5], [5], depth=3), transfer=11)) == [0]
    for tensor in TENSORS:
        assert (tensor.array[[0, 3, 5]] == tensor.array[[1, 4, 2]]).all()


def test_stores_that_fail_together_are_told_together(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """Where one of several stores cannot be carried out, nothing is copied, and the daemon hears it of all."""
    with pytest.raises(BadRequest, match="blocks of the shard") as caught:
        shard.store_all((store_job(), replace(BAD_JOB, transfer=TransferId(4))))

    failed = msgspec.structs.replace(commit(f"BadRequest: {caught.value}"), more=(4,))
    assert told(daemon, shard) == [(failed, [])]


@pytest.mark.parametrize("is_twice", [True, False], ids=["a block twice", "well"])
def test_job_is_carried_out_once(daemon: FakeDaemon, shard: OffloadShard, *, is_twice: bool) -> None:
    """A copy that was made, or has failed, is refused the second time: its slots may hold others' blocks."""
    first = job(span([1, 1] if is_twice else [1, 4], [0, 1]))
    outcome = pytest.raises(BadRequest, match="twice") if is_twice else contextlib.nullcontext()
    with outcome:
        shard.load(first)

    for again in (shard.store, shard.load):
        with pytest.raises(BadRequest, match=r"3 was made before, or has failed.*prepare another"):
            again(job(span([1, 4], [0, 1])))
    assert len(told(daemon, shard)) == 1


def test_jobs_are_remembered_for_a_while(shard: OffloadShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest of more jobs than are kept is forgotten."""
    monkeypatch.setattr(offload_shard, "_REPORTED_KEPT", 2)
    for transfer in (1, 2, 3):
        shard.store(job(span([1], [0]), transfer=transfer))

    assert list(shard._reported) == [2, 3]


def test_bad_blocks_are_returned_and_told(daemon: FakeDaemon, shard: OffloadShard, pool: int) -> None:
    """The daemon learns which blocks of a load are not what was stored, and so does the caller."""
    shard.store(store_job())
    os.pwrite(pool, b"\xff\xfe", BLOCK_PLACE + 1024 + 7)
    os.pwrite(pool, b"\0", SLAB_BYTES + HEADER_PLACE + 128)

    assert shard.load(load_job()) == [1, 2]

    assert told(daemon, shard)[-1] == (complete(), [struct.pack("<2i", 1, 2)])


def test_part_of_a_load_tells_bad_blocks_as_the_daemon_counts_them(
    daemon: FakeDaemon, shard: OffloadShard, pool: int
) -> None:
    """Where an engine loads only a part of what it announced, the daemon still drops the right blocks."""
    shard.store(job(span([1, 4, 2], [0, 1, 5], depth=6)))
    os.pwrite(pool, b"\xff\xfe", BLOCK_PLACE + 1024 + 7)

    part = replace(job(span([0, 3, 5], [0, 1, 5], depth=6), transfer=9), start=2)

    assert shard.load(part) == [1]
    assert told(daemon, shard)[-1] == (complete(), [struct.pack("<i", 5)])


def test_end_of_the_daemon_makes_the_descriptor_readable(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """A shard without work can wait for the end of its session; closed, it has nothing to wait on."""
    poller = select.poll()
    poller.register(shard.fileno(), select.POLLIN)
    assert not poller.poll(0)

    daemon.stop()

    assert poller.poll(2000)
    shard.close()
    with pytest.raises(DaemonUnreachable):
        shard.fileno()


def test_daemon_says_whether_loads_are_verified(daemon: FakeDaemon, pool: int) -> None:
    """Without verification bytes are not compared with their checksums; headers still are."""
    with OffloadShard.join(offer(daemon, pool, verify=Verify.NEVER), 1, pages()) as shard:
        shard.store(store_job())
        os.pwrite(pool, b"\xff\xfe", BLOCK_PLACE + 7)
        os.pwrite(pool, b"\0", SLAB_BYTES + HEADER_PLACE + 128)

        assert shard.load(load_job()) == [2]


def test_nothing_is_told_before_it_is_done(daemon: FakeDaemon, shard: OffloadShard, pool: int) -> None:
    """When the daemon hears of a store, its blocks and headers are there."""
    found: list[bytes] = []

    def look(request: Request, frames: list[bytes]) -> None:
        del request, frames
        found.append(os.pread(pool, 6, HEADER_PLACE))

    daemon.script = look
    shard.store(store_job())

    assert found == [b"KVCH\1\0"]


BAD_JOB = job(span([1, 6], [0, 1]))


def test_failed_store_is_told_with_its_error(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """A store that cannot be carried out is the caller's typed error, and the daemon need not wait for it."""
    with pytest.raises(BadRequest, match="blocks of the shard") as caught:
        shard.store(BAD_JOB)

    assert told(daemon, shard) == [(commit(f"BadRequest: {caught.value}"), [])]


def test_failed_load_is_told_with_its_error(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """The same for loads."""
    with pytest.raises(BadRequest, match="blocks of the shard") as caught:
        shard.load(job(*BAD_JOB.spans, transfer=9))

    assert told(daemon, shard) == [(complete(f"BadRequest: {caught.value}"), [])]


def test_failure_of_a_copy_that_cannot_be_told_stays_the_failure(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """Where the daemon is gone as well, the caller gets the copy's error, with a note of the other."""
    daemon.stop()

    with pytest.raises(BadRequest, match="blocks of the shard") as caught:
        shard.store(BAD_JOB)

    assert "could not be reported" in "".join(caught.value.__notes__)


def test_long_errors_are_cut(daemon: FakeDaemon, shard: OffloadShard, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error of any length can be told."""

    def fail(_: Sequence[BlockJob], *, epoch: int) -> None:
        raise OSError("x" * 5000)

    assert shard._memory is not None
    monkeypatch.setattr(shard._memory.transfers, "store_all", fail)
    with pytest.raises(OSError, match="xxx"):
        shard.store(store_job())

    assert told(daemon, shard) == [(commit(f"OSError: {'x' * 503}"), [])]


Work = Callable[[OffloadShard], object]
WORKS: list[Work] = [lambda shard: shard.store(store_job()), lambda shard: shard.load(load_job())]


@pytest.fixture(params=WORKS, ids=["store", "load"])
def work(request: pytest.FixtureRequest) -> Work:
    """Either kind of copy."""
    done: Work = request.param
    return done


@pytest.fixture
def hasty(daemon: FakeDaemon, pool: int) -> Iterator[OffloadShard]:
    """A shard that waits for an answer 300 ms only."""
    with OffloadShard.join(offer(daemon, pool), 1, pages(), deadline_ms=300) as joined:
        yield joined


def test_word_of_a_store_without_an_answer_is_said_once_more(daemon: FakeDaemon, hasty: OffloadShard) -> None:
    """After a deadline the same request goes out again, with the same id, and its answer counts."""

    def late(request: Request, frames: list[bytes]) -> tuple[Header, list[bytes]] | None:
        del request, frames
        return (SILENCE, []) if len(daemon.requests) == 1 else None

    daemon.script = late
    hasty.store(store_job())

    first, second = daemon.requests
    assert first == second


def test_silence_behind_a_store_is_a_typed_error(daemon: FakeDaemon, hasty: OffloadShard) -> None:
    """A daemon that answers neither time costs two deadlines, and the shard can go on with its next job."""
    daemon.script = lambda request, frames: (SILENCE, [])
    with pytest.raises(DeadlineExceeded):
        hasty.store(store_job())

    daemon.script = None
    hasty.store(job(span([1], [0]), transfer=10))
    assert len(daemon.requests) == 3  # noted in their order, maybe some time after they were sent


def test_end_of_the_session_is_a_typed_error_of_a_store(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """A daemon that knows the session no more says so, once, and the caller joins again."""
    over = request_error(ErrorCode.NO_SESSION, "no session 3", "attach again")
    daemon.script = lambda request, frames: (error_reply(request.id, over), [])

    with pytest.raises(Stale, match="no session 3"):
        shard.store(store_job())
    assert len(daemon.requests) == 1


def test_store_that_was_called_off_meanwhile_is_a_typed_error(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """Its slots were others' already, and may be damaged: who called it off too early hears of it."""
    daemon.script = lambda request, frames: (Settled(id=request.id, ended=(3,)), [])

    with pytest.raises(Refused, match="called off before this shard had made them: 3") as refused:
        shard.store_all([store_job(), job(span([1], [2]), transfer=10)])
    assert (refused.value.code, len(daemon.requests)) == (ErrorCode.ALREADY_RELEASED, 1)


def test_load_waits_for_no_reply(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """What was copied is there before the daemon has said that it heard of it; later calls take its replies."""
    shard.store(store_job())
    may_answer = threading.Event()
    daemon.script = lambda request, frames: None if may_answer.wait(60) else (SILENCE, [])

    assert shard.load(load_job()) == []
    for tensor in TENSORS:
        assert (tensor.array[[0, 3, 5]] == tensor.array[[1, 4, 2]]).all()

    may_answer.set()
    assert told(daemon, shard) == [(commit(), []), (complete(), [])]


def test_silence_behind_loads_costs_nothing_and_is_logged_once(
    daemon: FakeDaemon, hasty: OffloadShard, caplog: pytest.LogCaptureFixture
) -> None:
    """A daemon that hangs takes nothing from loads: none waits for a deadline that has passed, and one line tells."""
    hasty.store(store_job())
    daemon.script = lambda request, frames: (SILENCE, [])
    with caplog.at_level(logging.WARNING, "kvcached_client"):
        for transfer in range(10, 20):
            assert hasty.load(replace(load_job(), transfer=TransferId(transfer))) == []
        hasty._reports.wait()

    assert caplog.text.count("no reply") == 1
    assert len(hasty._reports._calls) == 0
    assert hasty.load(replace(load_job(), transfer=TransferId(20))) == []
    daemon.script = None
    assert hasty.load(replace(load_job(), transfer=TransferId(21))) == []
    assert len(told(daemon, hasty)) == 13  # each was said once


def test_end_of_the_session_is_a_typed_error_of_the_next_load(daemon: FakeDaemon, shard: OffloadShard) -> None:
    """A load whose report finds the session over is good, by its headers; the next one is refused, and tells nobody."""
    shard.store(store_job())
    over = request_error(ErrorCode.NO_SESSION, "no session 3", "attach again")
    daemon.script = lambda request, frames: (error_reply(request.id, over), [])

    assert shard.load(load_job()) == []
    shard._reports.wait()

    depths = []
    for transfer in (10, 11, 12):
        with pytest.raises(Stale, match="no session 3") as caught:
            shard.load(replace(load_job(), transfer=TransferId(transfer)))
        depths.append(len(caught.traceback))
    assert depths == depths[:1] * 3  # the error keeps nothing of the loads before
    assert len(daemon.requests) == 2


def test_reports_without_an_answer_are_bounded(
    daemon: FakeDaemon, shard: OffloadShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More loads than calls may be under way wait for the oldest reply, and none is forgotten."""
    monkeypatch.setattr(steps, "CALLS_UNDER_WAY_MAX", 2)
    shard.store(store_job())
    daemon.replies_together = 3
    for transfer in range(10, 16):
        assert shard.load(replace(load_job(), transfer=TransferId(transfer))) == []

    assert len(shard._reports._calls) <= 2
    assert len(daemon.requests) >= 5


def test_death_of_the_daemon_is_a_typed_error(daemon: FakeDaemon, shard: OffloadShard, work: Work) -> None:
    """With the daemon gone, copies still end, and what cannot be told is an error."""
    daemon.stop()

    with pytest.raises(DaemonUnreachable):
        work(shard)


def test_closed_shard_copies_nothing(daemon: FakeDaemon, shard: OffloadShard, work: Work) -> None:
    """After `close` nothing is copied or said; closing twice is fine."""
    shard.close()
    shard.close()

    with pytest.raises(DaemonUnreachable, match="join again"):
        work(shard)
    assert daemon.requests == []


# --- joining --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kind", "match"),
    [
        ({"fingerprint": FINGERPRINT}, Refused, "declare the layout"),
        ({"block_bytes": 2048}, Refused, "declare the layout"),
        ({"shard": 0}, BadRequest, "JoinedHost"),
        ({"slabs": 0}, DaemonFailure, "slabs"),
        ({"slab_bytes": 16383}, DaemonFailure, "slab_bytes"),
        ({"slab_bytes": 8192}, DaemonFailure, "0 slots"),
        ({"shards": 1}, DaemonFailure, "shard 1 of 1"),
        ({"slabs": 3}, DaemonFailure, "bytes"),
    ],
)
def test_host_pool_that_does_not_fit_is_refused(
    daemon: FakeDaemon, pool: int, changes: dict[str, Any], kind: type[RequestError], match: str
) -> None:
    """Another layout than the tensors', sizes that cannot be, and memory that is too small are not mapped."""
    before = open_descriptors()

    with pytest.raises(kind, match=match):
        OffloadShard.join(offer(daemon, pool, **changes), 1, pages())

    assert maps_of(pool) == []
    assert open_descriptors() - before <= 1  # the fake daemon's end of the connection


def test_unsealed_memory_is_refused(daemon: FakeDaemon, memory: list[int]) -> None:
    """Memory that could change its size is not mapped."""
    memory.append(sealed_memory(SLABS * SLAB_BYTES, 0))

    with pytest.raises(DaemonFailure, match="seals"):
        OffloadShard.join(offer(daemon, memory[-1]), 1, pages())
    assert maps_of(memory[-1]) == []


def test_join_without_memory_is_refused(daemon: FakeDaemon) -> None:
    """A promise of memory without the memory is an error."""
    with pytest.raises(RequestError, match="0 descriptors"):
        OffloadShard.join(offer(daemon, None), 1, pages())


def test_join_without_a_daemon_is_refused(run_dir: Path) -> None:
    """Where nothing listens, there is nothing to join."""
    with pytest.raises(DaemonUnreachable):
        OffloadShard.join(SessionGrant(id=3, token=TOKEN, run_dir=str(run_dir)), 1, pages())


# --- memory ---------------------------------------------------------------------------------------------------------


def maps_of(descriptor: int) -> list[str]:
    inode = os.fstat(descriptor).st_ino
    lines = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in lines if f" {inode} " in line and "memfd:pool" in line]


def open_descriptors() -> int:
    gc.collect()  # else it may be earlier tests' garbage that closes some
    return len(list(Path("/proc/self/fd").iterdir()))


def test_closed_shard_unmaps_the_memory(shard: OffloadShard, pool: int) -> None:
    """With its last user the mapping goes."""
    assert len(maps_of(pool)) == 1
    shard.close()
    gc.collect()
    assert maps_of(pool) == []


def test_closed_shard_leaves_the_session(shard: OffloadShard, pool: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so when the memory is unmapped, once, and behind the replies to all reports."""
    leave, said = AttachConnection.leave, list[tuple[list[str], int]]()

    def noted(connection: AttachConnection) -> None:
        said.append((maps_of(pool), len(shard._reports._calls)))
        leave(connection)

    monkeypatch.setattr(AttachConnection, "leave", noted)
    shard.store(store_job())
    shard.load(load_job())
    shard.close()
    shard.close()
    assert said == [([], 0)]


def test_mapping_is_shared_and_kept_from_forks_and_core_dumps(shard: OffloadShard, pool: int) -> None:
    """The kernel lists the mapping as shared, not copied on fork, not dumped, and as one that takes huge pages."""
    (line,) = maps_of(pool)
    entry = Path("/proc/self/smaps").read_text().split(line.split()[0], 1)[1]
    flags = next(row for row in entry.splitlines() if row.startswith("VmFlags:")).split()
    assert line.split()[1] == "rw-s"
    assert {"sh", "dc", "dd", *(["hg"] if huge_pages() != "none" else [])} <= set(flags)


@pytest.mark.parametrize("number", [0, STORES_PER_REPORT_MAX + 1])
def test_wrong_number_of_stores_is_refused(shard: OffloadShard, pool: int, number: int) -> None:
    """What one report cannot tell is not copied."""
    with pytest.raises(BadRequest, match=f"{number} stores in one call"):
        shard.store_all([store_job()] * number)
    assert not np.frombuffer(os.pread(pool, SLABS * SLAB_BYTES, 0), np.uint8).any()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_cannot_write_the_host_pool(shard: OffloadShard, pool: int) -> None:
    """A child that goes on with the parent's copies is refused, and the host pool is as it was."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            for use in (lambda: shard.store(store_job()), lambda: shard.load(store_job())):
                with pytest.raises(RuntimeError, match="a forked child joins by itself"):
                    use()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)

    assert status == 0
    assert not np.frombuffer(os.pread(pool, SLABS * SLAB_BYTES, 0), np.uint8).any()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_forked_child_holds_no_descriptor_of_the_host_pool(daemon: FakeDaemon) -> None:
    """Neither this process nor its child has a descriptor of the memory once it is mapped."""
    descriptor = sealed_memory(SLABS * SLAB_BYTES)
    inode = os.fstat(descriptor).st_ino
    shard = OffloadShard.join(offer(daemon, descriptor), 1, pages())
    os.close(descriptor)
    with shard:
        assert held_here_and_in_a_child(inode) == (0, 0)
