"""Storage in the canonical layout below a real daemon: engines with other numbers of shards read what is stored."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvcached_client import Admin, OffloadClient, OffloadLayout, OffloadShard, new_instance
from kvcached_client.blocks.canonical import canonical_layout
from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import ErrorCode, RequestError
from tests.client.offload_rig import HostTensor
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, Order, job_of, keys_of
from tests.daemon.supervised import supervised
from tests.daemon.test_storage import backed_up, report, until, with_storage

HEADS, LAYERS, BLOCKS, CONTENT = 4, 2, 6, 64
DEADLINE_MS = 10_000
CANONICAL = 'layout = "canonical"\n'


def kv_of_heads(name: str, depth: int, layer: int) -> npt.NDArray[np.uint8]:
    """The bytes of a layer of a block on all shards: ``[heads, tokens, content]``."""
    data = random.Random(f"{name} {depth} {layer}").randbytes(HEADS * BLOCK_SIZE * CONTENT)
    return np.frombuffer(data, np.uint8).reshape(HEADS, BLOCK_SIZE, CONTENT)


class Shard:
    """One shard's tensors, with its heads of each layer."""

    def __init__(self, number: int, shards: int) -> None:
        here = HEADS // shards
        self.heads = slice(number * here, (number + 1) * here)
        self.tensors = [np.zeros((BLOCKS, here, BLOCK_SIZE, CONTENT), np.uint8) for _ in range(LAYERS)]
        self.pages = EnginePages.of_tensors(
            {f"layer {layer}": HostTensor(tensor) for layer, tensor in enumerate(self.tensors)}
        )

    def fill(self, name: str) -> None:
        """Compute a prompt's blocks."""
        for layer, tensor in enumerate(self.tensors):
            for depth in range(BLOCKS):
                tensor[depth] = kv_of_heads(name, depth, layer)[self.heads]

    def holds(self, name: str) -> bool:
        """Whether the tensors hold what this shard would have computed, and no other bytes."""
        return all(
            (tensor[depth] == kv_of_heads(name, depth, layer)[self.heads]).all()
            for layer, tensor in enumerate(self.tensors)
            for depth in range(BLOCKS)
        )


class Engine:
    """An engine with so many shards, all in this process."""

    def __init__(self, run_dir: Path, parts: ExitStack, shards: int) -> None:
        self.shards = [Shard(number, shards) for number in range(shards)]
        pages = self.shards[0].pages
        canonical = canonical_layout(pages, shards, HEADS, -3)
        assert canonical is not None
        self.client = parts.enter_context(connected(run_dir, pages, shards, canonical))
        self.links = [
            parts.enter_context(OffloadShard.join(self.client.session, number, shard.pages, deadline_ms=DEADLINE_MS))
            for number, shard in enumerate(self.shards)
        ]
        self._requests = 0

    def store(self, name: str) -> None:
        """Compute a prompt and copy it to the host pool."""
        hold = self._acquire(name)
        plan = self.client.prepare_store(hold.lease, hold.hit, keys_of(name, BLOCKS)[16 * hold.hit :])
        self.client.release(hold.lease)
        order = Order(plan.transfer, plan.generation, name, hold.hit, plan.slots.tolist())
        for shard, link in zip(self.shards, self.links, strict=True):
            shard.fill(name)
            link.store(job_of(order))

    def fetch(self, name: str) -> int:
        """Have a prompt fetched from storage; how many blocks came."""
        keys, tokens = keys_of(name, BLOCKS), BLOCKS * BLOCK_SIZE
        return self.client.prefetch(keys, tokens, full=True, stop="wait_complete", deadline_ms=20_000).fetched

    def hit(self, name: str) -> int:
        return self.client.match(keys_of(name, BLOCKS), BLOCKS * BLOCK_SIZE, full=True)

    def loads(self, name: str) -> bool:
        """Copy a whole prompt back; whether every shard then holds its part of it."""
        hold = self._acquire(name)
        plan = self.client.prepare_load(hold.lease, 0, hold.hit)
        self.client.release(hold.lease)
        order = Order(plan.transfer, plan.generation, name, 0, plan.slots.tolist())
        bad = [link.load(job_of(order)) for link in self.links]
        return not any(bad) and all(shard.holds(name) for shard in self.shards)

    def _acquire(self, name: str):  # type: ignore[no-untyped-def]  # noqa: ANN202
        self._requests += 1
        keys = keys_of(name, BLOCKS)
        return self.client.acquire(f"request {self._requests}", keys, BLOCKS * BLOCK_SIZE, full=True)


