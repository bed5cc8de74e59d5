"""An engine on a device pool goes on while its daemon is SIGKILLed and comes back: its leases, and new requests too."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvcached_client import (
    Admin,
    Client,
    DaemonUnreachable,
    DeadlineExceeded,
    KeyChain,
    Lease,
    MappedPool,
    NoCapacity,
    map_pool,
)
from kvcached_client.errors import Stale
from kvcached_client.protocol.engine import PoolStats
from kvcached_client.types import FenceSequence
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised, supervised
from tests.project.source_tree import ROOT

HOST = "[host]\nsize_bytes = 4194304\nslab_bytes = 1048576\n"
RESERVE = 3


class Engine:
    """A client and its one shard in this process. A block's bytes are its own: the key's first byte."""

    def __init__(
        self,
        run_dir: Path,
        parts: ExitStack,
        *,
        failures: str = "miss",
        reserve: int = RESERVE,
        deadline_ms: int = 10_000,
    ) -> None:
        self.client = parts.enter_context(
            Client.connect(run_dir, deadline_ms=deadline_ms, failures=failures, reserve_blocks=reserve)  # type: ignore[arg-type]
        )
        self.pool: MappedPool = map_pool(self.client.session, 0, deadline_ms=10_000)
        parts.callback(self.pool.close)
        self.pages = self.pool.pages(1)

    def chain(self, start: int, blocks: int) -> KeyChain:
        return self.client.chain(range(start, start + 4 * blocks))

    def compute(self, lease: Lease, chain: KeyChain, first: int = 0) -> None:
        """Write the blocks from `first` on."""
        for depth in range(first, chain.block_count):
            self.pages[lease.block_table[depth]] = chain.key_range(depth, depth + 1)[0]

    def is_right(self, lease: Lease, chain: KeyChain) -> bool:
        """Whether every block of the hit has its bytes."""
        return all(
            (self.pages[lease.block_table[depth]] == chain.key_range(depth, depth + 1)[0]).all()
            for depth in range(lease.hit_blocks)
        )


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Supervised]:
    with supervised(tmp_path, CONFIG + HOST) as running:
        yield running


@pytest.fixture
def engine(daemon: Supervised) -> Iterator[Engine]:
    with ExitStack() as parts:
        yield Engine(daemon.run_dir, parts)


def pool_of(daemon: Supervised) -> PoolStats:
    """The only pool; nothing is wrong."""
    with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
        assert admin.check().violations == ()
        (pool,) = admin.stats().pools
    return pool


def test_leases_go_on_over_a_restart(daemon: Supervised, engine: Engine) -> None:
    """A request that runs while the daemon is killed goes on in its slots, and is found when it is committed after."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.commit(8)
    daemon.kill()
    lease.commit(12)  # a miss
    assert not engine.client.is_alive
    daemon.await_ready()
    engine.client.rejoin()

    assert engine.client.is_alive
    lease.commit(16)
    lease.allocate(20)
    assert len(lease.block_table) == 5
    lease.release()
    again = engine.client.acquire("s", chain, full=True)
    assert (again.hit_blocks, engine.is_right(again, chain)) == (4, True)
    again.release()
    assert (pool_of(daemon).leases, pool_of(daemon).states["quarantined"]) == (1, 0)  # the reserve's


