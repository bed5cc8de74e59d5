"""The engine's own blocks, its copies and its line to the daemon, without a daemon."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from examples.llama_engine import copies, daemon_link
from examples.llama_engine.attached_cache import AttachedCache, AttachedLease
from examples.llama_engine.block_pool import BlockPool
from examples.llama_engine.config import AttachedSettings, EngineSettings, Limits, ModelError, keyspace, read_config
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.messages import Channel, CopyOrder
from examples.llama_engine.scheduler import Scheduler
from examples.llama_engine.shard_group import ShardDied
from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.engines.weights import WeightReader
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, ErrorCode, NoCapacity, request_error
from kvcached_client.offload import OffloadClient
from kvcached_client.types import TransferId
from tests.engine.counting_runner import CountingRunner, drain, request
from tests.engine.fake_copies import FakeOffloadClient, FakePipes
from tests.project.source_tree import ROOT

LAYOUT = Layout(
    block_size=4, shards=1, groups=(KvGroup(layers=1, kv_heads=1, head_dim=2, v_head_dim=2, dtype="float32"),)
)
GONE = DaemonUnreachable("gone")


class Bench:
    """A cache over fakes. `clients` are what one connect after the other gives, the last one for ever."""

    def __init__(self, *clients: FakeOffloadClient | Exception, blocks: int = 8, shards: int = 1) -> None:
        self.clients = list(clients or [FakeOffloadClient({})])
        self.pipes = FakePipes(shards)
        self.cache = AttachedCache.over(
            self.pipes.as_pipes(), self._connect, LAYOUT, bytes(32), AttachedSettings(blocks, 4)
        )

    def _connect(self, *, keyspace: bytes, deadline_ms: int) -> OffloadClient:
        client = self.clients.pop(0) if len(self.clients) > 1 else self.clients[0]
        if isinstance(client, Exception):
            raise client
        return client.as_client()

    def acquire(self, tokens: int, *, first: int = 0, name: str = "request") -> AttachedLease:
        return self.cache.acquire(name, self.cache.chain(range(first, first + tokens)))


@pytest.fixture(autouse=True)
def retries_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(daemon_link, "RETRY_PAUSE_S", 0.0)


def stored(tokens: int) -> FakeOffloadClient:
    """A client whose host pool holds a prompt of so many tokens."""
    keys = AttachedCache.chain(Bench().cache, range(tokens)).keys
    return FakeOffloadClient({keys[at : at + 16]: 1 for at in range(0, len(keys), 16)})


def test_pool_refuses_whole_and_gives_back_at_the_last_holder() -> None:
    """Too large a wish takes nothing; a block with two holders is free when both have dropped it."""
    pool = BlockPool(4)
    taken = pool.take(3)
    with pytest.raises(NoCapacity, match="2 blocks wanted, 1 of 4 are free"):
        pool.take(2)
    pool.hold(taken[:1])
    pool.drop(taken)
    assert pool.free_blocks == 3
    pool.drop(taken[:1])
    assert sorted(pool.take(4)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("bad", "hit"), [({}, 3), ({0: [2]}, 2), ({1: [1, 2]}, 1), ({0: [2], 1: [0]}, 0)], ids=["all", "2", "1", "0"]
)
def test_hit_ends_at_the_first_block_that_is_bad_on_any_shard(bad: dict[int, list[int]], hit: int) -> None:
    """A load is over when both shards have answered; the hit reaches to the first block that either lacks."""
    bench = Bench(stored(12), shards=2)
    bench.pipes.bad = bad
    lease = bench.acquire(13)
    assert (lease.hit_tokens, lease.is_loading) == (12, True)
    bench.pipes.finish(1)
    assert lease.is_loading
    assert lease.wait_loaded() == 4 * hit
    assert not lease.is_loading


def test_blocks_of_a_copy_go_to_nobody_before_its_end() -> None:
    """A request that is over leaves the blocks that are still copied; who needs them waits for the copies."""
    bench = Bench(blocks=4)
    lease = bench.acquire(16)
    lease.finish(16)
    assert (len(bench.pipes.orders), bench.cache.pool.free_blocks) == (1, 0)
    bench.acquire(4, first=100)
    assert (len(bench.cache.copies), bench.cache.pool.free_blocks) == (0, 3)


def test_released_request_does_not_free_what_is_still_loaded_into() -> None:
    """A request that is preempted while it loads gives its blocks back, and they are free when the load is over."""
    bench = Bench(stored(12), blocks=4)
    bench.acquire(13).release()
    assert bench.cache.pool.free_blocks == 1
    bench.cache.drain()
    assert bench.cache.pool.free_blocks == 4


def test_each_block_is_offered_once_it_is_full() -> None:
    """Full blocks go to the daemon from where the lease reaches on, and nothing where no block is new."""
    client = stored(8)
    bench = Bench(client, blocks=16)
    lease = bench.acquire(18)
    lease.wait_loaded()
    for computed in (8, 15, 16, 17, 18):
        lease.commit(computed)
    lease.finish(18)
    assert client.calls == ["acquire", "load 0 2", "store 2 1", "store 3 1", "release"]
    spans = [BlockJob.from_bytes(order.job).spans[0] for order in bench.pipes.orders]
    assert [order.is_store for order in bench.pipes.orders] == [False, True, True]
    assert [(span.depth, len(span.parent)) for span in spans] == [(0, 0), (2, 16), (3, 16)]


def test_copies_under_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the limit the next copy waits for one that is under way."""
    monkeypatch.setattr(copies, "COPIES_MAX", 2)
    bench = Bench(blocks=16)
    lease = bench.acquire(16)
    for computed in (4, 8, 12, 16):
        lease.commit(computed)
    assert (len(bench.pipes.orders), len(bench.cache.copies)) == (4, 2)


