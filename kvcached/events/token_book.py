"""The tokens of blocks that routers are told of, in namespaces that allow it.

Engines tell the tokens of a block before it is complete. The book keeps them as long as the block is in some tier, and
erases them when it has left the last one. What is told and never completed makes room for what is told later.
"""

from __future__ import annotations

import gc
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

import numpy as np

from kvcached.core.messages import AllRemoved, BlocksStored, IndexChange, Tier, TierEnded
from kvcached.core.slots.announced import Announced
from kvcached.memory.token_table import NAMESPACE_BYTES, TokenTable, row_bytes
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import KEY_SIZE_BYTES

#: What one namespace may tell and not complete: more blocks than the engines of a node compute at a time.
WAITING_MAX: Final = 65_536
WAITING_BYTES_MAX: Final = 1 << 25
#: Sizes of blocks for which tokens are kept: engines declare them, and each takes a descriptor.
TABLES_MAX: Final = 8
#: Blocks that one call of `erase` looks at: about a millisecond.
ERASED_AT_ONCE: Final = 4096
_TOKEN_BYTES: Final = 4

_log: Final = logging.getLogger(__name__)


class TokensStored(NamedTuple):
    """As `BlocksStored`, of blocks whose tokens are known."""

    tier: Tier
    parent: bytes
    keys: bytes
    tokens: bytes  #: little-endian int32, `tier.block_size` for each key


