"""The tokens of blocks that routers are told of, in namespaces that allow it.

Engines tell the tokens of a block before it is complete. The book keeps them as long as the block is in some tier, and
erases them when it has left the last one. What is told and never completed makes room for what is told later.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from kvcached.core.messages import AllRemoved, BlocksStored, IndexChange, Tier
from kvcached.core.slots.announced import Announced
from kvcached.memory.token_table import NAMESPACE_BYTES, TokenTable
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import KEY_SIZE_BYTES

#: Blocks that are told and not complete: more than all engines of a node compute at a time.
WAITING_MAX: Final = 65_536
#: Sizes of blocks for which tokens are kept: engines declare them, and each takes a descriptor.
TABLES_MAX: Final = 8
_TOKEN_BYTES: Final = 4
_SLOTS_AT_ONCE: Final = 1 << 16

_log: Final = logging.getLogger(__name__)


class TokensStored(NamedTuple):
    """As `BlocksStored`, of blocks whose tokens are known."""

    tier: Tier
    parent: bytes
    keys: bytes
    tokens: bytes  #: little-endian int32, `tier.block_size` for each key


class _Namespace:
    """What is known of one namespace: rows of tokens, and the tiers in which blocks are."""

    def __init__(self, table: TokenTable, name: bytes) -> None:
        self.table = table
        self.name = name
        self.rows: dict[bytes, int] = {}
        self.tiers: dict[bytes, int] = {}  #: of complete blocks: a bit for each tier


class TokenBook:
    """The tokens of blocks.

    Args:
        may_tell: whether routers may know the tokens of a namespace with this label.
        new_table: makes the memory for blocks of one size, which outlives the daemon.
        kept: tables of an earlier daemon, which are the book's from now on.

    Attributes:
        tables: by the size of their blocks.
    """

    def __init__(
        self,
        may_tell: Callable[[str], bool],
        new_table: Callable[[int], TokenTable],
        kept: Mapping[int, TokenTable] | None = None,
    ) -> None:
        self._may_tell = may_tell
        self._new_table = new_table
        self.tables: dict[int, TokenTable] = dict(kept or {})
        self._namespaces: dict[bytes, _Namespace] = {}
        #: Blocks that are told and not complete, by namespace and key, in the order in which they were told.
        self._waiting: dict[tuple[bytes, bytes], None] = {}
        self._left: dict[bytes, set[bytes]] = {}  #: keys that have left a tier since the last `erase_left`
        self._is_full = False

    def close(self) -> None:
        """Unmap all memory."""
        for table in self.tables.values():
            table.close()
        self.tables.clear()
        self._namespaces.clear()
        self._waiting.clear()

    def stop(self) -> None:
        """Nobody is told of anything: take no more tokens."""
        self._may_tell = lambda _: False

    def wants(self, announced: Announced | None) -> bool:
        """Whether the tokens of a tier's blocks may be told. Not where routers are told of no blocks: None."""
        return announced is not None and self._may_tell(announced.tier.label)

    def take_over(self, tiers: Iterable[Announced]) -> None:
        """Keep what the blocks in these tiers need of the tables of an earlier daemon; erase the rest."""
        rows = {(name, key): (table, row) for table in self.tables.values() for row, name, key in table.take_over()}
        for announced in filter(self.wants, tiers):
            space = self._namespace(announced.tier)
            slot = announced.next_known(0) if space is not None else -1
            while space is not None and slot >= 0:
                stretches, slot = announced.section(slot, _SLOTS_AT_ONCE, _SLOTS_AT_ONCE)
                for key in (key for each in stretches for key in _split(each.keys, KEY_SIZE_BYTES)):
                    table, row = rows.pop((space.name, key), (None, 0))
                    if table is space.table:
                        space.rows[key] = row
                    elif table is not None:
                        table.drop(row)
                    if key in space.rows:
                        space.tiers[key] = space.tiers.get(key, 0) | _bit(announced.tier)
                slot = announced.next_known(slot)
        for table, row in rows.values():
            table.drop(row)

    def note(self, announced: Announced | None, keys: bytes, tokens: bytes) -> None:
        """An engine tells the tokens of blocks of a namespace, as far as it knows them.

        Args:
            announced: any tier of the namespace; what is not wanted is passed over.
            keys: of the blocks.
            tokens: of all of them, little-endian int32. Those of a block are not told if the first of them is negative.

        Raises:
            BadRequest: they are not as many tokens as the blocks have.
        """
        if announced is None or not self.wants(announced):
            return
        tier = announced.tier
        block_bytes = tier.block_size * _TOKEN_BYTES
        if len(tokens) != len(keys) // KEY_SIZE_BYTES * block_bytes:
            raise request_error(
                ErrorCode.BAD_FRAMES,
                f"{len(tokens)} bytes of tokens for {len(keys) // KEY_SIZE_BYTES} blocks of {tier.block_size} tokens",
                "send the tokens of all blocks, or none",
            )
        space = self._namespace(tier)
        if space is None:
            return
        firsts = array("i", tokens)[:: tier.block_size]
        for at, key in enumerate(_split(keys, KEY_SIZE_BYTES)):
            if firsts[at] >= 0 and key not in space.rows:
                self._put(tier.namespace, space, key, tokens[at * block_bytes : (at + 1) * block_bytes])

    def apply(self, changes: Iterable[IndexChange]) -> None:
        """Note which blocks have come and gone, in order. Their tokens can be told until `erase_left`."""
        for change in changes:
            space = self._namespaces.get(change.tier.namespace)
            if space is None:
                continue
            bit = _bit(change.tier)
            if isinstance(change, BlocksStored):
                for key in _split(change.keys, KEY_SIZE_BYTES):
                    if key in space.rows:
                        space.tiers[key] = space.tiers.get(key, 0) | bit
                        self._waiting.pop((change.tier.namespace, key), None)
                continue
            gone = list(space.tiers) if isinstance(change, AllRemoved) else _split(change.keys, KEY_SIZE_BYTES)
            left = self._left.setdefault(change.tier.namespace, set())
            for key in gone:
                if key in space.rows:
                    space.tiers[key] = space.tiers.get(key, 0) & ~bit
                    left.add(key)

    def erase_left(self) -> None:
        """Erase the tokens of blocks that are in no tier any more."""
        for namespace, keys in self._left.items():
            space = self._namespaces[namespace]
            for key in keys:
                if not space.tiers.get(key, 0):
                    self._erase(namespace, key)
        self._left.clear()
        self._namespaces = {name: space for name, space in self._namespaces.items() if space.rows}

    def told(self, change: BlocksStored) -> Iterator[BlocksStored | TokensStored]:
        """The same in stretches of blocks whose tokens are known, and of others."""
        space = self._namespaces.get(change.tier.namespace)
        if space is None:
            yield change
            return
        keys = list(_split(change.keys, KEY_SIZE_BYTES))
        rows = [space.rows.get(key) for key in keys]
        start, parent = 0, change.parent
        while start < len(keys):
            is_known, end = rows[start] is not None, start + 1
            while end < len(keys) and (rows[end] is not None) is is_known:
                end += 1
            packed = change.keys[start * KEY_SIZE_BYTES : end * KEY_SIZE_BYTES]
            if is_known:
                tokens = b"".join([space.table.tokens(row) for row in rows[start:end] if row is not None])
                yield TokensStored(change.tier, parent, packed, tokens)
            else:
                yield BlocksStored(change.tier, parent, packed)
            start, parent = end, keys[end - 1]

    def check(self) -> None:
        """For tests: raise AssertionError where what is kept contradicts itself."""
        for name, space in self._namespaces.items():
            held = {key for key, tiers in space.tiers.items() if tiers}
            waiting = {key for namespace, key in self._waiting if namespace == name}
            if held & waiting or held | waiting != space.rows.keys():
                raise AssertionError(f"{len(space.rows)} rows, {len(held)} of blocks, {len(waiting)} waiting")

    def _namespace(self, tier: Tier) -> _Namespace | None:
        """The namespace of a tier; None where there is no memory for blocks of its size."""
        space = self._namespaces.get(tier.namespace)
        if space is not None:
            return space
        table = self.tables.get(tier.block_size)
        if table is None:
            if len(self.tables) == TABLES_MAX:
                self._say_full(f"engines have blocks of more than {TABLES_MAX} sizes")
                return None
            table = self.tables[tier.block_size] = self._new_table(tier.block_size)
        space = self._namespaces[tier.namespace] = _Namespace(
            table, tier.namespace[:NAMESPACE_BYTES].ljust(NAMESPACE_BYTES, b"\0")
        )
        return space

    def _put(self, namespace: bytes, space: _Namespace, key: bytes, tokens: bytes) -> None:
        if len(self._waiting) == WAITING_MAX:
            self._erase(*next(iter(self._waiting)))
        row = space.table.put(space.name, key, tokens)
        if row is None:
            self._say_full("the table has no row left")
            return
        space.rows[key] = row
        self._waiting[namespace, key] = None

    def _erase(self, namespace: bytes, key: bytes) -> None:
        self._waiting.pop((namespace, key), None)
        space = self._namespaces[namespace]
        space.tiers.pop(key, None)
        row = space.rows.pop(key, None)
        if row is not None:
            space.table.drop(row)

    def _say_full(self, why: str) -> None:
        if not self._is_full:
            self._is_full = True
            _log.warning("routers are not told the tokens of some blocks: %s", why)


def _bit(tier: Tier) -> int:
    return 1 if tier.rank is None else 2 << tier.rank


def _split(packed: bytes, size: int) -> Iterator[bytes]:
    for at in range(0, len(packed), size):
        yield packed[at : at + size]