@pytest.mark.slow
def test_engine_may_miss_a_daemon(daemon: Supervised, engine: Engine) -> None:
    """An engine goes on with the daemon after the next, where the next one has died before the engine came back."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.commit(16)
    daemon.kill_and_wait()
    daemon.kill_and_wait()
    engine.client.rejoin()

    hit = engine.client.acquire("s", chain, full=True)
    assert (hit.hit_blocks, engine.is_right(hit, chain)) == (4, True)


def test_new_requests_use_the_reserve(daemon: Supervised, engine: Engine) -> None:
    """While the daemon is away requests are computed in reserved slots, which are their leases' when it is back."""
    daemon.kill()
    one, other = engine.chain(100, 2), engine.chain(200, 1)
    first, second = engine.client.acquire("one", one), engine.client.acquire("other", other)
    assert (first.granted, first.hit_blocks, len(first.block_table)) == (True, 0, 2)
    assert not engine.client.acquire("none left", one).granted
    engine.compute(first, one)
    before = second.block_table.tolist()
    second.release()  # back to the reserve
    third = engine.client.acquire("other again", other)
    assert third.block_table.tolist() == before
    third.release()
    daemon.await_ready()
    engine.client.rejoin()

    first.commit(8)
    first.release()
    hit = engine.client.acquire("hit", one, full=True)
    assert (hit.hit_blocks, engine.is_right(hit, one)) == (2, True)
    hit.release()
    daemon.kill()
    assert len(engine.client.acquire("full again", engine.chain(300, RESERVE)).block_table) == RESERVE
    daemon.await_ready()


def test_rejoin_ends_the_calls_of_an_open_batch(daemon: Supervised, engine: Engine) -> None:
    """What a batch has asked a dead daemon is over before the leases are declared, those of the reserve too."""
    chain, new = engine.chain(0, 2), engine.chain(100, 2)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    with engine.client.batch() as batch:
        os.kill(daemon.daemon_pid, signal.SIGSTOP)  # it reads nothing any more
        batch.commit(lease, 8)
        call = batch.acquire("new", new)
        daemon.kill_and_wait()
        engine.client.rejoin()
        other = call.result()
        engine.compute(other, new)
        batch.commit(lease, 8)
        batch.finish(other, 8)
    assert other.hit_blocks == 0
    for each in (chain, new):
        hit = engine.client.acquire("hit", each, full=True)
        assert (hit.hit_blocks, engine.is_right(hit, each)) == (2, True)
        hit.release()
    lease.release()
    assert pool_of(daemon).leases == 1  # the reserve's


def test_rejoin_ends_posted_calls(daemon: Supervised, engine: Engine) -> None:
    """Of calls that a dead daemon has not read, a finish ends its lease, and a commit is repeated by the next call."""
    chains = [engine.chain(100 * number, 2) for number in range(2)]
    ended, running = (engine.client.acquire(f"r{number}", chain) for number, chain in enumerate(chains))
    engine.compute(ended, chains[0])
    engine.compute(running, chains[1])
    os.kill(daemon.daemon_pid, signal.SIGSTOP)  # it reads nothing any more
    ended.finish(8, wait=False)
    running.commit(8, wait=False)
    daemon.kill_and_wait()
    engine.client.rejoin()
    assert pool_of(daemon).leases == 2  # the reserve's, and the one that is running
    running.finish(8, wait=False)
    hit = engine.client.acquire("hit", chains[1], full=True)
    assert (hit.hit_blocks, engine.is_right(hit, chains[1])) == (2, True)
    hit.release()
    assert pool_of(daemon).leases == 1


def test_rejoin_takes_the_answers_that_have_come(daemon: Supervised, engine: Engine) -> None:
    """Blocks of a posted commit that a daemon has answered before its death are found after it, before any call."""
    chain = engine.chain(0, 2)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.commit(8, wait=False)
    while pool_of(daemon).states["cached"] < 2:
        pass  # the daemon has not read the commit yet
    daemon.kill_and_wait()
    engine.client.rejoin()
    hit = engine.client.acquire("hit", chain, full=True)
    assert (hit.hit_blocks, engine.is_right(hit, chain)) == (2, True)
    hit.release()
    lease.release()


