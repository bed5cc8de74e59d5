"""A daemon that is killed at any request of a batch: each call has happened once or not at all, and its owner knows."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from kvcached_client import Client, DaemonUnreachable, DeadlineExceeded, KeyChain, Lease, MappedPool, map_pool
from kvcached_client.batch import CallBatch
from kvcached_client.transport.steps import BatchedCall
from tests.faults.harness import (
    BOTH_MODES,
    PATIENCE_S,
    TTL_MS,
    armed,
    assert_sound,
    daemon_with,
    until,
    wait_nothing_held,
)

BLOCKS, BLOCK_SIZE = 2, 4
#: Sessions last without heartbeats.
PATIENT = BOTH_MODES.replace(f"session_ttl_ms = {TTL_MS}", "session_ttl_ms = 60000")
#: A hello, and the leases that the batch is about.
REQUESTS_BEFORE = 1 + 4
#: Leases that the batch finishes, behind its commit.
FINISHED = ("b", "c")


class Engine:
    """A client without heartbeats, so that its requests can be counted, and its shard. A block's bytes are its own."""

    def __init__(self, client: Client, pool: MappedPool) -> None:
        self.client = client
        self.pages = pool.pages(0)

    def chain(self, name: str) -> KeyChain:
        start = 100 * ord(name)
        return self.client.chain(range(start, start + BLOCKS * BLOCK_SIZE))

    def compute(self, lease: Lease, name: str) -> None:
        """Write the blocks that are not a hit."""
        for depth in range(lease.hit_blocks, BLOCKS):
            self.pages[lease.block_table[depth]] = self.chain(name).key_range(depth, depth + 1)[0]

    def hit(self, name: str) -> int:
        """How many blocks of a prompt are hit; each has its bytes."""
        chain = self.chain(name)
        with self.client.acquire(f"hit {name}", chain, full=True) as lease:
            lease.wait_loaded()
            for depth in range(lease.hit_blocks):
                assert (self.pages[lease.block_table[depth]] == chain.key_range(depth, depth + 1)[0]).all()
            return lease.hit_blocks

    def rejoined(self) -> bool:
        try:
            self.client.rejoin()
        except (DaemonUnreachable, DeadlineExceeded):
            return False
        return True


def finish(lease: Lease, batch: CallBatch) -> BatchedCall[None]:
    return batch.finish(lease, BLOCKS * BLOCK_SIZE)


@pytest.mark.parametrize(("at", "is_slow"), [(1, False), (1, True), (3, False), (3, True), (5, False), (5, True)])
@pytest.mark.parametrize("failpoint", ["daemon.request", "daemon.reply"])
def test_batch_over_a_lost_connection(tmp_path: Path, failpoint: str, at: int, is_slow: bool) -> None:
    """What was answered has happened, everything else is an error; leases that are held go on with the next daemon."""
    faults = armed(tmp_path, failpoint, "kill", REQUESTS_BEFORE + at)
    with daemon_with(tmp_path, faults, supervised=True, config=PATIENT) as daemon:
        with (
            Client.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000, heartbeat=False) as client,
            map_pool(client.session, 0, deadline_ms=PATIENCE_S * 1000) as pool,
        ):
            engine = Engine(client, pool)
            leases = {name: client.acquire(name, engine.chain(name)) for name in "abcd"}
            for name, lease in leases.items():
                engine.compute(lease, name)
            calls: list[BatchedCall[Lease] | BatchedCall[None]] = []
            begins: list[Callable[[CallBatch], BatchedCall[Lease] | BatchedCall[None]]] = [
                lambda batch: batch.commit(leases["a"], BLOCKS * BLOCK_SIZE),
                *(partial(finish, leases[name]) for name in FINISHED),
                lambda batch: batch.allocate(leases["d"], BLOCKS * BLOCK_SIZE + 1),
                lambda batch: batch.acquire("e", engine.chain("e")),
            ]
            # The daemon may be gone before all calls are made: the next one raises, and those behind it are not made.
            with suppress(DaemonUnreachable), client.batch() as batch:
                for begin in begins:
                    calls.append(begin(batch))
                    if is_slow:  # each call is a turn of its own
                        calls[-1].wait()
            assert faults.reached() == [failpoint]
            answered = [call.wait() is None for call in calls]
            assert answered == sorted(answered, reverse=True)
            if is_slow:
                assert sum(answered) == at - 1
            else:  # the first reply of a turn leaves at once, the others with its end, which a killed daemon lacks
                assert min(at - 1, 1) <= sum(answered) <= at - 1
            until(engine.rejoined, "the daemon never came back")
            with client.batch() as batch:
                for lease in leases.values():
                    if lease.declaration() is not None:
                        batch.finish(lease, BLOCKS * BLOCK_SIZE)
            # The call that raised was made, too: the first one behind those that were sent.
            made = zip(FINISHED, [*answered[1:], False], strict=False)
            unknown = {name for name, is_answered in made if not is_answered}
            for name in leases:
                assert engine.hit(name) in ({0, BLOCKS} if name in unknown else {BLOCKS})
        wait_nothing_held(daemon.run_dir)
        assert_sound(daemon.run_dir)
