"""The stream of events: numbered batches, those that may be asked for again, and snapshots. No I/O.

Numbers go up by one, and a restart begins far above all numbers of before, so that a subscriber sees every gap. One
that has missed something asks for it again; what is not kept any more, a snapshot replaces:

    begin, number n ── pieces, as the index is while each is sent ── end ── then all batches behind n, in order

A piece may hold more than was there at n, or less. Every block that differs has an event behind n, and the last one
about a block is right. So the subscriber is exact after the batches that were published until the end of the snapshot,
and nobody has to stop, or copy the index.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, TypeVar

from kvcached.core.messages import AllRemoved, BlocksRemoved, BlocksStored, IndexChange, TierEnded
from kvcached.core.slots.announced import Announced
from kvcached.events.token_book import TokenBook, TokensStored
from kvcached.events.wire import HashForm, Told, encode_batch, told_weight, weight_of
from kvcached_client.types import KEY_SIZE_BYTES

#: Keys of one event at most, and of all events of a batch, if these are few: 300 KB, for which a slow subscriber may
#: have to wait. With tokens there are as many fewer keys.
KEYS_PER_EVENT_MAX: Final = 16_384
#: What an event takes beside its keys, in keys: blocks without neighbours are an event each.
EVENT_KEYS: Final = 12
#: Changes that one flush takes. Where each is of one block, that takes some 4 ms, and the next turn goes on.
CHANGES_PER_FLUSH_MAX: Final = 2048
#: What the messages of one flush take, in keys: half of what is kept for a slow subscriber.
KEYS_PER_FLUSH_MAX: Final = 28_000
#: Slots of a pool that one piece of a snapshot looks at: some 100 us.
SLOTS_PER_PIECE: Final = 2048
#: Events of a piece at most: 0.5 ms and 60 KB. A pool with more has stretches of less than eight blocks.
EVENTS_PER_PIECE: Final = 256
#: Of a batch beside its payload: a tuple, a number, places in a deque.
_BATCH_OVERHEAD_BYTES: Final = 200
#: Numbers of one millisecond, in which an epoch is: far more batches than are ever published in it.
_NUMBERS_PER_MS: Final = 256


#: What of the changes routers hear of.
Change = BlocksStored | BlocksRemoved | AllRemoved


class Batch(NamedTuple):
    """A message: its topic, its number, and the packed events."""

    topic: bytes
    number: int
    payload: bytes


class EventStream:
    """Numbers what the core says, and remembers some of it.

    Args:
        changes: of the core; taken from there.
        tiers: what routers know of, at present.
        topic: of the first batch, and what every other one begins with; the namespace's label follows.
        epoch: of this daemon.
        buffer_bytes: of batches that can be asked for again.
        now_s: seconds since 1970.
        book: the tokens that routers may know; None for no tokens.
        form: of keys.
        topics: the topics of batches about a namespace with this label, in place of `topic` and the label. A batch is
            published once for each of them.

    Attributes:
        last: the batch that was published last. The first one of a daemon is empty.
    """

    def __init__(
        self,
        changes: list[IndexChange],
        tiers: Callable[[], list[Announced]],
        *,
        topic: str,
        epoch: int,
        buffer_bytes: int,
        now_s: Callable[[], float],
        book: TokenBook | None = None,
        form: HashForm = "bytes",
        topics: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        self._changes = changes
        self._tiers = tiers
        self._topic = topic
        self._topics = topics or (lambda label: (topic + label,))
        self._now_s = now_s
        self._book = book
        self._form: HashForm = form
        if book is not None:
            book.follow(changes)
        self._buffer_bytes = buffer_bytes
        self._held_bytes = 0
        self._kept: deque[Batch] = deque()
        self._sizes: deque[int] = deque()  #: what each of them takes
        self._next = epoch * _NUMBERS_PER_MS
        self._is_ahead = False  #: a snapshot may have shown blocks whose changes are not published yet
        self.last = self._publish(topic, self._payload([], None))

    def flush(self) -> list[Batch]:
        """What has changed since the last time, the oldest changes first: a batch for each tier, or several.

        Where `has_more` is true afterwards, there is more than one turn of the event loop should make.
        """
        if not self.has_more:
            return []
        if self._book is not None:
            self._book.catch_up()
        changes = self._taken()
        if self._book is not None:
            self._book.taken()
        by_tier: dict[tuple[bytes, int | None], list[Change]] = {}
        tier, part = None, list[Change]()
        for change in changes:
            if change.tier is not tier:  # most of a flush is about one tier
                tier = change.tier
                part = by_tier.setdefault((tier.namespace, tier.rank), [])
            if part and type(change) is BlocksRemoved and not self._is_ahead and _undoes(change, part[-1]):
                part.pop()
            else:
                part.append(change)
        self._is_ahead = self._is_ahead and bool(self._changes)
        batches = [
            self._publish(topic, payload)
            for each in by_tier.values()
            if each
            for part in self._parts(_merged(each))
            for topic, payload in self._messages(part)
        ]
        if self._book is not None:
            self._book.erase(self._tiers)
        return batches + self._forget()

    @property
    def has_more(self) -> bool:
        """Whether something has changed that is not published yet, or tokens are left to be erased."""
        return bool(self._changes) or (self._book is not None and (self._book.has_left or self._book.forgets))

    def replay(self, start: int) -> Iterator[Batch]:
        """The batches from a number on that are kept; each is looked up when it is taken."""
        self._forget()
        number = max(start, self._kept[0].number)
        while number < self._next:
            number = max(number, self._kept[0].number)  # it may have been dropped meanwhile
            yield self._kept[number - self._kept[0].number]
            number += 1

    def snapshot(self) -> Iterator[Batch]:
        """All blocks that routers should know of: an empty batch, whose number is the snapshot's, then pieces.

        A piece shows the index when it is taken, which may be ahead of what is published.
        """
        number = self._next - 1
        yield Batch(b"", number, b"")
        for announced in self._tiers():
            slots = SLOTS_PER_PIECE
            if self._book is not None and self._book.wants(announced):
                slots = max(slots // told_weight(announced.tier.block_size), 1)
            slot = announced.next_known(0)
            while slot >= 0:
                stored, slot = announced.section(slot, slots, EVENTS_PER_PIECE)
                self._is_ahead = self._is_ahead or bool(stored and self._changes)
                for part in self._parts(stored):
                    for first in range(0, len(part), EVENTS_PER_PIECE):
                        for topic, payload in self._messages(part[first : first + EVENTS_PER_PIECE]):
                            yield Batch(topic.encode(), number, payload)
                slot = announced.next_known(slot)

    def _taken(self) -> list[Change]:
        """The changes of one flush, removed from those of the core. A large one is cut."""
        taken: list[Change] = []
        room, count, rest = KEYS_PER_FLUSH_MAX, 0, list[IndexChange]()
        for change in self._changes[:CHANGES_PER_FLUSH_MAX]:
            count += 1
            if isinstance(change, TierEnded):
                continue
            blocks, weight = 0, 1
            if not isinstance(change, AllRemoved):
                blocks, weight = len(change.keys) // KEY_SIZE_BYTES, self._weight(change)
            fitting = max(room // weight, 1)
            if not isinstance(change, AllRemoved) and blocks > fitting:
                taken.append(_section(change, 0, fitting))
                rest = [_section(change, fitting, blocks)]
                break
            taken.append(change)
            room -= blocks * weight
            if room <= 0:
                break
        self._changes[:count] = rest
        return taken

    def _weight(self, change: BlocksStored | BlocksRemoved) -> int:
        """What a block of a change takes in all messages about it, in keys."""
        tier = change.tier
        is_told = self._book is not None and isinstance(change, BlocksStored) and self._book.may_tell(tier.label)
        return (told_weight(tier.block_size) if is_told else 1) * len(self._topics(tier.label))

    def _forget(self) -> list[Batch]:
        """After a removal on request nobody may ask for batches from before it, which may have its tokens.

        Whoever has missed some sees a gap in front of the batch that this publishes.
        """
        if self._book is None or not self._book.forgets:
            return []
        if not self._changes:  # else what is published next may have them, too
            self._book.forgotten()
        self._kept.clear()
        self._sizes.clear()
        self._held_bytes = 0
        return [self._publish(self._topic, self._payload([], None))]

    def _parts(self, changes: Iterable[Change]) -> Iterator[list[Told]]:
        """The changes with the tokens that routers may know, in portions that fit a batch each."""
        told = [told for change in changes for told in self._told(change)]
        return _parts(told) if told else iter(())

    def _told(self, change: Change) -> Iterable[Told]:
        if self._book is None or not isinstance(change, BlocksStored):
            return (change,)
        return self._book.told(change)

    def _messages(self, part: Sequence[Told]) -> Iterator[tuple[str, bytes]]:
        """The topics of a part of one tier, and what each of them is told."""
        tier = part[0].tier
        payload = self._payload(part, tier.rank)
        for topic in self._topics(tier.label):
            yield topic, payload

    def _publish(self, topic: str, payload: bytes) -> Batch:
        batch = Batch(topic.encode(), self._next, payload)
        self._next += 1
        self._kept.append(batch)
        is_shared = payload is self.last.payload if self._sizes else False  # the same for another topic
        self._sizes.append(_BATCH_OVERHEAD_BYTES + (0 if is_shared else len(payload)))
        self._held_bytes += self._sizes[-1]
        while self._held_bytes > self._buffer_bytes and len(self._kept) > 1:
            self._kept.popleft()
            self._held_bytes -= self._sizes.popleft()
        self.last = batch
        return batch

    def _payload(self, changes: Sequence[Told], rank: int | None) -> bytes:
        return encode_batch(self._now_s(), changes, rank, self._form)


def _undoes(change: BlocksRemoved, before: Change) -> bool:
    """Whether blocks leave that came just now, as those of a health check do: nobody needs to hear of them.

    Where a snapshot has shown them meanwhile, their removal has to be told.
    """
    return type(before) is BlocksStored and change.keys == before.keys and change.tier == before.tier


def _merged(changes: list[Change]) -> list[Change]:
    """The same with neighbours as one: blocks that are removed, and blocks that continue a chain."""
    merged: list[Change] = []
    same: list[Change] = []
    for change in changes:
        if same:
            before = same[-1]
            if type(change) is type(before) and _continues(before, change):
                same.append(change)
                continue
            merged.append(before if len(same) == 1 else _joined(same))
        same = [change]
    merged.append(_joined(same))
    return merged


def _continues(before: Change, change: Change) -> bool:
    """Whether two changes of one kind can be told as one."""
    if before.tier != change.tier or isinstance(before, AllRemoved):
        return False
    return not isinstance(change, BlocksStored) or change.parent == before.keys[-KEY_SIZE_BYTES:]


def _joined(changes: list[Change]) -> Change:
    first = changes[0]
    if len(changes) == 1 or isinstance(first, AllRemoved):
        return first
    return first._replace(keys=b"".join(each.keys for each in changes if not isinstance(each, AllRemoved)))


def _parts(changes: list[Told]) -> Iterator[list[Told]]:
    """The changes in portions that are no larger than an event of `KEYS_PER_EVENT_MAX` keys."""
    size_max = KEYS_PER_EVENT_MAX + EVENT_KEYS
    if sum(map(_size, changes)) <= size_max:
        yield changes
        return
    part: list[Told] = []
    room = size_max
    for change in changes:
        for piece in _pieces(change):
            size = _size(piece)
            if size > room and part:
                yield part
                part, room = [], size_max
            part.append(piece)
            room -= size
    yield part


def _size(change: Told) -> int:
    """What it takes in a batch, in keys."""
    if isinstance(change, AllRemoved):
        return EVENT_KEYS
    return EVENT_KEYS + len(change.keys) // KEY_SIZE_BYTES * weight_of(change)


def _pieces(change: Told) -> Iterator[Told]:
    """A change in pieces that fit a batch each."""
    if isinstance(change, AllRemoved):
        yield change
        return
    blocks, step = len(change.keys) // KEY_SIZE_BYTES, max(KEYS_PER_EVENT_MAX // weight_of(change), 1)
    for start in range(0, blocks, step):
        yield change if blocks <= step else _section(change, start, start + step)


_Cut = TypeVar("_Cut", bound=BlocksStored | TokensStored | BlocksRemoved)


def _section(change: _Cut, start: int, stop: int) -> _Cut:
    """The blocks from `start` to `stop` of a change."""
    keys = change.keys[start * KEY_SIZE_BYTES : stop * KEY_SIZE_BYTES]
    if isinstance(change, BlocksRemoved):
        return change._replace(keys=keys)
    parent = change.keys[(start - 1) * KEY_SIZE_BYTES : start * KEY_SIZE_BYTES] if start else change.parent
    if isinstance(change, BlocksStored):
        return change._replace(parent=parent, keys=keys)
    block_bytes = change.tier.block_size * 4
    tokens = change.tokens[start * block_bytes : stop * block_bytes]
    return change._replace(parent=parent, keys=keys, tokens=tokens)