def test_unheard_release_is_not_declared(daemon: Supervised) -> None:
    """A lease whose release came too late is over after the restart: others have written to its slots since."""
    with ExitStack() as parts:
        engine = Engine(daemon.run_dir, parts, failures="raise", reserve=0, deadline_ms=500)
        chain = engine.chain(0, 4)
        lease = engine.client.acquire("r", chain)
        engine.compute(lease, chain)
        lease.commit(16)
        os.kill(daemon.daemon_pid, signal.SIGSTOP)
        with pytest.raises(DeadlineExceeded):
            lease.release()
        os.kill(daemon.daemon_pid, signal.SIGCONT)
        while not (other := _acquired(engine.client, engine.chain(1000, 16))):
            pass  # the daemon has not read the release yet
        engine.pages[:] = 0xEE
        other.release()
        daemon.kill_and_wait()
        engine.client.rejoin()

        lease.release()
        assert pool_of(daemon).leases == 0
        again = engine.client.acquire("s", chain, full=True)
        again.wait_loaded()
        assert engine.is_right(again, chain)


def _acquired(client: Client, chain: KeyChain) -> Lease | None:
    try:
        return client.acquire("other", chain)
    except (NoCapacity, DeadlineExceeded):
        return None


def test_growth_uses_the_reserve(daemon: Supervised, engine: Engine) -> None:
    """A running request gets slots from the reserve while the daemon is away."""
    lease = engine.client.acquire("r", engine.chain(0, 1))
    daemon.kill()
    engine.client.match(engine.chain(0, 1))
    lease.allocate(12)
    assert len(lease.block_table) == 3
    daemon.await_ready()
    engine.client.rejoin()
    lease.allocate(24)
    assert len(set(lease.block_table.tolist())) == 6


def test_released_while_away_is_not_declared(daemon: Supervised, engine: Engine) -> None:
    """What an engine gave back while nobody heard it is free after the restart."""
    lease = engine.client.acquire("r", engine.chain(0, 5))
    daemon.kill()
    lease.release()
    daemon.await_ready()
    engine.client.rejoin()

    assert pool_of(daemon).states["leased"] == RESERVE


def test_queued_work_is_waited_for_after_the_restart(daemon: Supervised, engine: Engine) -> None:
    """Blocks that were committed and not written before the restart are not stored, and released slots not granted."""
    chain = engine.chain(0, 4)
    writer = engine.client.acquire("writer", chain)
    writer.commit(16, fence=FenceSequence(7))
    reader = engine.client.acquire("reader", chain, full=True)
    assert reader.hit_blocks == 4
    engine.client.acquire("gone", engine.chain(100, 3)).release(fence=FenceSequence(7))
    writer.release(fence=FenceSequence(7))
    daemon.kill_and_wait()
    engine.client.rejoin()
    reader.release()

    pool = pool_of(daemon)
    assert (pool.states["free"], pool.states["fenced"], pool.evictable) == (0, 16 - 4 - RESERVE, 0)
    assert not engine.client.acquire("no room", engine.chain(200, 1)).granted
    with Admin.connect(daemon.run_dir) as admin:
        assert not admin.stats().counters.get("stored_blocks")
        engine.client.signal_fence(FenceSequence(7))
        while admin.stats().counters.get("stored_blocks", 0) < 4:
            admin.health()
    assert pool_of(daemon).states["fenced"] == 0


def test_reserve_waits_for_fences(daemon: Supervised, engine: Engine) -> None:
    """Slots that return to the reserve with work queued on them are taken again once the fence has signalled."""
    daemon.kill()
    first = engine.client.acquire("first", engine.chain(0, RESERVE))
    first.release(fence=FenceSequence(3))
    assert not engine.client.acquire("too early", engine.chain(100, 1)).granted
    engine.client.signal_fence(FenceSequence(3))
    assert engine.client.acquire("second", engine.chain(200, RESERVE)).granted
    daemon.await_ready()


