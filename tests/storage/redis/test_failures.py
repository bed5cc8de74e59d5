from __future__ import annotations

import time
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import cast
from unittest.mock import Mock

import pytest
from redis.exceptions import RedisError, ResponseError

from kvcached.storage.backend import ABSENT, DONE, UNKNOWN_USAGE, WRONG, Outcome, RecordUnusable, Storage
from kvcached.storage.redis import backend
from kvcached.storage.redis.backend import RedisStorage
from kvcached.storage.redis.connections import Connections
from kvcached.storage.redis.opening import open_redis
from kvcached.storage.redis.settings import RedisSettings
from tests.storage.disks import get, put
from tests.storage.redis.servers import Server, dripping, opened, running, stalling
from tests.storage.values import TIMEOUT_S, asked, is_right, key, kind, stored

SHORT_S = 0.2
#: What a call may take beyond its timeout on a busy machine.
SLACK_S = 2.0
LARGE = kind(1 << 20)


def name(number: int, prefix: str = "test") -> bytes:
    """The name of a block in the server."""
    return b"%b:b:%b" % (prefix.encode(), key(number).hex().encode())


def test_hung_server_does_not_hold_calls() -> None:
    """While the server is stopped every call ends in its timeout; the next ones get the right bytes."""
    with running() as server, opened(server) as storage:
        put(storage, 1, 2)
        storage.put([stored(3, LARGE)], timeout_s=SHORT_S)
        for _ in range(2):
            with server.stopped():
                began_s = time.monotonic()
                (got,) = storage.get([asked(1)], timeout_s=SHORT_S)
                results = storage.put([stored(number, LARGE) for number in (4, 5)], timeout_s=SHORT_S)
                with pytest.raises(RedisError):
                    storage.exists([key(1)], timeout_s=SHORT_S)
                with pytest.raises(RedisError):
                    storage.clear(b"", timeout_s=SHORT_S)
                with pytest.raises(RedisError):
                    storage.write_record(b"record", b"", timeout_s=SHORT_S)
                usage = storage.usage()
                took_s = time.monotonic() - began_s

            assert took_s < 5 * SHORT_S + SLACK_S
            assert [each.outcome for each in (got, *results)] == [Outcome.FAILED] * 3
            assert usage == UNKNOWN_USAGE
            block = asked(2)
            assert storage.get([block], timeout_s=TIMEOUT_S) == [DONE]
            assert is_right(block, 2)


def test_part_of_a_value_is_not_taken_for_one(server: Server) -> None:
    """Where a reply stops in the middle of a value, the blocks before it are right and the rest fails in time."""
    with opened(server, "stalls") as storage:
        put(storage, 1, 2, 3)
    with (
        stalling(server, 50_000) as port,  # INFO, two values and a part of one
        closing(open_redis({"url": f"redis://127.0.0.1:{port}", "prefix": "stalls"})) as storage,
    ):
        cast("RedisStorage", storage)._nodes.first._idle[0].socket_timeout = 0.5
        blocks = [asked(number) for number in (1, 2, 3)]
        began_s = time.monotonic()
        results = storage.get(blocks, timeout_s=0.5)

        assert time.monotonic() - began_s < 0.5 + SLACK_S
        assert results[-1].outcome is Outcome.FAILED
        whole = [is_right(*each) for each in zip(blocks, (1, 2, 3), strict=True)]
        assert whole == [result == DONE for result in results] == [True, True, False]
        assert [get(storage, number) for number in (3, 1, 2)] == [DONE] * 3


def test_pieces_that_come_in_time_do_not_add_up() -> None:
    """Where each piece of a reply or of a value passes in time, but not all of them, the call ends in its timeout."""
    with (
        running() as server,
        opened(server, "drips") as near,
        dripping(server, 8192, 0.05) as port,
        closing(open_redis({"url": f"redis://127.0.0.1:{port}", "prefix": "drips"})) as storage,
    ):
        near.put([stored(1, LARGE)], timeout_s=TIMEOUT_S)
        for call in (
            partial(storage.get, [asked(1, LARGE)]),
            partial(storage.put, [stored(number, kind(1 << 18, shards=8)) for number in range(8)]),
        ):
            began_s = time.monotonic()
            results = call(timeout_s=SHORT_S)

            assert {each.outcome for each in results} == {Outcome.FAILED}
            assert time.monotonic() - began_s < SHORT_S + SLACK_S


