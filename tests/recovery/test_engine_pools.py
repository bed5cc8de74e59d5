"""Device memory that the daemon keeps for engines: who gets which, what stays, and what the next daemon takes over."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator

import msgspec
import pytest

from kvcached.recovery import engine_pools
from kvcached.recovery.engine_pools import EnginePools
from kvcached_client.blocks.engine_table import NO_PARENT, Row, table_bytes
from kvcached_client.blocks.memory_locks import is_locked, lock_memory
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol.attach import ClaimedPool, ClaimPool

RANK_BYTES = 1 << 16
BLOCKS = 16
POOL_BYTES = RANK_BYTES * 2 + table_bytes(BLOCKS)
NAMESPACE, IDENTITY = bytes([3]) * 32, bytes([4]) * 32


class Manager:
    """A service manager's store of descriptors."""

    def __init__(self) -> None:
        self.kept: dict[str, list[int]] = {}

    def store(self, name: str, descriptor: int) -> bool:
        self.kept.setdefault(name, []).append(os.dup(descriptor))
        return True

    def remove(self, name: str) -> bool:
        for descriptor in self.kept.pop(name, ()):
            os.close(descriptor)
        return True

    def given(self) -> dict[str, list[int]]:
        """What the next daemon inherits."""
        return {name: [os.dup(each) for each in kept] for name, kept in self.kept.items()}


@pytest.fixture
def manager(monkeypatch: pytest.MonkeyPatch) -> Iterator[Manager]:
    """The manager of the daemon under test."""
    manager = Manager()
    monkeypatch.setattr(engine_pools, "store", manager.store)
    monkeypatch.setattr(engine_pools, "remove", manager.remove)
    yield manager
    for name in list(manager.kept):
        manager.remove(name)


class Clock:
    """Seconds since 1970, one more with each look."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> float:
        self.now += 1
        return self.now


@pytest.fixture
def pools(manager: Manager) -> Iterator[EnginePools]:
    """Room for two pools of two ranks."""
    pools = EnginePools(2 * POOL_BYTES, Clock())
    yield pools
    pools.close()


def claim(
    pools: EnginePools, claim: str, *, name: str = "model", rank: int | None = 0, rank_bytes: int = RANK_BYTES
) -> tuple[ClaimedPool, tuple[int, ...]]:
    """What a process of an engine gets; the descriptors are the caller's, as if they had come over a socket."""
    question = ClaimPool(name=name, claim=claim, ranks=2, rank=rank, rank_bytes=rank_bytes, blocks=BLOCKS)
    answer, descriptors = pools.claim(question)
    return answer, tuple(map(os.dup, descriptors))


def close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


def held(descriptor: int) -> int:
    """Lock memory as a living engine does."""
    lock = lock_memory(descriptor, 0)
    assert lock is not None
    return lock


def test_processes_of_one_start_get_one_pool(pools: EnginePools) -> None:
    """All ranks and the scheduler get parts of the same pool; the memory of two ranks is not the same."""
    first, one = claim(pools, "start", rank=0)
    second, other = claim(pools, "start", rank=1)
    third, table = claim(pools, "start", rank=None)

    assert first == second == third
    assert len(table) == 1
    assert os.path.sameopenfile(one[0], table[0])
    os.pwrite(one[1], b"rank 0", 0)
    assert os.pread(other[1], 6, 0) == bytes(6)
    for each in (one, other, table):
        close(each)


def test_next_start_gets_what_the_last_one_has_left(pools: EnginePools) -> None:
    """An engine that starts again has the bytes that it had; one of another name or size has not."""
    first, descriptors = claim(pools, "first")
    os.pwrite(descriptors[1], b"blocks", 100)
    close(descriptors)

    again, descriptors = claim(pools, "second")
    assert again == first
    assert os.pread(descriptors[1], 6, 100) == b"blocks"
    close(descriptors)
    other, descriptors = claim(pools, "third", name="another")
    assert other.pool != first.pool
    close(descriptors)


def test_pool_of_a_living_engine_is_nobody_elses(pools: EnginePools) -> None:
    """While one process has a lock, a second engine of the name gets another pool, and a third one is refused."""
    first, descriptors = claim(pools, "first")
    lock = held(descriptors[1])
    second, others = claim(pools, "second")
    assert second.pool != first.pool
    other_lock = held(others[0])

    with pytest.raises(RequestError) as refused:
        claim(pools, "third")
    assert refused.value.code is ErrorCode.LIMIT
    assert f"{2 * POOL_BYTES}" in refused.value.message
    os.close(lock)
    third, taken = claim(pools, "third")
    assert third == first
    os.close(other_lock)
    for each in (descriptors, others, taken):
        close(each)