@pytest.mark.parametrize("verb", ["acquire", "load", "store", "release"])
@pytest.mark.parametrize("gone", [True, False], ids=["gone", "refused"])
def test_failure_of_any_call_costs_the_cache_only(verb: str, gone: bool) -> None:
    """Wherever the daemon dies or refuses, the request goes on; a dead one is replaced at the next request."""
    refusal = request_error(ErrorCode.LIMIT, "too many", "fewer")
    first, second = stored(8), FakeOffloadClient({})
    first.errors = {verb: GONE if gone else refusal}
    bench = Bench(first, second, blocks=16)
    lease = bench.acquire(13)
    assert lease.wait_loaded() == (0 if verb in {"acquire", "load"} else 8)
    lease.finish(12)
    bench.cache.drain()
    assert bench.cache.pool.free_blocks == 16
    assert (first.is_closed, len(bench.pipes.joins)) == (gone, 1)
    bench.acquire(13, first=100)
    assert (second.calls, len(bench.pipes.joins)) == ((["acquire"], 2) if gone else ([], 1))


def test_lease_of_a_lost_session_is_not_asked_for_in_the_next() -> None:
    """A request that outlives its session stores nothing any more and releases nothing; ids mean something else now."""
    first, second = FakeOffloadClient({}), FakeOffloadClient({})
    bench = Bench(first, second, blocks=16)
    old = bench.acquire(8, name="old")
    first.is_alive = False
    new = bench.acquire(8, first=100, name="new")
    old.finish(8)
    new.finish(8)
    assert (first.calls, second.calls) == (["acquire"], ["acquire", "store 0 2", "release"])


def test_daemon_is_not_asked_for_at_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a try that took its deadline there is a pause: a daemon that hangs does not cost every request one."""
    monkeypatch.setattr(daemon_link, "RETRY_PAUSE_S", 3600.0)
    client = FakeOffloadClient({})
    bench = Bench(DeadlineExceeded("no answer"), client)
    bench.acquire(4)
    assert (bench.cache.link.session, client.calls) == (0, [])


def test_daemon_that_is_not_there_is_asked_for_at_every_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody listens a try costs nothing: the first request after the daemon is back has a session."""
    monkeypatch.setattr(daemon_link, "RETRY_PAUSE_S", 3600.0)
    bench = Bench(GONE, FakeOffloadClient({}))
    bench.acquire(4)
    assert bench.cache.link.session == 1


