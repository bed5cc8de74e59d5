"""Tokens of blocks: who may know them, and for how long they are kept."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import closing

import pytest

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, IndexChange, Tier, TierEnded
from kvcached.core.slots.announced import Announced
from kvcached.events import stream, token_book, wire
from kvcached.events.stream import EventStream
from kvcached.events.token_book import TokenBook, TokensStored
from kvcached.memory.token_table import TokenTable
from kvcached_client.errors import BadRequest, ErrorCode

SIZE = 4
DEVICE = Tier(bytes(32), 3, "llama", "a", 0, SIZE)
HOST = DEVICE._replace(replica="", rank=None)
OTHER = DEVICE._replace(namespace=b"\1" * 32, label="other")


def keys(*numbers: int) -> bytes:
    return b"".join(number.to_bytes(16, "big") for number in numbers)


def tokens(*numbers: int) -> bytes:
    return array("i", [number for number in numbers for _ in range(SIZE)]).tobytes()


def announced(tier: Tier) -> Announced:
    return Announced([], tier, 16)


@pytest.fixture
def book() -> Iterator[TokenBook]:
    with closing(TokenBook(lambda label: label == "llama", TokenTable.create)) as made:
        yield made
        made.verify()


def erase(book: TokenBook, *tiers: Tier) -> None:
    """Erase all that is to be erased, while there are these tiers."""
    book.erase(lambda: map(announced, tiers or (DEVICE, HOST)))
    while book.has_left:
        book.erase(lambda: map(announced, tiers or (DEVICE, HOST)))


def known(book: TokenBook, tier: Tier, *numbers: int) -> list[tuple[type, bytes, bytes]]:
    """How these blocks of a chain are told: kind, parent, keys of each stretch."""
    change = BlocksStored(tier, b"", keys(*numbers))
    return [(type(each), each.parent, each.keys) for each in book.told(change)]


def test_tokens_of_known_blocks_are_told(book: TokenBook) -> None:
    """Blocks are told in stretches with tokens and without, each behind the one before it."""
    book.note(announced(DEVICE), keys(1, 2, 3, 4), tokens(1, 2, -1, 4))

    assert list(book.told(BlocksStored(DEVICE, b"parent", keys(1, 2, 3, 4)))) == [
        TokensStored(DEVICE, b"parent", keys(1, 2), tokens(1, 2)),
        BlocksStored(DEVICE, keys(2), keys(3)),
        TokensStored(DEVICE, keys(3), keys(4), tokens(4)),
    ]


def test_other_namespaces_are_not_told_of(book: TokenBook) -> None:
    """Tokens of a namespace that the configuration does not name are neither wanted nor kept."""
    assert book.wants(announced(DEVICE))
    assert not book.wants(announced(OTHER))
    assert not book.wants(None)
    book.note(announced(OTHER), keys(1), tokens(1))
    book.note(None, keys(1), tokens(1))
    assert not book.tables
    assert book.wants(announced(DEVICE), "llama")
    assert not book.wants(announced(DEVICE), "another name of it")


def test_tokens_that_do_not_fit_the_blocks_are_refused(book: TokenBook) -> None:
    """As many tokens as the blocks have are told, or none."""
    with pytest.raises(BadRequest) as caught:
        book.note(announced(DEVICE), keys(1, 2), tokens(1))
    assert caught.value.code is ErrorCode.BAD_FRAMES


def test_no_blocks_have_no_tokens(book: TokenBook) -> None:
    """A commit without blocks may have an empty frame of tokens."""
    book.note(announced(DEVICE), b"", b"")

    assert book.tables[SIZE].count == 0


def test_tokens_are_kept_while_a_tier_has_the_block(book: TokenBook) -> None:
    """What moves from device to host keeps its tokens; what has left the last tier is erased, with the next flush."""
    book.note(announced(DEVICE), keys(1, 2), tokens(1, 2))
    book.apply([BlocksStored(DEVICE, b"", keys(1, 2))])
    book.apply([BlocksStored(HOST, b"", keys(1)), BlocksRemoved(DEVICE, keys(1, 2))])
    assert known(book, DEVICE, 1, 2) == [(TokensStored, b"", keys(1, 2))]

    erase(book)

    assert known(book, HOST, 1, 2) == [(TokensStored, b"", keys(1)), (BlocksStored, keys(1), keys(2))]
    book.apply([AllRemoved(HOST)])
    erase(book)
    assert known(book, HOST, 1) == [(BlocksStored, b"", keys(1))]
    assert book.tables[SIZE].count == 0


def test_what_comes_back_in_one_flush_keeps_its_tokens(book: TokenBook) -> None:
    """A block that leaves a tier and is stored again before the flush is over has not left."""
    book.note(announced(HOST), keys(1), tokens(1))
    book.apply([BlocksStored(HOST, b"", keys(1)), BlocksRemoved(HOST, keys(1)), BlocksStored(DEVICE, b"", keys(1))])
    erase(book)

    assert known(book, DEVICE, 1) == [(TokensStored, b"", keys(1))]


def test_what_is_never_completed_makes_room(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that are told and not stored the oldest are erased; those in a tier stay."""
    monkeypatch.setattr(token_book, "WAITING_MAX", 2)
    book.note(announced(DEVICE), keys(1), tokens(1))
    book.apply([BlocksStored(DEVICE, b"", keys(1))])
    book.note(announced(DEVICE), keys(2, 3, 4), tokens(2, 3, 4))

    assert known(book, DEVICE, 1, 2, 3) == [
        (TokensStored, b"", keys(1)),
        (BlocksStored, keys(1), keys(2)),
        (TokensStored, keys(2), keys(3)),
    ]