def connected(run_dir: Path, pages: EnginePages, shards: int, canonical: CanonicalLayout | None) -> OffloadClient:
    return OffloadClient.connect(
        run_dir,
        engine="test engine",
        instance=new_instance(),
        keyspace=b"k" * 32,
        label=f"tiny tp{shards}",
        layout=OffloadLayout(BLOCK_SIZE, shards, pages.block_bytes, pages.fingerprint, canonical=canonical),
        deadline_ms=DEADLINE_MS,
    )


@contextmanager
def engines(daemon: RunningDaemon, *shards: int) -> Iterator[list[Engine]]:
    """An engine for each of these numbers of shards."""
    with ExitStack() as parts:
        yield [Engine(daemon.run_dir, parts, number) for number in shards]


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 4), (4, 2)])
def test_engine_with_other_shards_reads_what_is_stored(tmp_path: Path, before: int, after: int) -> None:
    """After a stop of everything, an engine with another number of shards gets its heads of all blocks from disk."""
    text = with_storage(tmp_path / "disk", more=CANONICAL)
    with started(tmp_path, text) as daemon, engines(daemon, before) as (engine,):
        engine.store("a")
        backed_up(daemon, BLOCKS)
    with started(tmp_path, text) as daemon, engines(daemon, after, before) as (other, same):
        assert (other.fetch("a"), same.fetch("a")) == (BLOCKS, BLOCKS)
        assert other.loads("a")
        assert same.loads("a")
        with Admin.connect(daemon.run_dir) as admin:
            assert admin.check().violations == ()


def test_engines_with_other_shards_read_nothing_unless_configured(tmp_path: Path) -> None:
    """By default blocks are stored as they are: an engine with another number of shards finds nothing."""
    with started(tmp_path, with_storage(tmp_path / "disk")) as daemon, engines(daemon, 2, 1) as (engine, other):
        engine.store("a")
        backed_up(daemon, BLOCKS)
        assert other.fetch("a") == 0


def test_clear_of_one_engine_clears_all_that_share_its_blocks(tmp_path: Path) -> None:
    """Nothing from before a clear is found by engines with other shards, in memory or storage, nor after a restart."""
    text = with_storage(tmp_path / "disk", more=CANONICAL)
    with started(tmp_path, text) as daemon, engines(daemon, 2, 1) as (one, two):
        one.store("a")
        backed_up(daemon, BLOCKS)
        assert two.fetch("a") == BLOCKS
        two.client.clear()
        assert (one.hit("a"), two.hit("a"), one.fetch("a"), two.fetch("a")) == (0, 0, 0, 0)
        until(lambda: report(daemon).blocks == 0)
        one.store("b")
        backed_up(daemon, BLOCKS)
        assert two.fetch("b") == BLOCKS
        assert two.loads("b")
    with started(tmp_path, text) as daemon, engines(daemon, 4) as (three,):
        assert (three.fetch("a"), three.fetch("b")) == (0, BLOCKS)
        assert three.loads("b")


def test_killed_daemon_goes_on_with_shared_blocks(tmp_path: Path) -> None:
    """The next daemon finds blocks in memory and in storage, and knows which namespaces share the latter."""
    with supervised(tmp_path, with_storage(tmp_path / "disk", more=CANONICAL)) as daemon:
        with ExitStack() as parts:
            Engine(daemon.run_dir, parts, 2).store("a")
            until(lambda: _stored(daemon.run_dir) == BLOCKS)
        daemon.kill()
        daemon.await_ready()
        with ExitStack() as parts:
            two, one = Engine(daemon.run_dir, parts, 2), Engine(daemon.run_dir, parts, 1)
            assert two.hit("a") == BLOCKS
            assert one.fetch("a") == BLOCKS
            assert one.loads("a")
            one.client.clear()
            assert (two.hit("a"), two.fetch("a")) == (0, 0)