def test_device_blocks_are_hits_after_the_restart(daemon: Supervised, engine: Engine) -> None:
    """What nobody had a lease on is found where it lay in the device pool, and nothing is loaded."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    before = lease.block_table.tolist()
    lease.finish(16)
    daemon.kill_and_wait()
    engine.client.rejoin()

    again = engine.client.acquire("s", chain, full=True)
    assert (again.hit_blocks, again.is_loading, engine.is_right(again, chain)) == (4, False, True)
    assert again.block_table.tolist() == before
    with Admin.connect(daemon.run_dir) as admin:
        assert not admin.stats().counters.get("loaded_blocks")


def test_device_blocks_are_hits_for_a_new_engine(daemon: Supervised) -> None:
    """A new engine finds what an engine left that died with the daemon, blocks that it had only leased apart."""
    with ExitStack() as parts:
        first = Engine(daemon.run_dir, parts)
        chain = first.chain(0, 4)
        lease = first.client.acquire("r", chain)
        first.compute(lease, chain)
        lease.commit(12)
        unwritten = first.client.acquire("later", first.chain(100, 2))
        unwritten.commit(8, fence=FenceSequence(9))
        daemon.kill()
    daemon.await_ready()
    with ExitStack() as parts:
        second = Engine(daemon.run_dir, parts)
        hit = second.client.acquire("s", chain, full=True)
        assert (hit.hit_blocks, hit.is_loading, second.is_right(hit, chain)) == (3, False, True)
        assert second.client.match(second.chain(100, 2), full=True) == 0


@pytest.mark.slow
def test_device_blocks_survive_several_daemons(daemon: Supervised, engine: Engine) -> None:
    """A daemon that is killed right after it took over leaves what it found to the next one."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.finish(16)
    for _ in range(3):
        daemon.kill_and_wait()
    engine.client.rejoin()

    again = engine.client.acquire("s", chain, full=True)
    assert (again.hit_blocks, again.is_loading, engine.is_right(again, chain)) == (4, False, True)


def test_cleared_device_blocks_are_not_found_after_the_restart(daemon: Supervised, engine: Engine) -> None:
    """A clear holds after the daemon's death for what lies in the device pool, too."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.finish(16)
    with Admin.connect(daemon.run_dir) as admin:
        admin.clear("default")
    engine.client.close()
    daemon.kill_and_wait()

    with ExitStack() as parts:
        second = Engine(daemon.run_dir, parts)
        assert second.client.acquire("s", second.chain(0, 4), full=True).hit_blocks == 0
        assert (pool_of(daemon).states["free"], pool_of(daemon).states["cached"]) == (16 - 4 - RESERVE, 0)


def test_host_copies_are_hits_after_the_restart(daemon: Supervised, engine: Engine) -> None:
    """What is no longer in the device pool comes back from the host pool, byte for byte."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.finish(16)
    with Admin.connect(daemon.run_dir) as admin:
        while admin.stats().counters.get("stored_blocks", 0) < 4:
            admin.health()
    engine.client.acquire("all others", engine.chain(100, 16 - RESERVE)).release()
    daemon.kill_and_wait()
    engine.client.rejoin()
    engine.pages[:] = 0

    again = engine.client.acquire("s", chain, full=True)
    assert again.is_loading
    again.wait_loaded()
    assert (again.hit_blocks, engine.is_right(again, chain)) == (4, True)