@pytest.mark.parametrize(
    ("bad", "hit", "steps"), [([], 12, [(12, 13)]), ([1], 4, [(4, 8), (8, 13)])], ids=["arrives", "shorter"]
)
def test_request_that_loads_delays_no_other(bad: list[int], hit: int, steps: list[tuple[int, int]]) -> None:
    """A request whose hit is under way is in no step, others are; alone, it is waited for, and starts where it ends."""
    runner = CountingRunner()
    bench = Bench(stored(12), blocks=32)
    bench.pipes.bad = {0: bad}
    scheduler = Scheduler(bench.cache, runner, Limits(chunk_tokens=8, step_tokens=16, running_max=4))
    scheduler.submit(request(13, max_tokens=1))
    scheduler.submit(request(7, first=100, max_tokens=2))
    results = {result.name: result for result in drain(scheduler)}
    assert runner.steps == [[(0, 7)], [(7, 8)], *[[rows] for rows in steps]]
    assert (results["request-1"].hit_tokens, results["request-1"].loaded_tokens) == (hit, hit)


@pytest.mark.parametrize("wait", [True, False])
def test_shard_that_ended_ends_every_wait_for_it(wait: bool) -> None:
    """A shard that is gone is an error that says so, in every wait and at the next order, and never a wait for ever."""
    ends = [socket.socketpair() for _ in range(2)]
    pipes = CopyPipes([Channel(near) for near, _ in ends], lambda shard: ShardDied(f"shard {shard}"))
    assert pipes.done(wait=False) == []
    ends[1][1].close()
    with pytest.raises(ShardDied, match="shard 1"):
        pipes.done(wait=wait)
    with pytest.raises(ShardDied, match="shard 1"):
        pipes.order(CopyOrder(id=1, is_store=True, job=BlockJob(TransferId(1), 0, ()).to_bytes()))
    for end in (ends[0][0], ends[0][1], ends[1][0]):
        end.close()


def test_keyspace_tells_weights_and_layout_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another seed, another number of shards and a checkpoint with other bytes get a keyspace of their own.

    A checkpoint with the same bytes gets the same one, whatever the times of its files.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model = {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 9,
        "num_attention_heads": 2,
    }  # fmt: skip
    model_dir = tmp_path / "model"
    model_dir.mkdir()
    (model_dir / "config.json").write_bytes(msgspec.json.encode(model))
    config = read_config(model_dir)

    def root(seed: int = 0, shards: int = 1) -> bytes:
        settings = EngineSettings(model_dir, seed=seed, tp=shards)
        return keyspace(config, settings, config.layout(4, shards))

    random = [root(), root(seed=1), root(shards=2)]
    checkpoint = model_dir / "model.safetensors"
    checkpoint.write_bytes(b"weights")
    os.utime(checkpoint, (1, 1))
    first = root()
    os.utime(checkpoint, (2, 2))
    assert root(seed=5) == root() == first
    checkpoint.write_bytes(b"tunings")
    os.utime(checkpoint, (2, 2))
    assert len({*random, first, root()}) == 5


def test_weight_file_that_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine does not start under a keyspace of weights that it could not read."""
    monkeypatch.setattr(WeightReader, "digests", Mock(side_effect=OSError("Input/output error")))
    config = read_config(ROOT / "examples/llama_engine/small-llama")

    with pytest.raises(ModelError, match=r"weight files of .* cannot be read: Input/output error"):
        keyspace(config, EngineSettings(tmp_path), config.layout(4, 1))


def test_memory_of_no_use_is_refused() -> None:
    """Two blocks, which would read as K and V, and blocks of no token are the caller's mistake."""
    for blocks, block_size in ((2, 16), (64, 0)):
        with pytest.raises(ValueError, match="more than 2 blocks"):
            AttachedSettings(blocks, block_size)