class _Namespace:
    """What is known of one namespace.

    Attributes:
        tier: any of its tiers.
        rows: of blocks whose tokens are known.
        held: the blocks that each tier has, by its rank.
        waiting: those with tokens that no tier has, in the order in which they were told.
        waiting_max: how many these may be.
    """

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.rows: dict[bytes, int] = {}
        self.held: dict[int | None, set[bytes]] = {}
        self.waiting: dict[bytes, None] = {}
        self.waiting_max = min(WAITING_MAX, WAITING_BYTES_MAX // row_bytes(tier.block_size))

    @property
    def name(self) -> bytes:
        """The namespace in a row."""
        return self.tier.namespace[:NAMESPACE_BYTES].ljust(NAMESPACE_BYTES, b"\0")

    @property
    def is_empty(self) -> bool:
        """Whether no tier has a block."""
        return not any(self.held.values())

    def is_held(self, key: bytes) -> bool:
        """Whether a tier has a block."""
        return any(key in held for held in self.held.values())


class TokenBook:
    """The tokens of blocks.

    Args:
        may_tell: whether routers may know the tokens of a namespace with this label.
        new_table: makes the memory for blocks of one size, which outlives the daemon.
        give_up: forgets and closes such memory, in which nothing is left.
        kept: tables of an earlier daemon, which are the book's from now on.

    Attributes:
        may_tell: as it was given.
        tables: by the size of their blocks.
        forgets: something was removed on request since `forgotten`.
    """

    def __init__(
        self,
        may_tell: Callable[[str], bool],
        new_table: Callable[[int], TokenTable],
        give_up: Callable[[int, TokenTable], None] = lambda _, table: table.close(),
        kept: Mapping[int, TokenTable] | None = None,
    ) -> None:
        self.may_tell = may_tell
        self._new_table = new_table
        self._give_up = give_up
        self.tables: dict[int, TokenTable] = dict(kept or {})
        self.forgets = False
        self._changes: list[IndexChange] = []
        self._applied = 0  #: how many of the first changes are in here
        self._namespaces: dict[bytes, _Namespace] = {}
        #: Blocks that have left a tier, by namespace; those that are in no tier are to be erased.
        self._left: deque[tuple[_Namespace, Iterator[bytes]]] = deque()
        self._is_full = False

    def close(self) -> None:
        """Unmap all memory."""
        for table in self.tables.values():
            table.close()
        self.tables.clear()
        self._namespaces.clear()
        self._left.clear()

    def wants(self, announced: Announced | None, label: str | None = None) -> bool:
        """Whether the tokens of a tier's blocks may be told. Not where routers are told of no blocks: None.

        Args:
            announced: the tier.
            label: what an engine calls its namespace, where that counts, too.
        """
        return announced is not None and self.may_tell(announced.tier.label) and (label is None or self.may_tell(label))

    def take_over(self, tiers: Iterable[Announced]) -> None:
        """Keep what the blocks in these tiers need of the tables of an earlier daemon; erase the rest."""
        was_on = gc.isenabled()
        gc.disable()  # it would take half of the time again, and find no garbage
        try:
            for announced in filter(self.wants, tiers):
                held = self._namespace(announced.tier).held
                held.setdefault(announced.tier.rank, set()).update(_split(announced.known_keys()))
            for table in self.tables.values():
                self._take_over_table(table)
        finally:
            if was_on:
                gc.enable()
        self._prune(self._namespaces.keys())

    def _take_over_table(self, table: TokenTable) -> None:
        """Keep the rows of blocks that some tier has."""
        kept = table.take_over()
        by_name = {space.name: space for space in self._namespaces.values()}
        unneeded = []
        for row, name, key in zip(kept.rows, _split(kept.namespaces), _split(kept.keys), strict=True):
            space = by_name.get(name)
            if space is not None and self.tables.get(space.tier.block_size) is table and space.is_held(key):
                space.rows[key] = row
            else:
                unneeded.append(row)
        table.drop(unneeded)

    def check(self, announced: Announced | None, keys: bytes, tokens: bytes) -> None:
        """Refuse what `note` would refuse.

        Raises:
            BadRequest: as `note`.
        """
        if announced is None or not self.wants(announced):
            return
        blocks, block_size = len(keys) // KEY_SIZE_BYTES, announced.tier.block_size
        if len(tokens) != blocks * block_size * _TOKEN_BYTES:
            raise request_error(
                ErrorCode.BAD_FRAMES,
                f"{len(tokens)} bytes of tokens for {blocks} blocks of {block_size} tokens",
                "send the tokens of all blocks, or none",
            )

    def note(self, announced: Announced | None, keys: bytes, tokens: bytes) -> None:
        """An engine tells the tokens of blocks of a namespace, as far as it knows them.

        What it tells again of a block that no tier has yet takes the place of what was told before.

        Args:
            announced: any tier of the namespace; what is not wanted is passed over.
            keys: of the blocks.
            tokens: of all of them, little-endian int32. Those of a block are not told if one of them is negative.

        Raises:
            BadRequest: they are not as many tokens as the blocks have.
        """
        self.check(announced, keys, tokens)
        if announced is None or not self.wants(announced):
            return
        tier = announced.tier
        table = self._table(tier.block_size)
        if table is None:
            return
        self.catch_up()
        space, block_bytes = self._namespace(tier), tier.block_size * _TOKEN_BYTES
        lowest = np.frombuffer(tokens, "<i4").reshape(-1, tier.block_size).min(axis=1).tolist()
        new: dict[bytes, bytes] = {}
        for at, key in enumerate(_split(keys)):
            if lowest[at] < 0:
                continue
            row = space.rows.get(key)
            told = tokens[at * block_bytes : (at + 1) * block_bytes]
            if row is None:
                new[key] = told
            elif not space.is_held(key):
                table.write(row, told)
                space.waiting.pop(key, None)
                space.waiting[key] = None
        if new:
            self._put(space, table, new)

    def follow(self, changes: list[IndexChange]) -> None:
        """Note what is appended to these changes of the core. Whoever publishes them takes them away."""
        self._changes, self._applied = changes, 0

    def catch_up(self) -> None:
        """Note all that has happened, published or not."""
        self.apply(self._changes[self._applied :])
        self._applied = len(self._changes)

    def taken(self) -> None:
        """Those of the changes were taken away that are published now; what is left of them has been noted."""
        self._applied = len(self._changes)

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Note which blocks have come and gone, in order. Tokens of those that are gone are there until `erase`."""
        for change in changes:
            if not self.may_tell(change.tier.label):
                continue
            space, rank = self._namespace(change.tier), change.tier.rank
            if isinstance(change, BlocksStored):
                keys = list(_split(change.keys))
                space.held.setdefault(rank, set()).update(keys)
                for key in keys if space.waiting else ():
                    space.waiting.pop(key, None)
            elif isinstance(change, TierEnded):
                self.forgets = True
                self._erase(space, list(space.waiting))
            elif isinstance(change, AllRemoved):
                self._left.append((space, iter(space.held.pop(rank, ()))))
            else:
                keys = list(_split(change.keys))
                space.held.setdefault(rank, set()).difference_update(keys)
                self._left.append((space, iter(keys)))

    def forget(self, namespace: bytes, keys: bytes) -> None:
        """Blocks were removed on request: nothing of them is to stay, also where they were told and not stored."""
        self.forgets = True
        space = self._namespaces.get(namespace)
        if space is not None:
            self._erase(space, [key for key in _split(keys) if key in space.waiting])

    def forgotten(self) -> None:
        """Nobody can ask for what was removed on request any more."""
        self.forgets = False

    @property
    def has_left(self) -> bool:
        """Whether blocks have left a tier that `erase` has not looked at."""
        return bool(self._left)

    def erase(self, tiers: Callable[[], Iterable[Announced]]) -> None:
        """Erase the tokens of blocks that are in no tier any more, some at a time.

        Args:
            tiers: what routers know of, at present.
        """
        room = ERASED_AT_ONCE
        while self._left and room:
            space, keys = self._left[0]
            gone, looked = [], 0
            for key in keys:
                looked += 1
                if key in space.rows and key not in space.waiting and not space.is_held(key):
                    gone.append(key)
                if looked == room:
                    break
            else:
                self._left.popleft()
            room -= looked
            self._erase(space, gone)
        if any(space.is_empty for space in self._namespaces.values()) and not self._left:
            self._prune({announced.tier.namespace for announced in tiers()})

    def told(self, change: BlocksStored) -> Iterator[BlocksStored | TokensStored]:
        """The same in stretches of blocks whose tokens are known, and of others."""
        space = self._namespaces.get(change.tier.namespace)
        if space is None or not space.rows:
            yield change
            return
        keys = list(_split(change.keys))
        rows = [space.rows.get(key) for key in keys]
        start, parent = 0, change.parent
        while start < len(keys):
            is_known, end = rows[start] is not None, start + 1
            while end < len(keys) and (rows[end] is not None) is is_known:
                end += 1
            packed = change.keys[start * KEY_SIZE_BYTES : end * KEY_SIZE_BYTES]
            if is_known:
                known = [row for row in rows[start:end] if row is not None]
                yield TokensStored(change.tier, parent, packed, self.tables[change.tier.block_size].tokens(known))
            else:
                yield BlocksStored(change.tier, parent, packed)
            start, parent = end, keys[end - 1]

    def verify(self) -> None:
        """For tests: raise AssertionError where what is kept contradicts itself."""
        left = {id(space) for space, _ in self._left}
        for space in self._namespaces.values():
            held = {key for key in space.rows if space.is_held(key)}
            unexplained = space.rows.keys() - held - space.waiting.keys()
            if (
                held & space.waiting.keys()
                or space.waiting.keys() - space.rows
                or (unexplained and id(space) not in left)
            ):
                raise AssertionError(f"{len(space.rows)} rows, {len(held)} of blocks, {len(space.waiting)} waiting")
        taken = sum(len(space.rows) for space in self._namespaces.values())
        if taken != sum(table.count for table in self.tables.values()):
            raise AssertionError(f"{taken} rows, and {[table.count for table in self.tables.values()]} in tables")

    def _namespace(self, tier: Tier) -> _Namespace:
        space = self._namespaces.get(tier.namespace)
        if space is None:
            space = self._namespaces[tier.namespace] = _Namespace(tier)
        return space

    def _table(self, block_size: int) -> TokenTable | None:
        """The table for blocks of a size; None where there are too many sizes."""
        table = self.tables.get(block_size)
        if table is None and len(self.tables) == TABLES_MAX:
            self._say_full(f"engines have blocks of more than {TABLES_MAX} sizes")
        elif table is None:
            try:
                table = self.tables[block_size] = self._new_table(block_size)
            except OSError as error:
                self._say_full(f"there is no memory for them: {error.strerror or error}")
        return table

    def _put(self, space: _Namespace, table: TokenTable, new: dict[bytes, bytes]) -> None:
        """Write tokens of blocks that have none; the oldest ones of the namespace that wait make room."""
        waiting = [key for key in new if not space.is_held(key)][-space.waiting_max :]
        over = len(space.waiting) + len(waiting) - space.waiting_max
        self._erase(space, [key for key, _ in zip(space.waiting, range(over), strict=False)])
        keys = waiting + [key for key in new if space.is_held(key)]
        rows = table.put(space.name, b"".join(keys), b"".join([new[key] for key in keys]))
        if len(rows) < len(keys):
            self._say_full("the table has no row left")
        space.rows.update(zip(keys, rows, strict=False))
        space.waiting.update(dict.fromkeys(waiting[: len(rows)]))

    def _erase(self, space: _Namespace, keys: list[bytes]) -> None:
        rows = [row for key in keys if (row := space.rows.pop(key, None)) is not None]
        for key in keys:
            space.waiting.pop(key, None)
        if rows:
            self.tables[space.tier.block_size].drop(rows)

    def _prune(self, living: Iterable[bytes]) -> None:
        """Forget namespaces that are gone, and give up tables that none needs."""
        living = set(living)
        for root in [root for root, space in self._namespaces.items() if space.is_empty and root not in living]:
            space = self._namespaces.pop(root)
            self._erase(space, list(space.rows))
        needed = {space.tier.block_size for space in self._namespaces.values()}
        for size in [size for size in self.tables if size not in needed]:
            self._give_up(size, self.tables.pop(size))

    def _say_full(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning("routers are not told the tokens of some blocks: %s", why)


def _split(packed: bytes) -> Iterator[bytes]:
    for at in range(0, len(packed), KEY_SIZE_BYTES):
        yield packed[at : at + KEY_SIZE_BYTES]
