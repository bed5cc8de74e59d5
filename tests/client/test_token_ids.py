"""Tokens that a client sends beside keys, for routers: only where the daemon wants them."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest

from kvcached_client import BadRequest, Client, OffloadClient, OffloadLayout
from kvcached_client.offload import Offered
from kvcached_client.protocol.engine import (
    TELLS_TOKENS,
    Acquire,
    Acquired,
    Commit,
    Header,
    Hello,
    HelloOffload,
    Prefetch,
    Prefetched,
    PrepareStore,
    PrepareStores,
    Release,
    Request,
    StoreOutcome,
    StorePrepared,
    StoresPrepared,
    WelcomeOffload,
)
from kvcached_client.types import LeaseId, Verify, pack_ranges
from tests.client.fake_daemon import TOKEN, FakeDaemon

Connect = Callable[..., Client]
UNTOLD = b"\xff" * 4 * 4


def packed(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


def sent(daemon: FakeDaemon, *kinds: type[Header]) -> list[bytes | None]:
    """The tokens of each such message, behind its keys and slots; None for none."""
    places = {Commit: 2, Release: 2}
    found = [(places.get(type(request), 1), frames) for request, frames in daemon.requests if type(request) in kinds]
    return [frames[place] if len(frames) > place else None for place, frames in found]


def grants(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
    match request:
        case Acquire():
            return Acquired(id=request.id, lease=7, hit=1, ready=1), [pack_ranges([(40, 1)]), pack_ranges([(5, 4)])]
        case Prefetch():
            return Prefetched(id=request.id, blocks=0, fetched=0, is_over=True, reason="nothing"), []
    return None


@pytest.mark.parametrize("is_wanted", [True, False])
def test_commits_and_prefetches_bring_their_tokens(daemon: FakeDaemon, connect: Connect, is_wanted: bool) -> None:
    """Each block that is committed or fetched brings its tokens to a daemon that wants them, and to no other."""
    daemon.script, daemon.capabilities = grants, (TELLS_TOKENS,) if is_wanted else ()
    client = connect()
    chain = client.chain(range(12))
    client.prefetch(chain)
    client.begin_prefetch(chain).result()
    lease = client.acquire("a", chain, reserve_tokens=8)
    lease.commit(8)
    chain.extend(range(12, 18))
    lease.finish(16)

    hello = daemon.of(Hello)[0]
    assert isinstance(hello, Hello)
    assert hello.capabilities == (TELLS_TOKENS,)
    told = [packed(*range(12)), packed(*range(12)), packed(*range(4, 8)), packed(*range(8, 16))]
    assert sent(daemon, Prefetch, Commit, Release) == (told if is_wanted else [None] * 4)


@pytest.mark.parametrize("salted", [{"salt": "tenant"}, {"lora": "adapter"}])
def test_tokens_of_tenants_and_adapters_stay(daemon: FakeDaemon, connect: Connect, salted: dict[str, str]) -> None:
    """A prompt with a salt or an adapter is told by nobody: its tokens alone name another prompt."""
    daemon.script, daemon.capabilities = grants, (TELLS_TOKENS,)
    client = connect()
    client.acquire("a", client.chain(range(12), **salted), reserve_tokens=8).finish(12)

    assert sent(daemon, Release) == [None]


class OffloadScript:
    """Answers of offload mode, of a daemon that wants tokens or not."""

    def __init__(self, *, wants: bool) -> None:
        self.wants = wants

    def __call__(self, request: Any, frames: list[bytes]) -> Any:
        match request:
            case HelloOffload():
                return WelcomeOffload(
                    id=request.id, version=1, session=3, token=TOKEN, daemon_epoch=1, epoch=1, generation=3,
                    namespace=bytes(32), heartbeat_interval_ms=60_000, session_ttl_ms=30_000, verify=Verify.ALWAYS,
                    token_ids=self.wants,
                ), []  # fmt: skip
            case PrepareStore():
                return StorePrepared(id=request.id, transfer=0, depth=2, generation=3), [b"", b""]
            case PrepareStores():
                outcomes = tuple(StoreOutcome(0, offer.start + offer.blocks, 3, 0) for offer in request.offers)
                return StoresPrepared(id=request.id, outcomes=outcomes), [b"", b""]
        return grants(request, frames)


def connect_offload(daemon: FakeDaemon, *, wants: bool, block_size: int = 4) -> OffloadClient:
    daemon.script = OffloadScript(wants=wants)
    layout = OffloadLayout(block_size=block_size, shards=1, block_bytes=1024, fingerprint=bytes(16))
    return OffloadClient.connect(
        daemon.run_dir, engine="e", instance=bytes(16), keyspace=bytes(32), label="m", layout=layout, deadline_ms=5000
    )


@pytest.mark.parametrize("wants", [True, False])
def test_offers_bring_their_tokens(daemon: FakeDaemon, wants: bool) -> None:
    """Offers and prefetches in offload mode bring tokens where these are wanted, -1 where one offer has none."""
    with connect_offload(daemon, wants=wants) as client:
        assert client.tells_tokens is wants
        client.prepare_store(LeaseId(1), 0, bytes(16), packed(1, 2, 3, 4))
        offers = [
            Offered(LeaseId(1), 1, bytes(16), packed(5, 6, 7, 8)),
            Offered(LeaseId(2), 0, bytes(32)),
        ]
        client.begin_prepare_stores(offers).result()
        client.begin_prepare_stores(offers[1:]).result()
        client.prefetch(bytes(16), 5, token_ids=packed(1, 2, 3, 4))

    told = [packed(1, 2, 3, 4), packed(5, 6, 7, 8) + 2 * UNTOLD, None, packed(1, 2, 3, 4)]
    assert sent(daemon, PrepareStore, PrepareStores, Prefetch) == (told if wants else [None] * 4)


def test_tokens_of_another_number_of_blocks_are_refused(daemon: FakeDaemon) -> None:
    """Offers whose tokens do not fit their own blocks are refused before anything is sent, also if the sum fits."""
    with connect_offload(daemon, wants=True) as client:
        offers = [
            Offered(LeaseId(1), 0, bytes(32), packed(1, 2, 3, 4)),
            Offered(LeaseId(2), 0, bytes(16), packed(*range(8))),
        ]
        with pytest.raises(BadRequest, match="16 bytes of token_ids for 2 blocks of 4 tokens"):
            client.begin_prepare_stores(offers)

    assert sent(daemon, PrepareStores) == []


def test_offers_of_more_tokens_than_a_message_takes_go_without(daemon: FakeDaemon) -> None:
    """Keys are never kept back because their tokens have no room."""
    block_size, blocks = 1 << 14, 65
    tokens = bytes(4 * block_size * blocks)
    with connect_offload(daemon, wants=True, block_size=block_size) as client:
        client.begin_prepare_stores([Offered(LeaseId(1), 0, bytes(16 * blocks), tokens)]).result()
        client.prepare_store(LeaseId(1), 0, bytes(16 * blocks), tokens)
        client.prefetch(bytes(16 * blocks), 100, token_ids=tokens)

    assert sent(daemon, PrepareStores, PrepareStore, Prefetch) == [None] * 3