def test_nothing_is_granted_before_the_engine_is_back(daemon: Supervised, engine: Engine) -> None:
    """Another engine gets nothing of the pool while the one of before lives and has not declared itself."""
    engine.client.acquire("r", engine.chain(0, 2))
    daemon.kill_and_wait()

    assert pool_of(daemon).states["quarantined"] == 16
    code = "from kvcached_client import Client; import sys; Client.connect(sys.argv[1])"
    other = subprocess.run(
        [sys.executable, "-c", code, str(daemon.run_dir)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert "pool_busy" in other.stderr
    engine.client.rejoin()
    assert pool_of(daemon).states["quarantined"] == 0


def test_shards_of_another_process_stay_members(daemon: Supervised) -> None:
    """With shard processes of its own an engine rejoins as well: they need not end, and their deaths still count."""
    with ExitStack() as parts:
        client = parts.enter_context(Client.connect(daemon.run_dir, deadline_ms=10_000))
        code = (
            "import sys; from kvcached_client import SessionGrant, map_pool\n"
            "pool = map_pool(SessionGrant.from_bytes(bytes.fromhex(sys.argv[1])), 0); print('joined', flush=True)\n"
            "sys.stdin.read()"
        )
        command = [sys.executable, "-c", code, client.session.to_bytes().hex()]
        shard = parts.enter_context(subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
        parts.callback(shard.kill)
        assert shard.stdout is not None
        assert shard.stdout.readline() == b"joined\n"
        daemon.kill_and_wait()
        client.rejoin()
        assert client.acquire("r", client.chain(range(8))).granted

        shard.kill()
        shard.wait()
        with pytest.raises(Stale):
            match_for_ever(client)


def test_leases_go_on_though_the_workers_died_too(daemon: Supervised, engine: Engine) -> None:
    """The pool is the daemon's and its manager's: whichever workers are killed with the daemon, nothing is lost."""
    chain = engine.chain(0, 4)
    lease = engine.client.acquire("r", chain)
    engine.compute(lease, chain)
    lease.commit(16)
    os.kill(_worker_pid(daemon), signal.SIGKILL)
    daemon.kill()
    daemon.await_ready()
    engine.client.rejoin()

    hit = engine.client.acquire("s", chain, full=True)
    assert (hit.hit_blocks, engine.is_right(hit, chain)) == (4, True)


def test_stopped_worker_of_the_daemon_before_is_dead_before_the_next_serves(daemon: Supervised, engine: Engine) -> None:
    """A worker that could go on and write is ended, and its death awaited, before its slots are anybody's."""
    worker = _worker_pid(daemon)
    pidfd = os.pidfd_open(worker)
    os.kill(worker, signal.SIGSTOP)
    daemon.kill()
    daemon.await_ready()

    assert select.select([pidfd], [], [], 0)[0]
    os.close(pidfd)
    engine.client.rejoin()
    assert engine.client.acquire("r", engine.chain(0, 2)).granted


def test_rejoining_needs_a_daemon(daemon: Supervised, engine: Engine) -> None:
    """With the daemon that it has, an engine goes on as it is; while none is there, it is told so, and asks again."""
    earlier, lease = engine.client.session, engine.client.acquire("before", engine.chain(100, 1))
    engine.client.rejoin()  # its session is open
    assert (engine.client.session, engine.client.is_alive) == (earlier, True)
    lease.commit(4)
    daemon.kill()
    try:
        engine.client.rejoin()
    except DaemonUnreachable:
        daemon.await_ready()
        engine.client.rejoin()
    assert engine.client.acquire("r", engine.chain(0, 2)).granted


def match_for_ever(client: Client) -> None:
    """Until the daemon has heard of a death, which takes it milliseconds."""
    while True:
        client.match(client.chain(range(8)))


def test_workers_of_a_replica_that_is_not_configured_any_more_end(tmp_path: Path) -> None:
    """A replica that was taken out of the configuration has no workers after a restart: nobody writes for it."""
    with supervised(tmp_path, CONFIG + HOST) as daemon:
        worker = os.pidfd_open(_worker_pid(daemon))
        (tmp_path / "kvcached.toml").write_text((CONFIG + HOST).replace('name = "default"', 'name = "other"'))
        daemon.kill_and_wait()

        readable, _, _ = select.select([worker], [], [], 0)
        os.close(worker)
        assert readable
        with Admin.connect(daemon.run_dir) as admin:
            assert admin.health().ok


def _worker_pid(daemon: Supervised) -> int:
    children = Path(f"/proc/{daemon.daemon_pid}/task/{daemon.daemon_pid}/children").read_text().split()
    (worker,) = (int(pid) for pid in children if b"kvcached.worker.main" in Path(f"/proc/{pid}/cmdline").read_bytes())
    return worker