def test_connection_with_an_unread_reply_is_not_used_again(server: Server) -> None:
    """Whatever ends an exchange before its last reply, the next one begins on another connection."""
    settings = RedisSettings(url=server.url)
    with closing(Connections(settings, settings.server)) as connections:
        for number in range(3):
            with suppress(KeyError), connections.taken(TIMEOUT_S) as exchange:
                exchange.send([(b"ECHO", b"%d" % number), (b"ECHO", b"late")])
                assert exchange.read() == b"%d" % number
                raise KeyError
        with suppress(KeyError), connections.taken(TIMEOUT_S) as exchange:
            exchange.send([(b"BLPOP", b"nothing", b"0.2")])  # whose reply comes while the next one is waited for
            raise KeyError
        with connections.taken(TIMEOUT_S) as exchange:
            first = exchange._connection
            assert exchange.ask(b"ECHO", b"right") == b"right"
        with connections.taken(TIMEOUT_S) as exchange:
            assert exchange._connection is first


def test_call_whose_time_is_up_does_not_connect(tmp_path: Path) -> None:
    """Where earlier parts of a call have used up its time, the next one fails without a look at its server."""
    settings = RedisSettings(url=f"unix://{tmp_path}/none")
    connections = Connections(settings, settings.server)

    with pytest.raises(RedisError, match="connecting to"), connections.taken(TIMEOUT_S):
        pass
    with pytest.raises(RedisError, match="did not answer in time"), connections.taken(TIMEOUT_S, time.monotonic()):
        pass


def test_restarted_server_is_found_again() -> None:
    """After the server was killed and started between calls, no call fails; what it had is absent."""
    with running() as server, opened(server) as storage:
        put(storage, 1, 2)
        server.kill()
        server.start()

        assert get(storage, 1) == ABSENT
        assert put(storage, 1) == [Outcome.DONE]
        assert get(storage, 1) == DONE


def test_absent_server_fails_calls_until_it_is_back() -> None:
    """While there is no server all blocks fail, with the reason, and nothing waits; then calls succeed."""
    with running() as server, opened(server) as storage:
        assert storage.usage().size_bytes > 0
        server.kill()
        began_s = time.monotonic()
        results = storage.put([stored(1), stored(2)], timeout_s=TIMEOUT_S)
        with pytest.raises(RedisError, match="connecting to"):
            storage.read_record(timeout_s=TIMEOUT_S)

        assert time.monotonic() - began_s < SLACK_S
        assert {each.outcome for each in results} == {Outcome.FAILED}
        assert "connecting to" in results[0].detail
        assert storage.usage() == UNKNOWN_USAGE
        server.start()
        assert put(storage, 1) == [Outcome.DONE]


def test_full_server_refuses_blocks_alone() -> None:
    """Without eviction, what has no room is FULL, with what to do; the rest is stored, and the record is written."""
    with running("--maxmemory", "24mb", "--maxmemory-policy", "noeviction") as server, opened(server) as storage:
        results = storage.put([stored(number, LARGE) for number in range(16)], timeout_s=TIMEOUT_S)
        outcomes = [each.outcome for each in results]

        assert outcomes[0] is Outcome.DONE
        assert outcomes[-1] is Outcome.FULL
        assert set(outcomes) == {Outcome.DONE, Outcome.FULL}
        assert "maxmemory-policy allkeys-lru" in results[-1].detail
        for number, outcome in enumerate(outcomes):
            block = asked(number, LARGE)
            (got,) = storage.get([block], timeout_s=TIMEOUT_S)
            assert got == (DONE if outcome is Outcome.DONE else ABSENT)
        server.ask("CONFIG", "SET", "maxmemory", "2mb")  # which it exceeds
        assert put(storage, 1) == [Outcome.FULL]
        assert storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        assert storage.delete([key(0, LARGE)], timeout_s=TIMEOUT_S) == 1