def test_memory_is_cold_after_a_change_of_the_layout(tmp_path: Path) -> None:
    """When storage is to hold blocks otherwise, none in the host pool is hit; new ones are hit, and stored so."""
    with supervised(tmp_path, with_storage(tmp_path / "disk")) as daemon:
        with ExitStack() as parts:
            Engine(daemon.run_dir, parts, 2).store("a")
            until(lambda: _stored(daemon.run_dir) == BLOCKS)
        (tmp_path / "kvcached.toml").write_text(with_storage(tmp_path / "disk", more=CANONICAL))
        daemon.kill()
        daemon.await_ready()
        with ExitStack() as parts:
            assert "in the host pool are lost: it is in another generation now, by another layout of" in daemon.log
            two, one = Engine(daemon.run_dir, parts, 2), Engine(daemon.run_dir, parts, 1)
            assert two.hit("a") == 0
            two.store("b")
            assert two.loads("b")
            until(lambda: _stored(daemon.run_dir) >= 2 * BLOCKS)
            assert one.fetch("b") == BLOCKS
            assert one.loads("b")


@pytest.mark.parametrize("first", ["", CANONICAL], ids=["engine", "canonical"])
@pytest.mark.parametrize("is_rebooted", [False, True])
def test_cleared_blocks_do_not_come_back_in_the_layout_before(tmp_path: Path, first: str, *, is_rebooted: bool) -> None:
    """What was stored in one layout, and cleared while storage had the other one, is not found in the first again."""
    texts = [with_storage(tmp_path / "disk", more=more) for more in (first, "" if first else CANONICAL)]
    ledger = tmp_path / "run" / "ledger.json"
    with started(tmp_path, texts[0]) as daemon, engines(daemon, 2) as (engine,):
        engine.store("a")
        backed_up(daemon, BLOCKS)
    with started(tmp_path, texts[1]) as daemon, engines(daemon, 2) as (engine,):
        assert engine.fetch("a") == 0
        engine.client.clear()
    if is_rebooted:
        ledger.unlink(missing_ok=True)
    with started(tmp_path, texts[0]) as daemon, engines(daemon, 2) as (engine,):
        assert engine.fetch("a") == 0
        engine.store("b")
        until(lambda: report(daemon).counters.get("written_blocks", 0) >= BLOCKS)
    with started(tmp_path, texts[0]) as daemon, engines(daemon, 2) as (engine,):
        assert (engine.fetch("a"), engine.fetch("b")) == (0, BLOCKS)


def test_clear_of_a_forgotten_engine_holds_in_the_layout_before(tmp_path: Path) -> None:
    """Another engine of the group, which was not cleared, brings no generation of before the clear back."""
    canonical, plain = with_storage(tmp_path / "disk", more=CANONICAL), with_storage(tmp_path / "disk")
    with started(tmp_path, canonical) as daemon, engines(daemon, 2, 1) as (one, _):
        one.store("a")
        backed_up(daemon, BLOCKS)
    with started(tmp_path, plain) as daemon, engines(daemon, 2) as (one,):
        one.client.clear()
    with started(tmp_path, plain) as daemon, engines(daemon, 1):
        pass
    with started(tmp_path, canonical) as daemon, engines(daemon, 2) as (one,):
        assert one.fetch("a") == 0


def _stored(run_dir: Path) -> int:
    with Admin.connect(run_dir, deadline_ms=10_000) as admin:
        return admin.storage().blocks


def test_layout_that_does_not_divide_blocks_is_refused(tmp_path: Path) -> None:
    """A canonical layout of other blocks is refused at hello, whatever storage does."""
    wrong = CanonicalLayout(fingerprint=bytes(16), parts=3, runs=1)
    with started(tmp_path, with_storage(tmp_path / "disk")) as daemon, pytest.raises(RequestError) as error:
        connected(daemon.run_dir, Shard(0, 2).pages, 2, wrong)
    assert error.value.code is ErrorCode.WRONG_LAYOUT