def test_sizes_of_blocks_are_limited(
    book: TokenBook, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Engines that declare blocks of ever other sizes take a limited number of tables; the log says so once."""
    monkeypatch.setattr(token_book, "TABLES_MAX", 1)
    book.note(announced(DEVICE), keys(1), tokens(1))
    for size in (5, 6):
        tier = DEVICE._replace(namespace=bytes([size]) * 32, block_size=size)
        book.note(announced(tier), keys(1), bytes(4 * size))

    assert list(book.tables) == [SIZE]
    assert len(caplog.messages) == 1


def test_full_table_leaves_blocks_without_tokens(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the table has no row, the block is told without tokens."""
    book.note(announced(DEVICE), keys(1), tokens(1))
    monkeypatch.setattr(book.tables[SIZE], "_rows_max", 1)
    book.note(announced(DEVICE), keys(2), tokens(2))

    assert known(book, DEVICE, 1, 2) == [(TokensStored, b"", keys(1)), (BlocksStored, keys(1), keys(2))]


def test_next_daemon_keeps_what_its_blocks_need() -> None:
    """Of an earlier daemon's rows those stay whose blocks are in a tier; the others are erased."""
    first = TokenBook(lambda _: True, TokenTable.create)
    first.note(announced(DEVICE), keys(1, 2, 3), tokens(1, 2, 3))
    device, host = announced(DEVICE), announced(HOST)
    device.inherit(b"", keys(1), array("i", [3, 1]))
    host.inherit(keys(1), keys(2), array("i", [0, 1]))

    with closing(TokenBook(lambda _: True, TokenTable.create, kept=first.tables)) as second:
        second.take_over([device, host])
        second.verify()

        assert known(second, DEVICE, 1, 2, 3) == [(TokensStored, b"", keys(1, 2)), (BlocksStored, keys(2), keys(3))]
        second.apply([BlocksRemoved(DEVICE, keys(1))])
        erase(second)
        assert known(second, HOST, 1, 2) == [(BlocksStored, b"", keys(1)), (TokensStored, keys(1), keys(2))]


def test_next_daemon_erases_what_routers_may_know_no_more() -> None:
    """Where the configuration no longer names the namespace, nothing of an earlier daemon's tokens is left."""
    first = TokenBook(lambda _: True, TokenTable.create)
    first.note(announced(DEVICE), keys(1), tokens(1))
    device = announced(DEVICE)
    device.inherit(b"", keys(1), array("i", [0, 1]))

    with closing(TokenBook(lambda label: label == "other", TokenTable.create, kept=first.tables)) as second:
        second.take_over([device])

        assert not second.tables


def test_messages_with_tokens_are_as_large_as_others(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block with tokens counts as the keys that fit into its place: events are cut, in streams and in snapshots."""
    monkeypatch.setattr(stream, "KEYS_PER_EVENT_MAX", 2 * (1 + 2))  # 4 tokens take the room of two keys
    tier = announced(DEVICE)
    changes: list[IndexChange] = [BlocksStored(DEVICE, b"", keys(*range(5)))]
    tier.inherit(b"", keys(*range(5)), array("i", [0, 5]))
    book.note(tier, keys(*range(5)), tokens(*range(5)))
    events = EventStream(changes, lambda: [tier], topic="", epoch=1, buffer_bytes=1 << 20, now_s=lambda: 0.0, book=book)

    pieces = list(events.snapshot())[1:]
    batches = events.flush()

    for messages in (pieces, batches):
        told = [event for each in messages for event in wire.decode_batch(each.payload).events]
        stored = [event for event in told if isinstance(event, wire.BlockStored)]
        assert [(len(wire.hashes_of(event)), event.parent_block_hash) for event in stored] == [
            (2, None),
            (2, keys(1)),
            (1, keys(3)),
        ]
        assert [event.token_ids for event in stored] == [
            (0,) * SIZE + (1,) * SIZE,
            (2,) * SIZE + (3,) * SIZE,
            (4,) * SIZE,
        ]
        assert len(told) == len(stored)


def test_what_is_told_again_counts(book: TokenBook) -> None:
    """Until a block is complete, the last one who tells its tokens is right; afterwards nobody changes them."""
    book.note(announced(DEVICE), keys(1), tokens(666))
    book.note(announced(DEVICE), keys(1), tokens(1))
    book.apply([BlocksStored(DEVICE, b"", keys(1))])
    book.note(announced(DEVICE), keys(1), tokens(667))

    assert list(book.told(BlocksStored(DEVICE, b"", keys(1)))) == [TokensStored(DEVICE, b"", keys(1), tokens(1))]


def test_what_is_told_again_is_the_newest(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that waits and is told again is not the oldest any more."""
    monkeypatch.setattr(token_book, "WAITING_MAX", 2)
    for numbers in ((1, 2), (1,), (3,)):
        book.note(announced(DEVICE), keys(*numbers), tokens(*numbers))

    assert known(book, DEVICE, 1, 2) == [(TokensStored, b"", keys(1)), (BlocksStored, keys(1), keys(2))]


def test_tokens_that_come_behind_their_block_stay_with_it(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens of a block that a tier has already are kept as long as that tier has it, whatever else is told."""
    monkeypatch.setattr(token_book, "WAITING_MAX", 1)
    book.apply([BlocksStored(DEVICE, b"", keys(1))])
    book.note(announced(DEVICE), keys(1), tokens(1))
    book.note(announced(DEVICE), keys(2, 3), tokens(2, 3))
    book.apply([BlocksStored(HOST, b"", keys(1)), BlocksRemoved(HOST, keys(1))])
    erase(book)
    assert known(book, DEVICE, 1) == [(TokensStored, b"", keys(1))]

    book.apply([BlocksRemoved(DEVICE, keys(1))])
    erase(book)

    assert known(book, DEVICE, 1, 3) == [(BlocksStored, b"", keys(1)), (TokensStored, keys(1), keys(3))]


def test_what_was_removed_on_request_is_nowhere(book: TokenBook) -> None:
    """Tokens of a removed prompt are erased where they were told and not stored, and nobody gets them by a replay."""
    tiers, changes = [announced(DEVICE)], list[IndexChange]([BlocksStored(DEVICE, b"", keys(1))])
    book.note(announced(DEVICE), keys(1, 2, 3), tokens(1, 2, 3))
    events = EventStream(changes, lambda: tiers, topic="t", epoch=1, buffer_bytes=1 << 20, now_s=lambda: 0.0, book=book)
    first = events.flush()[0].number
    assert tokens(1) in book.tables[SIZE].tokens([0])

    changes.append(BlocksRemoved(DEVICE, keys(1)))
    book.forget(DEVICE.namespace, keys(1, 2))
    last = events.flush()[-1]

    assert (last.topic, wire.decode_batch(last.payload).events) == (b"t", [])
    assert [batch.number for batch in events.replay(first)] == [last.number]
    assert known(book, DEVICE, 1, 2, 3) == [(BlocksStored, b"", keys(1, 2)), (TokensStored, keys(2), keys(3))]


def test_replay_behind_a_removal_has_nothing_of_it(book: TokenBook) -> None:
    """Who asks before the next flush gets nothing of what was removed on request either."""
    tiers, changes = [announced(DEVICE)], list[IndexChange]([BlocksStored(DEVICE, b"", keys(1))])
    book.note(announced(DEVICE), keys(1), tokens(1))
    events = EventStream(changes, lambda: tiers, topic="t", epoch=1, buffer_bytes=1 << 20, now_s=lambda: 0.0, book=book)
    first = events.flush()[0].number
    book.forget(DEVICE.namespace, keys(1))

    (only,) = events.replay(first)

    assert only.number > first
    assert wire.decode_batch(only.payload).events == []


def test_nothing_stays_of_a_namespace_that_is_gone() -> None:
    """What waits in a namespace without blocks is erased once that is cleared; its table is given up."""
    given_up: list[int] = []

    def give_up(size: int, table: TokenTable) -> None:
        given_up.append(size)
        table.close()

    book = TokenBook(lambda _: True, TokenTable.create, give_up)
    book.note(announced(DEVICE), keys(1, 2), tokens(1, 2))
    book.apply([BlocksStored(DEVICE, b"", keys(1))])
    erase(book)
    assert known(book, DEVICE, 1, 2) == [(TokensStored, b"", keys(1, 2))]

    book.apply([AllRemoved(DEVICE)])
    erase(book, DEVICE._replace(namespace=b"\2" * 32))

    assert (known(book, DEVICE, 1, 2), given_up, book.tables) == ([(BlocksStored, b"", keys(1, 2))], [SIZE], {})


def test_tokens_behind_an_eviction_that_is_not_published_stay(book: TokenBook) -> None:
    """Tokens that are told again when their block has just left its tier wait for the next copy."""
    changes: list[IndexChange] = [BlocksStored(DEVICE, b"", keys(1))]
    book.follow(changes)
    book.note(announced(DEVICE), keys(1), tokens(1))
    changes.append(BlocksRemoved(DEVICE, keys(1)))
    book.note(announced(DEVICE), keys(1), tokens(1))
    changes.clear()
    book.taken()
    erase(book)

    assert known(book, DEVICE, 1) == [(TokensStored, b"", keys(1))]


def test_clear_leaves_nothing_that_waits(book: TokenBook) -> None:
    """The end of a tier, as by a clear, is that of what waits in its namespace, and of what may be asked for again."""
    book.note(announced(DEVICE), keys(1), tokens(1))
    book.apply([TierEnded(DEVICE)])

    assert book.forgets
    assert known(book, DEVICE, 1) == [(BlocksStored, b"", keys(1))]


def test_table_that_cannot_be_made_costs_no_request(caplog: pytest.LogCaptureFixture) -> None:
    """Without memory for tokens, blocks are told without, and the log says why, once."""

    def refuse(_: int) -> TokenTable:
        raise OSError(12, "Cannot allocate memory")

    book = TokenBook(lambda _: True, refuse)
    for _ in range(2):
        book.note(announced(DEVICE), keys(1), tokens(1))

    assert known(book, DEVICE, 1) == [(BlocksStored, b"", keys(1))]
    assert caplog.messages == [
        "routers are not told the tokens of some blocks: there is no memory for them: Cannot allocate memory"
    ]


def test_blocks_leave_some_at_a_time(book: TokenBook, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clear of many blocks is carried out in turns, and changes of many blocks are told in turns."""
    monkeypatch.setattr(token_book, "ERASED_AT_ONCE", 3)
    monkeypatch.setattr(stream, "KEYS_PER_FLUSH_MAX", 4 * (1 + 2))
    changes: list[IndexChange] = [BlocksStored(DEVICE, b"", keys(*range(10)))]
    book.note(announced(DEVICE), keys(*range(10)), tokens(*range(10)))
    tiers = [announced(DEVICE)]
    events = EventStream(changes, lambda: tiers, topic="", epoch=1, buffer_bytes=1 << 20, now_s=lambda: 0.0, book=book)

    def turns() -> list[list[int]]:
        """How many blocks each event of each turn has."""
        found = []
        while events.has_more:
            told = [event for batch in events.flush() for event in wire.decode_batch(batch.payload).events]
            found.append([len(wire.hashes_of(event)) for event in told if isinstance(event, wire.BlockStored)])
        return found

    assert turns() == [[4], [4], [2]]
    changes.append(AllRemoved(DEVICE))
    assert turns() == [[], [], [], []]
    assert book.tables[SIZE].count == 0