@pytest.mark.parametrize(("policy", "ttl_s"), [("allkeys-lru", None), ("volatile-lru", 1000)])
def test_evicted_blocks_are_absent(policy: str, ttl_s: int | None) -> None:
    """A server that evicts takes all blocks, and old ones are absent; where only blocks expire, the record stays."""
    with (
        running("--maxmemory", "16mb", "--maxmemory-policy", policy) as server,
        opened(server, ttl_s=ttl_s) as storage,
    ):
        version = storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        for number in range(40):
            assert storage.put([stored(number, LARGE)], timeout_s=TIMEOUT_S) == [DONE]
        found = storage.exists([key(number, LARGE) for number in range(40)], timeout_s=TIMEOUT_S)

        assert 0 < sum(found) < 10
        absent = [asked(number, LARGE) for number, is_there in enumerate(found) if not is_there]
        assert set(storage.get(absent, timeout_s=TIMEOUT_S)) == {ABSENT}
        assert ttl_s is None or storage.read_record(timeout_s=TIMEOUT_S) == (b"record", version)


def test_record_counts_as_used(server: Server) -> None:
    """Who asks how full the server is, as is done after every request, uses the record, and so does who puts blocks."""
    with opened(server, "used") as storage:
        storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        for use in (storage.usage, partial(put, storage, 1)):
            time.sleep(1.1)  # the server counts seconds
            assert server.ask("OBJECT", "IDLETIME", "used:record") >= 1
            use()

            assert server.ask("OBJECT", "IDLETIME", "used:record") == 0


def test_key_of_another_type_is_wrong(server: Server, storage: Storage, request: pytest.FixtureRequest) -> None:
    """A list under a block's name is a wrong block, and no failure of the server; a put takes its place."""
    put(storage, 1, 3)
    server.ask("LPUSH", name(2, request.node.name), "foreign")
    blocks = [asked(number) for number in (1, 2, 3)]

    results = storage.get(blocks, timeout_s=TIMEOUT_S)

    assert results == [DONE, WRONG, DONE]
    assert is_right(blocks[2], 3)
    assert put(storage, 2) == [Outcome.DONE]
    assert get(storage, 2) == DONE


def test_record_of_another_type_can_be_replaced(
    server: Server, storage: Storage, request: pytest.FixtureRequest
) -> None:
    """By who has read that it is none, and by nobody else."""
    name = f"{request.node.name}:record"
    server.ask("SET", name, "x")
    with pytest.raises(RecordUnusable, match=f"the key {name} is no hash") as unusable:
        storage.read_record(timeout_s=TIMEOUT_S)

    for other in (b"", b"0" * 16):
        assert storage.write_record(b"record", other, timeout_s=TIMEOUT_S) is None
    version = storage.write_record(b"record", unusable.value.version, timeout_s=TIMEOUT_S)
    assert version is not None
    assert storage.read_record(timeout_s=TIMEOUT_S) == (b"record", version)
    assert storage.write_record(b"other", unusable.value.version, timeout_s=TIMEOUT_S) is None


def test_foreign_keys_are_left_alone(server: Server, storage: Storage, request: pytest.FixtureRequest) -> None:
    """Keys of another form below the prefix, and those of longer prefixes, are no blocks: a clear keeps them."""
    prefix = request.node.name
    foreign = [f"{prefix}:b:hello", f"{prefix}:b", f"{prefix}:b:b:{key(1).hex()}", f"{prefix}2:b:{key(1).hex()}"]
    foreign += [f"{prefix}:b:{'x' * 57}:record", f"{prefix}:b:{'Z' * 64}", f"{prefix}:b:{'A' * 64}"]
    for each in foreign:
        server.ask("SET", each, "foreign")
    put(storage, 1)

    assert storage.clear(b"", timeout_s=TIMEOUT_S) == 1

    assert server.ask("EXISTS", *foreign) == len(foreign)


def test_replica_refuses_blocks_in_words() -> None:
    """A server that has become a replica fails puts with the fix, and is connected to anew by the next call."""
    with running() as server, opened(server) as storage:
        put(storage, 1)
        server.ask("REPLICAOF", "127.0.0.1", "1")
        results = storage.put([stored(1), stored(2)], timeout_s=TIMEOUT_S)

        assert {each.outcome for each in results} == {Outcome.FAILED}
        assert "read-only replica" in results[0].detail
        assert cast("RedisStorage", storage)._nodes.first._idle == []
        server.ask("REPLICAOF", "NO", "ONE")
        assert put(storage, 2) == [Outcome.DONE]


