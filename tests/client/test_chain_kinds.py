"""Chains, keys and grants that do not belong together are refused before they do harm."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from kvcached_client import BadRequest, Client, FailureReason, KeyChain
from kvcached_client.protocol.engine import Acquire, Acquired, Header, Match, Prefetch, Release, Request
from kvcached_client.types import LeaseId, pack_ranges
from tests.client.fake_daemon import BLOCK_SIZE, NAMESPACE, FakeDaemon
from tests.client.test_aio import run
from tests.client.test_offload import Script
from tests.client.test_offload import connect as connect_offload

Connect = Callable[..., Client]
#: Chains that a session of the fake daemon refuses, and what it says of each.
OTHERS = [
    (KeyChain(NAMESPACE, 2 * BLOCK_SIZE, range(20)), "the block_size 8 instead of 4"),
    (KeyChain(bytes(32), BLOCK_SIZE, range(20)), "another namespace.*After a clear"),
    (KeyChain(NAMESPACE, BLOCK_SIZE, range(20), algorithm="xxh3"), "the algorithm xxh3 instead of blake3"),
]


@pytest.mark.parametrize(("chain", "words"), OTHERS, ids=["block size", "namespace", "algorithm"])
@pytest.mark.parametrize(
    "call",
    [
        Client.match,
        Client.prefetch,
        Client.begin_prefetch,
        lambda client, chain: client.acquire("a", chain),
        lambda client, chain: client.batch().acquire("a", chain),
    ],
    ids=["match", "prefetch", "begin_prefetch", "acquire", "batch"],
)
def test_chain_of_another_kind_is_refused(
    daemon: FakeDaemon, connect: Connect, call: Callable[[Client, KeyChain], object], chain: KeyChain, words: str
) -> None:
    """A chain of another namespace, block size or algorithm is refused by every call, and nothing is sent."""
    client = connect()

    with pytest.raises(BadRequest, match=words):
        call(client, chain)
    assert [daemon.of(kind) for kind in (Match, Prefetch, Acquire)] == [[], [], []]


def test_task_with_a_chain_of_another_kind_is_refused(daemon: FakeDaemon) -> None:
    """In an event loop, too."""
    chain, words = OTHERS[0]

    async def work(client: Any) -> Any:
        calls = (client.acquire("a", chain), client.match(chain), client.prefetch(chain))
        return await asyncio.gather(*calls, return_exceptions=True)

    assert [words in str(error) for error in run(daemon, work)] == [True, True, True]


def test_chain_of_another_kind_is_a_miss_where_failures_are(daemon: FakeDaemon, connect: Connect) -> None:
    """An engine that has connected again after a clear goes on with its old chains, without the cache."""
    client, (chain, _) = connect(failures="miss"), OTHERS[1]

    lease = client.acquire("a", chain)
    assert (lease.granted, lease.reason) == (False, FailureReason.REFUSED)
    assert (client.match(chain), client.prefetch(chain).blocks) == (0, 0)
    assert daemon.of(Acquire) == []


def test_adapters_and_tenants_share_the_kind_of_their_session(connect: Connect) -> None:
    """Chains of an adapter, of a tenant, and forks are of the session's kind, whatever their root."""
    client = connect()

    for chain in (client.chain(range(8), lora="a@1"), client.chain(range(8), salt="s"), client.chain(range(8)).fork()):
        assert client.match(chain) == 2


@pytest.mark.parametrize("failures", ["raise", "miss"])
def test_tokens_are_no_chain(connect: Connect, failures: str) -> None:
    """Tokens in place of a chain are the caller's mistake, and the error says what to pass."""
    client = connect(failures=failures)

    for call in (lambda: client.acquire("a", [1, 2, 3]), lambda: client.match([1]), lambda: client.prefetch([1])):  # type: ignore[arg-type]
        with pytest.raises(BadRequest, match=r"a list in place of a chain \(pass client.chain"):
            call()


def test_grant_that_cannot_be_used_is_given_back(daemon: FakeDaemon, connect: Connect) -> None:
    """Where a reply's slots do not fit what was asked for, the lease in it is released."""
    client = connect()

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire):
            return Acquired(id=request.id, lease=9, hit=0, ready=0), [b"", pack_ranges([(0, 5)])]
        return None

    daemon.script = script
    with pytest.raises(BadRequest, match="5 slots for 2 blocks"):
        client.acquire("a", client.chain(range(8)))
    daemon.script = None
    client.match(client.chain(range(8)))
    assert [(request.lease, request.reply) for request in daemon.of(Release)] == [(9, False)]  # type: ignore[union-attr]


def test_hold_that_cannot_be_used_is_given_back(daemon: FakeDaemon) -> None:
    """In offload mode, the load that was announced with it is called off as well."""
    daemon.script = script = Script()
    script.load_blocks = 3
    with connect_offload(daemon, deadline_ms=10_000) as client:
        with pytest.raises(BadRequest, match="3 slots for 2 blocks"):
            client.acquire("r", bytes(80), 81, load_from=0)
        client.match(bytes(16), 17)
    assert [(each.lease, each.call_off) for each in daemon.of(Release)] == [(1, 7)]  # type: ignore[union-attr]


def test_chain_is_no_keys(daemon: FakeDaemon) -> None:
    """A chain in place of its keys is the caller's mistake, and the error says what to pass."""
    daemon.script, chain = Script(), KeyChain(NAMESPACE, 16, range(32))
    with connect_offload(daemon, deadline_ms=10_000) as client:
        calls: list[Callable[[Any], object]] = [
            lambda keys: client.acquire("x", keys, 32),
            lambda keys: client.match(keys, 32),
            lambda keys: client.prefetch(keys, 32),
            lambda keys: client.prepare_store(LeaseId(1), 0, keys),
            lambda keys: client.pin(keys, ttl_ms=1000),
        ]
        for call in calls:
            with pytest.raises(BadRequest, match=r"a KeyChain in place of keys \(pass chain.keys"):
                call(chain)
