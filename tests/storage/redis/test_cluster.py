from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from kvcached.storage.backend import DONE, Outcome, Storage, StorageMisconfigured
from kvcached.storage.redis.opening import open_redis
from tests.storage.contract import SharedContract
from tests.storage.disks import get, put
from tests.storage.redis.clusters import Cluster, cluster, fail_over, replica_of
from tests.storage.redis.servers import private
from tests.storage.redis.users import PASSWORD, documented_user, whole_use
from tests.storage.values import TIMEOUT_S, asked, is_right, key, stored

SHORT_S = 0.3
#: What a call may take beyond its timeout on a busy machine.
SLACK_S = 2.0


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[Cluster]:
    """For tests that leave it as it was."""
    with cluster() as servers:
        yield servers


class TestRedisCluster(SharedContract):
    _cluster: Cluster

    @pytest.fixture(autouse=True)
    def _find_cluster(self, shared_cluster: Cluster) -> None:
        self._cluster = shared_cluster

    def open(self, directory: Path) -> Storage:
        return open_redis(self._cluster.settings(f"{directory.parent.name}.{directory.name}"[-64:]))


def name(number: int) -> bytes:
    """The name of a block in the cluster."""
    return b"test:b:" + key(number).hex().encode()


def test_blocks_are_spread(shared_cluster: Cluster) -> None:
    """Every server gets some of the blocks, whichever of them the url names; they are cleared from all."""
    numbers = range(30)
    with closing(open_redis(shared_cluster.settings("test"))) as storage:
        assert put(storage, *numbers) == [Outcome.DONE] * 30
        owners = {shared_cluster.owner(name(number)).port for number in numbers}
        assert len(owners) == 3
    last = shared_cluster.nodes[-1]
    settings = shared_cluster.settings("test") | {"url": f"redis://127.0.0.1:{last.port}"}
    with closing(open_redis(settings)) as storage:
        blocks = [asked(number) for number in numbers]
        assert storage.get(blocks, timeout_s=TIMEOUT_S) == [DONE] * 30
        assert all(map(is_right, blocks, numbers))
        assert storage.usage().size_bytes > 1 << 20
        assert storage.clear(b"", timeout_s=TIMEOUT_S) == 30


def test_slot_that_moves_is_found_again() -> None:
    """A put to a server that has given the slot away fails in words, once; the next one goes to the other server."""
    with cluster() as servers, closing(open_redis(servers.settings("test"))) as storage:
        put(storage, 2)
        storage.delete([key(1)], timeout_s=TIMEOUT_S)
        before = servers.owner(name(1))
        servers.move(name(1), next(node for node in servers.nodes if node is not before))
        assert storage.exists([key(1), key(2)], timeout_s=TIMEOUT_S) == [False, True]
        storage.exists([key(2)], timeout_s=TIMEOUT_S)
        servers.move(name(1), before)
        first, second = storage.put([stored(1), stored(2)], timeout_s=TIMEOUT_S)

        assert first.outcome is Outcome.FAILED
        assert "another node of the cluster" in first.detail
        assert second == DONE
        assert put(storage, 1) == [Outcome.DONE]
        assert get(storage, 1) == DONE


def test_hung_node_fails_its_own_blocks() -> None:
    """While one server is stopped, blocks of the others are got and the call ends in time; then all are."""
    with cluster() as servers, closing(open_redis(servers.settings("test"))) as storage:
        numbers = range(12)
        put(storage, *numbers)
        hung = servers.nodes[0]  # which the url names
        theirs = {number for number in numbers if servers.owner(name(number)) is hung}
        with hung.stopped():
            for _ in range(2):  # with the map of slots, and without one
                began_s = time.monotonic()
                results = storage.get([asked(number) for number in numbers], timeout_s=SHORT_S)

                assert time.monotonic() - began_s < 2 * SHORT_S + SLACK_S
                assert {number for number, result in enumerate(results) if result != DONE} >= theirs
            assert storage.usage().size_bytes == -1
            other = next(number for number in numbers if number not in theirs)
            assert storage.exists([key(other)], timeout_s=SHORT_S) == [True]
        assert [get(storage, number) for number in numbers] == [DONE] * 12


def test_blocks_of_a_dead_node_are_lost_alone() -> None:
    """After a server has died, the blocks of the others are got and put, though the url names the dead one."""
    with cluster() as servers, closing(open_redis(servers.settings("test"))) as storage:
        numbers = range(12)
        put(storage, *numbers)
        dead = servers.nodes[0]
        theirs = {number for number in numbers if servers.owner(name(number)) is dead}
        dead.kill()
        for _ in range(2):
            results = storage.get([asked(number) for number in numbers], timeout_s=TIMEOUT_S)
            assert {number for number, result in enumerate(results) if result != DONE} == theirs
            assert {results[number].outcome for number in theirs} == {Outcome.FAILED}
            found = storage.exists([key(number) for number in numbers], timeout_s=TIMEOUT_S)
            assert {number for number in numbers if not found[number]} == theirs
        with pytest.raises(RedisError):
            storage.exists([key(number) for number in theirs], timeout_s=TIMEOUT_S)


@pytest.mark.parametrize("has_died", [False, True])
def test_failover_is_followed(has_died: bool) -> None:
    """A replica that has taken the place of its primary is asked by the second call at the latest; no block is lost."""
    with (
        cluster() as servers,
        replica_of(servers, servers.nodes[0]) as replica,
        closing(open_redis(servers.settings("test"))) as storage,
    ):
        numbers = range(12)
        put(storage, *numbers)
        servers.nodes[0].ask("WAIT", 1, 5000)
        if has_died:
            servers.nodes[0].kill()
        fail_over(replica, [*servers.nodes[has_died:]], *(["TAKEOVER"] if has_died else []))
        first = put(storage, *numbers)

        assert set(first) == {Outcome.DONE, Outcome.FAILED}
        assert [get(storage, number) for number in numbers] == [DONE] * 12
        assert put(storage, *numbers) == [Outcome.DONE] * 12
        assert storage.usage().size_bytes > 0


def test_puts_use_the_record_where_it_is(shared_cluster: Cluster) -> None:
    """Blocks that go to the server with the record keep it there; other servers are not asked for it."""
    with closing(open_redis(shared_cluster.settings("test"))) as storage:
        storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        owner = shared_cluster.owner(b"test:record")
        for node in shared_cluster.nodes:
            node.ask("CONFIG", "RESETSTAT")
        time.sleep(1.1)  # the server counts seconds
        put(storage, *range(12))

        assert owner.ask("OBJECT", "IDLETIME", "test:record") == 0
        for node in shared_cluster.nodes:
            assert ("cmdstat_touch" in node.ask("INFO", "commandstats")) == (node is owner)
        storage.clear(b"", timeout_s=TIMEOUT_S)
        owner.ask("DEL", "test:record")


def test_user_of_a_cluster_needs_one_permission_more(shared_cluster: Cluster, tmp_path: Path) -> None:
    """The ACL in docs/storage.md, with what it says of clusters, lets the backend use every node."""
    file = private(tmp_path / "password", PASSWORD)
    settings = shared_cluster.settings("kvcached", username="kvcached", password_file=file)
    for node in shared_cluster.nodes:
        node.ask(*documented_user())
    with pytest.raises(StorageMisconfigured, match="permissions"):
        open_redis(settings)
    for node in shared_cluster.nodes:
        node.ask(*documented_user(), "+cluster|slots")

    with closing(open_redis(settings)) as storage:
        assert whole_use(storage)