def test_other_refusals_are_failures_of_a_block() -> None:
    """A server that wants more replicas refuses a write; blocks can be read still, and the record says so."""
    with running() as server, opened(server) as storage:
        put(storage, 1)
        server.ask("CONFIG", "SET", "min-replicas-to-write", "1")
        (result,) = storage.put([stored(2)], timeout_s=TIMEOUT_S)

        assert result.outcome is Outcome.FAILED
        assert "NOREPLICAS" in result.detail
        assert get(storage, 1) == DONE
        with pytest.raises(ResponseError, match="NOREPLICAS"):
            storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)


def test_many_blocks_are_cleared(server: Server, storage: Storage, request: pytest.FixtureRequest) -> None:
    """A clear finds 20,000 blocks among others, step by step, and tells how many they were; the record stays."""
    prefix = request.node.name
    script = "for i = 1, ARGV[2] do redis.call('SET', ARGV[1] .. string.format('%064x', i), 'value') end"
    server.ask("EVAL", script, 0, f"{prefix}:b:", 20_000)
    server.ask("EVAL", script, 0, f"{prefix}-other:b:", 20_000)
    storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)

    pages = Mock()
    assert storage.clear(b"", timeout_s=TIMEOUT_S, progress=pages) == 20_000
    assert pages.call_count >= 5
    assert storage.clear(b"", timeout_s=TIMEOUT_S) == 0

    assert storage.read_record(timeout_s=TIMEOUT_S) is not None
    with opened(server, f"{prefix}-other") as other:
        assert other.clear(b"", timeout_s=TIMEOUT_S) == 20_000


def test_values_are_sent_some_at_a_time(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch of more than is sent at once comes back whole, and so does a block that alone is more."""
    monkeypatch.setattr(backend, "BYTES_AT_ONCE_MAX", 50_000)
    put(storage, *range(7))
    large = asked(9, LARGE)
    storage.put([stored(9, LARGE)], timeout_s=TIMEOUT_S)
    blocks = [asked(number) for number in range(7)]

    assert storage.get([*blocks, large], timeout_s=TIMEOUT_S) == [DONE] * 8
    assert all(is_right(block, number) for number, block in enumerate(blocks))
    assert is_right(large, 9, LARGE)


def test_blocks_expire_and_the_record_does_not(server: Server) -> None:
    """With ttl_s, blocks get that many seconds with every write, and reads do not add to them."""
    with opened(server, "expiry", ttl_s=100) as storage:
        put(storage, 1)
        storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        server.ask("EXPIRE", name(1, "expiry"), 50)
        get(storage, 1)

        assert 40 < server.ask("TTL", name(1, "expiry")) <= 50
        assert server.ask("TTL", "expiry:record") == -1
        put(storage, 1)
        assert 90 < server.ask("TTL", name(1, "expiry")) <= 100


def test_usage_tells_what_the_server_has() -> None:
    """Size and capacity are the server's; it is empty only while it has no key but the record."""
    with running("--maxmemory", "64mb") as server, opened(server) as storage:
        storage.write_record(b"record", b"", timeout_s=TIMEOUT_S)
        empty = storage.usage()
        put(storage, 1)
        one = storage.usage()
        storage.clear(b"", timeout_s=TIMEOUT_S)
        cleared = storage.usage()
        server.ask("SET", "foreign", "value")
        cast("RedisStorage", storage)._fullness.expire()
        foreign = storage.usage()

        assert [each.blocks for each in (empty, one, cleared, foreign)] == [0, -1, 0, -1]
        assert empty.capacity_bytes == 64 << 20
        assert 100_000 < empty.size_bytes < 64 << 20


def test_usage_is_not_asked_for_after_every_request(server: Server, storage: Storage) -> None:
    """Figures are some seconds old at most, and cost nothing meanwhile."""
    storage.usage()
    before = server.ask("INFO", "commandstats")["cmdstat_dbsize"]["calls"]
    for _ in range(50):
        storage.usage()

    assert server.ask("INFO", "commandstats")["cmdstat_dbsize"]["calls"] == before