def test_lock_ends_with_its_process(pools: EnginePools) -> None:
    """A process that is SIGKILLed has its pool no longer, without anybody's help; waiting for its death is possible."""
    _, descriptors = claim(pools, "first")
    code = (
        "import sys, time\nfrom kvcached_client.blocks.memory_locks import lock_memory\n"
        f"assert lock_memory({descriptors[1]}, 0)\nprint('locked', flush=True)\ntime.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], pass_fds=descriptors, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        assert is_locked(descriptors[1])
        assert lock_memory(descriptors[1], 0) is None
        assert [pool.used for pool in pools.stats()] == [True]
        process.send_signal(signal.SIGKILL)
        lock = lock_memory(descriptors[1], 20)
        assert lock is not None
    os.close(lock)
    assert not is_locked(descriptors[1])
    close(descriptors)


def test_lock_that_comes_too_late_is_given_back(pools: EnginePools) -> None:
    """Who no longer waits for a lock does not get it."""
    _, descriptors = claim(pools, "first")
    lock = held(descriptors[0])
    assert lock_memory(descriptors[0], 0.05) is None
    os.close(lock)
    again = lock_memory(descriptors[0], 20)
    assert again is not None
    os.close(again)
    close(descriptors)


def test_room_is_made_of_what_was_used_longest_ago(pools: EnginePools, manager: Manager) -> None:
    """For a new engine the oldest pool without an engine goes, one that is used stays; the manager forgets it."""
    old, descriptors = claim(pools, "first", name="old")
    used, others = claim(pools, "second", name="used")
    lock = held(others[1])
    new, more = claim(pools, "third", name="new")

    assert {pool.pool for pool in pools.stats()} == {each.pool[:8].hex() for each in (used, new)}
    assert not any(old.pool[:8].hex() in name for name in manager.kept)
    os.close(lock)
    for each in (descriptors, others, more):
        close(each)


def test_request_that_no_room_can_be_made_for_drops_nothing(pools: EnginePools) -> None:
    """Pools stay if giving them back would not be enough."""
    _, descriptors = claim(pools, "first")
    with pytest.raises(RequestError, match="are left by the pools"):
        claim(pools, "second", name="huge", rank_bytes=POOL_BYTES)
    assert len(pools.stats()) == 1
    close(descriptors)


def test_daemon_without_a_limit_keeps_none() -> None:
    """The default configuration refuses, and says which key is to be set."""
    with pytest.raises(RequestError) as refused:
        claim(EnginePools(0), "start")
    assert "device_memory_bytes" in refused.value.fix


def test_ranks_that_ask_for_other_sizes_are_refused(pools: EnginePools) -> None:
    """Processes of one start that disagree do not get a pool each."""
    _, descriptors = claim(pools, "start")
    with pytest.raises(RequestError) as refused:
        claim(pools, "start", rank=1, rank_bytes=RANK_BYTES // 2)
    assert refused.value.code is ErrorCode.WRONG_LAYOUT
    close(descriptors)


def test_next_daemon_takes_pools_over(pools: EnginePools, manager: Manager) -> None:
    """A daemon that starts has the pools of the last one, with all their bytes; other descriptors are left alone."""
    first, descriptors = claim(pools, "first", rank=1)
    os.pwrite(descriptors[1], b"blocks", 100)
    close(descriptors)
    found = manager.given() | {"host": []}
    pools.close()

    later = EnginePools(2 * POOL_BYTES)
    later.take_over(found)
    assert found == {"host": []}
    again, descriptors = claim(later, "second", rank=1)
    assert again == first
    assert os.pread(descriptors[1], 6, 100) == b"blocks"
    close(descriptors)
    later.close()


def test_processes_of_one_start_get_one_pool_from_two_daemons(pools: EnginePools, manager: Manager) -> None:
    """A rank and the scheduler that ask after a restart of the daemon get the pool of the rank that asked before it."""
    first, descriptors = claim(pools, "first", rank=0)
    lock, found = held(descriptors[1]), manager.given()
    pools.close()

    later = EnginePools(2 * POOL_BYTES)
    later.take_over(found)
    again = [claim(later, "first", rank=rank) for rank in (1, None)]
    other = claim(later, "second", rank=0)
    assert [each.pool == first.pool for each, _ in (*again, other)] == [True, True, False]
    for _, each in (*again, other):
        close(each)
    os.close(lock)
    later.close()
    close(descriptors)


def test_claim_of_a_start_that_has_ended_is_forgotten_with_its_daemon(pools: EnginePools, manager: Manager) -> None:
    """The next daemon holds nothing of it against a start that calls itself the same and has other sizes."""
    first, descriptors = claim(pools, "start")
    close(descriptors)
    found = manager.given()
    pools.close()

    later = EnginePools(2 * POOL_BYTES)
    later.take_over(found)
    again, descriptors = claim(later, "start", rank_bytes=RANK_BYTES // 2)
    assert again.pool != first.pool
    close(descriptors)
    later.close()


@pytest.mark.parametrize("missing", ["-0", "-1", "-2", "-65"])
def test_pool_that_is_not_whole_is_dropped(missing: str, pools: EnginePools, manager: Manager) -> None:
    """Without one of its parts a pool is no pool: ranks come back together, or not at all."""
    _, descriptors = claim(pools, "first")
    close(descriptors)
    found = manager.given()
    (lost,) = [name for name in found if name.endswith(missing)]
    os.close(found.pop(lost)[0])

    later = EnginePools(2 * POOL_BYTES)
    later.take_over(found)
    assert later.stats() == ()
    assert not any(name != lost for name in manager.kept)


def test_pool_with_memory_of_another_is_dropped(pools: EnginePools, manager: Manager) -> None:
    """The record names the memory of each rank: a part of another pool is not taken for it."""
    for name in ("one", "other"):
        _, descriptors = claim(pools, name, name=name)
        close(descriptors)
    found = manager.given()
    one, other = (each.pool for each in pools.stats())
    swapped = f"engine-{one}-2", f"engine-{other}-2"
    found[swapped[0]], found[swapped[1]] = found[swapped[1]], found[swapped[0]]

    later = EnginePools(2 * POOL_BYTES)
    later.take_over(found)
    assert later.stats() == ()


def test_smaller_limit_of_the_next_daemon_drops_what_is_too_much(pools: EnginePools, manager: Manager) -> None:
    """Pools beyond the limit go, the oldest first, unless they are used."""
    kept = [claim(pools, name, name=name) for name in ("old", "young")]
    found = manager.given()
    later = EnginePools(POOL_BYTES)
    later.take_over(found)
    assert [pool.name for pool in later.stats()] == ["young"]
    later.close()
    for _, descriptors in kept:
        close(descriptors)


def test_clear_drops_the_rows_of_its_namespace(pools: EnginePools) -> None:
    """What a pool names is gone at once when its namespace is cleared; without an engine, so is the pool."""
    _, descriptors = claim(pools, "first")
    lock = held(descriptors[1])
    (pool,) = pools._pools
    pool.table.identify(IDENTITY, NAMESPACE)
    pool.table.write(Row(3, 1, pool.table.epoch, NO_PARENT, 0, b"hash"))
    assert [each.named for each in pools.stats()] == [1]

    pools.cleared(lambda root: root == bytes(32))
    assert [each.named for each in pools.stats()] == [1]
    pools.cleared(lambda root: root == NAMESPACE)
    assert [each.named for each in pools.stats()] == [0]
    os.close(lock)
    pools.cleared(lambda root: root == NAMESPACE)
    assert pools.stats() == ()
    close(descriptors)


def test_next_daemon_believes_nothing_that_an_engine_wrote(pools: EnginePools, manager: Manager) -> None:
    """Whatever an engine writes into its table, its memory goes to the next start of that user's engine alone."""
    question = ClaimPool(name="model", claim="first", ranks=2, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS)
    first, table = pools.claim(msgspec.structs.replace(question, rank=0), "mallory")
    draw = random.Random(7)
    for number in range(20):
        os.pwrite(table[0], draw.randbytes(os.fstat(table[0]).st_size), 0)
        found = manager.given()
        pools.close()
        pools = EnginePools(2 * POOL_BYTES, Clock())
        pools.take_over(found)
        names = [(pool.name, pool.ranks, pool.blocks) for pool in pools.stats()]
        assert ("model (mallory)", 2, BLOCKS) in names
        other, _ = pools.claim(msgspec.structs.replace(question, claim=f"other {number}"), "alice")
        again, table = pools.claim(msgspec.structs.replace(question, claim=f"again {number}"), "mallory")
        assert (other.pool == first.pool, again.pool == first.pool) == (False, True)
    pools.close()


@pytest.mark.parametrize("user", ["", "alice"])
def test_name_that_has_no_room_in_the_record_is_refused(pools: EnginePools, user: str) -> None:
    """Bytes count, with those of the user's name: a name that is cut would be another engine's, or damage."""
    question = ClaimPool(name="ж" * 128, claim="first", ranks=2, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS)
    if not user:
        pools.claim(question)
        return
    with pytest.raises(RequestError, match="256 bytes"):
        pools.claim(question, user)
