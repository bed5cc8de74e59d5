"""Tokens that engines tell beside keys: who is asked for them, and whose are taken."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from msgspec import structs

from kvcached.core.messages import BlocksStored
from kvcached.events.token_book import TokenBook, TokensStored
from kvcached.memory.token_table import TokenTable
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.offload import StoreOffer
from tests.service.office import EPOCH, ONE, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice

SIZE = 4


@pytest.fixture
def book() -> Iterator[TokenBook]:
    with closing(TokenBook(lambda label: label in {"a", "tiny"}, TokenTable.create)) as made:
        yield made
        made.verify()


def packed(*numbers: int) -> bytes:
    return array("i", [number for number in numbers for _ in range(SIZE)]).tobytes()


def told(office: Office, book: TokenBook, keys: bytes, *, host: bool = False) -> list[int]:
    """The first tokens of blocks as routers would be told them; -1 where they are not."""
    tiers = [each.tier for each in office.cache.announced() if (each.tier.rank is None) is host]
    found: list[int] = []
    for each in book.told(BlocksStored(tiers[0 if not host else -1], b"", keys)):
        blocks = len(each.keys) // 16
        found += array("i", each.tokens)[::SIZE] if isinstance(each, TokensStored) else [-1] * blocks
    return found


def acquired(office: Office, keys: bytes) -> tuple[int, bytes]:
    header, (_, ranges) = office.ask(office.acquire(keys), keys)
    assert isinstance(header, wire.Acquired)
    return header.lease, ranges


def test_capability_is_granted_where_routers_may_know() -> None:
    """An engine that offers to send tokens is asked for them only if its namespace allows it."""
    for label, granted in (("a", ("token_ids",)), ("other", ())):
        with closing(TokenBook(label.__eq__, TokenTable.create)) as book:
            office = Office("a", book=book)
            hello = structs.replace(office.hello(FakePeer(1)), capabilities=("token_ids", "another"))
            assert office.expect(wire.Welcome, hello).capabilities == granted
    assert Office("a").enter(FakePeer(1)).capabilities == ()


def test_tokens_of_commits_and_releases_are_kept(book: TokenBook) -> None:
    """What is committed with its tokens is told with them; a refused commit tells nothing."""
    office, keys = Office("a", book=book), key_chain(3)
    office.enter(FakePeer(1))
    lease, ranges = acquired(office, keys)
    slots = array("i", ranges)
    first = array("i", [slots[0], 1]).tobytes()
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=lease, start=0)
    wrong = structs.replace(commit, id=office.next_id(), start=7)
    assert office.error(wrong, keys[:16], first, packed(666)) is ErrorCode.OUT_OF_ORDER
    assert office.error(structs.replace(commit, id=office.next_id()), keys[:16], first, b"") is ErrorCode.BAD_FRAMES
    assert told(office, book, keys) == [-1] * 3

    office.expect(wire.Committed, commit, keys[:16], first, packed(1))
    rest = array("i", [slots[0] + 1, 2]).tobytes()
    release = wire.Release(id=office.next_id(), epoch=EPOCH, lease=lease, start=1)
    office.expect(wire.Released, release, keys[16:], rest, packed(2, -1))

    assert told(office, book, keys) == [1, 2, -1]


def hold(office: OffloadOffice, blocks: int, *, peer: bytes = ONE, request: str = "r") -> int:
    return office.acquire_blocks(blocks, peer=peer, request=request).lease


@pytest.mark.parametrize("read_only", [False, True])
def test_offers_and_prefetches_tell_tokens_unless_an_engine_only_loads(book: TokenBook, read_only: bool) -> None:
    """Offers that are accepted, and prefetches, tell tokens; those of an engine that stores nothing are not taken."""
    office, keys = OffloadOffice(book=book), key_chain(4)
    welcome = office.attach(FakePeer(1), read_only=read_only)
    assert welcome.token_ids is not read_only
    lease = hold(office, 4)
    stores = wire.PrepareStores(
        id=office.next_id(), epoch=EPOCH, offers=(StoreOffer(99, 0, 1), StoreOffer(lease, 0, 2))
    )
    office.expect(wire.StoresPrepared, stores, keys[:16] + keys[:32], packed(666, 1, 2))
    store = wire.PrepareStore(id=office.next_id(), epoch=EPOCH, lease=lease, start=0 if read_only else 2)
    office.ask(store, keys[32:48], packed(3))
    answers: list[Any] = []
    prefetch = wire.Prefetch(id=office.next_id(), tokens=17, stop="best_effort")
    office.service.submit(ONE, prefetch, [keys, packed(9, 9, 9, 4)], answers.append)

    assert answers
    assert told(office, book, keys, host=True) == ([-1] * 4 if read_only else [9, 9, 9, 4])


def test_removed_prompts_are_forgotten(book: TokenBook) -> None:
    """`forget` erases tokens that were told and not stored, and nothing of others."""
    office, keys = OffloadOffice(book=book), key_chain(2)
    office.attach(FakePeer(1))
    lease = hold(office, 2)
    store = wire.PrepareStore(id=office.next_id(), epoch=EPOCH, lease=lease, start=0)
    office.expect(wire.StorePrepared, store, keys, packed(1, 2))
    other = key_chain(1, seed=5)
    office.service.submit(
        ONE, wire.Prefetch(id=office.next_id(), tokens=5, stop="best_effort"), [other, packed(5)], lambda _: None
    )
    answers: list[Any] = []
    forget = wire.ForgetPrefix(id=office.next_id(), target="tiny", deadline_ms=0)
    office.service.submit(TWO, forget, [other], answers.append)

    assert book.forgets
    assert told(office, book, other, host=True) == [-1]
    assert told(office, book, keys, host=True) == [1, 2]
