"""What `usage` says where the record is gone: with 0 blocks daemons go on, with an unknown number they start anew."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import cast

import pytest

from kvcached.storage.backend import Outcome, Storage
from kvcached.storage.redis.backend import RedisStorage
from kvcached.storage.redis.opening import open_redis
from tests.storage.disks import put
from tests.storage.redis.clusters import cluster
from tests.storage.redis.servers import PATIENCE_S, Server, door, opened, running
from tests.storage.values import TIMEOUT_S


def with_record(storage: Storage) -> None:
    """The record is there, with a block, and this process has seen it."""
    storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
    put(storage, 1)
    assert storage.read_record(timeout_s=TIMEOUT_S) is not None
    assert storage.usage().blocks == -1


def blocks_after_look(storage: Storage) -> int:
    """The blocks that a daemon is told of with the answer that there is no record."""
    assert storage.read_record(timeout_s=TIMEOUT_S) is None
    return storage.usage().blocks


def restart(server: Server) -> None:
    """It has nothing then."""
    server.kill()
    server.start()


def restart_with_foreign_keys(server: Server) -> None:
    """Another program is the first to write."""
    restart(server)
    server.ask("SET", "foreign", "value")


def flush(server: Server) -> None:
    """Somebody deletes all keys."""
    server.ask("FLUSHALL")


def restore(server: Server) -> None:
    """It begins with a snapshot that has blocks, and no record."""
    server.ask("DEL", "test:record")
    server.ask("SAVE")
    restart(server)


def append(server: Server) -> None:
    """It begins with a log of commands."""
    restart(server)
    server.ask("CONFIG", "SET", "appendonly", "yes")


@pytest.mark.parametrize(
    ("what", "blocks"),
    [(restart, 0), (restart_with_foreign_keys, 0), (flush, -1), (restore, -1), (append, -1)],
)
def test_restart_without_persistence_loses_everything(what: Callable[[Server], None], blocks: int) -> None:
    """Blocks that were put after a restart without persistence do not count; after any other loss they may be old."""
    with running() as server, opened(server) as storage:
        with_record(storage)
        what(server)
        storage.usage()
        assert put(storage, 2) == [Outcome.DONE]

        assert blocks_after_look(storage) == blocks


def test_lost_record_that_is_written_again_ends_it() -> None:
    """Once the record is there again nothing is lost, and a FLUSHALL after it is one without a restart."""
    with running() as server, opened(server) as storage:
        with_record(storage)
        restart(server)
        put(storage, 2)
        assert blocks_after_look(storage) == 0

        storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        assert storage.usage().blocks == -1
        server.ask("FLUSHALL")
        put(storage, 2)
        assert blocks_after_look(storage) == -1


def test_who_never_saw_the_record_does_not_know() -> None:
    """A process that opens after the restart finds blocks and no record, and cannot tell whose they are."""
    with running() as server:
        with opened(server) as storage:
            with_record(storage)
        restart(server)
        with opened(server) as storage:
            put(storage, 2)
            assert blocks_after_look(storage) == -1


@pytest.mark.parametrize("is_restarted", [False, True])
def test_other_server_is_not_one_that_restarted(tmp_path: Path, is_restarted: bool) -> None:
    """A failover to a server that has blocks and no record, and has run all the time, loses nothing that is known.

    One that was restarted meanwhile, without a copy of the data, has only what was written since.
    """
    path = tmp_path / "socket"
    with running() as first, running() as second:
        path.symlink_to(second.socket)
        with closing(open_redis({"url": f"unix://{path}", "prefix": "test"})) as storage:
            put(storage, 1)
        time.sleep(2.1)  # it counts seconds
        path.unlink()
        path.symlink_to(first.socket)
        with closing(open_redis({"url": f"unix://{path}", "prefix": "test"})) as storage:
            with_record(storage)
            path.unlink()
            path.symlink_to(second.socket)
            first.kill()
            if is_restarted:
                restart(second)
            put(storage, 2)

            assert blocks_after_look(storage) == (0 if is_restarted else -1)


def test_replica_that_was_promoted_is_no_restarted_server(tmp_path: Path) -> None:
    """A replica that has just started, and got blocks without the record from its primary, has old ones."""
    path = tmp_path / "socket"
    with running() as first, running() as second, door(first) as port:
        path.symlink_to(first.socket)
        with closing(open_redis({"url": f"unix://{path}", "prefix": "test"})) as storage:
            with_record(storage)
            first.ask("DEL", "test:record")
            restart(second)
            second.ask("REPLICAOF", "127.0.0.1", port)
            until_s = time.monotonic() + PATIENCE_S
            while second.ask("DBSIZE") == 0:
                assert time.monotonic() < until_s
                time.sleep(0.02)
            second.ask("REPLICAOF", "NO", "ONE")
            path.unlink()
            path.symlink_to(second.socket)
            first.kill()
            put(storage, 2)

            assert blocks_after_look(storage) == -1


@pytest.mark.parametrize(("restarts_all", "blocks"), [(False, -1), (True, 0)])
def test_cluster_has_lost_everything_if_all_nodes_have(restarts_all: bool, blocks: int) -> None:
    """Where one node has restarted, the others have blocks from before."""
    numbers = range(12)
    with cluster() as servers, closing(open_redis(servers.settings("test"))) as storage:
        with_record(storage)
        put(storage, *numbers)
        owner = servers.owner(b"test:record")
        for node in servers.nodes if restarts_all else [owner]:
            restart(node)
        until_s = time.monotonic() + PATIENCE_S
        while put(storage, *numbers) != [Outcome.DONE] * 12:
            assert time.monotonic() < until_s
            time.sleep(0.05)

        assert blocks_after_look(storage) == blocks


def test_figures_after_a_look_are_taken_after_it() -> None:
    """While another thread takes figures, who has found no record waits for figures of its own."""
    with running() as server, opened(server) as storage:
        with_record(storage)
        fullness = cast("RedisStorage", storage)._fullness
        restart(server)
        put(storage, 2)
        assert storage.read_record(timeout_s=TIMEOUT_S) is None
        with fullness._taking, ThreadPoolExecutor(1) as threads:
            told = threads.submit(storage.usage)
            with pytest.raises(TimeoutError):
                told.result(0.1)
            fullness._taking.release()
            assert told.result(PATIENCE_S).blocks == 0
            fullness._taking.acquire()
