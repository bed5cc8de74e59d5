"""Routers beside a model of the core: they lose messages and connections, and have to be exact all the same."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator

from kvcached.core.cache import Cache
from kvcached.core.insight.findable import findable
from kvcached.core.messages import BlocksStored
from kvcached.events import stream
from kvcached.events.stream import Batch, EventStream
from kvcached.events.token_book import TokenBook
from kvcached.memory.token_table import TokenTable
from tests.core.history import Choose
from tests.events.router import Index, Tier

#: So few that most gaps are longer than what is kept.
BUFFER_BYTES = 1000


def right_index(cache: Cache) -> dict[Tier, set[bytes]]:
    """What a router has to know, read from the trees."""
    index: dict[Tier, set[bytes]] = {}
    for tree in cache.trees:
        runs = list(tree.runs())
        for place, pool in enumerate(tree.members):
            if pool.announced is not None:
                rank = place if place < len(tree.pools) else None
                keys = set(findable(cache, tree, runs, pool).values())
                index.setdefault((tree.namespace.hex(), rank), set()).update(keys)
    return {tier: keys for tier, keys in index.items() if keys}


def tokens_of(key: bytes, block_size: int) -> list[int]:
    """The tokens of a block, as engines tell them: none of every third one."""
    return [] if key[-1] % 3 == 0 else [int.from_bytes(key[-4:], "big") >> 1] * block_size


def _keys(packed: bytes) -> list[bytes]:
    return [packed[at : at + 16] for at in range(0, len(packed), 16)]


class Follower(Index):
    """A router as `docs/events.md` describes it, whose connection breaks, and whose snapshots take long."""

    def __init__(self, stream: EventStream) -> None:
        super().__init__()
        self._stream = stream
        self.is_connected = False
        self.last = -1
        self.snapshot: Iterator[Batch] | None = None
        self.seen: Counter[str] = Counter()

    @property
    def is_up_to_date(self) -> bool:
        """Whether it believes that it has everything that was published."""
        return self.snapshot is None and self.last == self._stream.last.number

    def connect(self) -> None:
        """A new subscriber is sent the last batch."""
        self.is_connected = True
        self.hear(self._stream.last)

    def disconnect(self, *, is_killed: bool) -> None:
        """It hears nothing more; where it is killed it has forgotten everything, and else a half-taken snapshot."""
        self.is_connected = False
        if is_killed or self.snapshot is not None:
            self.last, self.snapshot = -1, None

    def hear(self, batch: Batch) -> None:
        """A batch is published, and reaches it where it is connected."""
        if not self.is_connected or self.snapshot is not None or batch.number <= self.last:
            return
        if batch.number == self.last + 1:
            self.apply(batch.payload)
            self.last = batch.number
        elif not self.replay():
            self.begin_snapshot()

    def replay(self) -> bool:
        """Ask for what is missing; False where it is not kept."""
        self.seen["replays"] += 1
        for batch in self._stream.replay(self.last + 1) if self.last >= 0 else ():
            if batch.number != self.last + 1:
                return False
            self.apply(batch.payload)
            self.last = batch.number
        return self.last == self._stream.last.number

    def begin_snapshot(self) -> None:
        """Ask for the index, as it is from now on."""
        self.seen["snapshots"] += 1
        self.blocks.clear()
        self.snapshot = self._stream.snapshot()
        self.last = next(self.snapshot).number

    def go_on(self) -> None:
        """Take the next piece of the snapshot; behind the last one, what was published since it began."""
        if self.snapshot is None:
            return
        piece = next(self.snapshot, None)
        if piece is not None:
            self.seen["pieces"] += 1
            self.apply(piece.payload)
            return
        self.snapshot = None
        if not self.replay():
            self.begin_snapshot()


class Followers:
    """Two routers of a cache, and what happens to them."""

    def __init__(self, choose: Choose, cache: Cache) -> None:
        self._choose = choose
        self._cache = cache
        self.book = TokenBook(lambda _: True, TokenTable.create)
        self.stream = EventStream(
            cache.index_changes, cache.announced, topic="", epoch=7, buffer_bytes=BUFFER_BYTES, now_s=lambda: 0.0,
            book=self.book,
        )  # fmt: skip
        self.all = [Follower(self.stream), Follower(self.stream)]

    def step(self) -> None:
        """Publish, or not; somebody connects, or loses the connection; snapshots go on."""
        if self._choose(2):
            self.publish()
        for follower in self.all:
            if not self._choose(8):
                follower.disconnect(is_killed=not self._choose(3))
            elif not follower.is_connected and not self._choose(6):
                self.publish()
                follower.connect()
            if self._choose(2):
                self.publish()
                follower.go_on()
        self.check()

    def publish(self) -> None:
        """What the core has said goes to everybody who is connected; engines have told tokens before."""
        for change in self._cache.index_changes[: stream.CHANGES_PER_FLUSH_MAX]:
            if isinstance(change, BlocksStored):
                tiers = {announced.tier: announced for announced in self._cache.announced()}
                tokens = [tokens_of(key, change.tier.block_size) for key in _keys(change.keys)]
                packed = b"".join(array("i", each or [-1] * change.tier.block_size).tobytes() for each in tokens)
                self.book.note(tiers.get(change.tier), change.keys, packed)
        for batch in self.stream.flush():
            for follower in self.all:
                follower.hear(batch)
        self.book.verify()

    def check(self) -> None:
        """Who has everything that was published is exact, if that is everything that has happened."""
        if self._cache.index_changes:
            return
        for follower in self.all:
            if follower.is_up_to_date:
                follower.seen["exact"] += 1
                right = right_index(self._cache)
                assert follower.solid() == right
                sizes = {a.tier.namespace.hex(): a.tier.block_size for a in self._cache.announced()}
                for tier, key in ((tier, key) for tier, keys in right.items() for key in keys):
                    told = follower.tokens[tier, key]
                    assert told == tokens_of(key, sizes[tier[0]])
                    follower.seen["told"] += bool(told)
                    follower.seen["untold"] += not told

    def end(self) -> None:
        """Everybody connects, and is exact."""
        while self.stream.has_more:
            self.publish()
        for follower in self.all:
            follower.disconnect(is_killed=False)
            follower.connect()
            while follower.snapshot is not None:
                follower.go_on()
            assert follower.is_up_to_date
        self.check()
        self.book.close()

    def seen(self) -> Counter[str]:
        """What has happened to them."""
        return self.all[0].seen + self.all[1].seen
