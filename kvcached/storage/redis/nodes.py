"""Which server has which keys: one has all, or the primaries of a cluster have some slots of keys each.

A cluster tells its map of slots. It is read again by the next call after a node has failed, or has answered that a slot
is another node's now; until then, blocks of that slot fail.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, TypeAlias

from redis.crc import key_slot
from redis.exceptions import ClusterDownError, RedisError

from kvcached.storage.redis.connections import UNREACHABLE, Connections, Reply
from kvcached.storage.redis.settings import RedisSettings

_SLOTS: Final = 16_384
_ASKED_S_MIN: Final = 0.1
_Address: TypeAlias = tuple[str, int]


class Nodes:
    """The servers of one url."""

    def __init__(self, settings: RedisSettings) -> None:
        self._settings = settings
        #: The server that the url names.
        self.first = Connections(settings, settings.server)
        self._is_cluster = False
        #: Whose the slots are; None where the cluster is to be asked.
        self._owners: list[Connections | None] | None = None
        #: The others of the last map.
        self._known: dict[_Address, Connections] = {}

    @property
    def is_away(self) -> bool:
        """Whether the last exchange with some server that has keys failed."""
        if not self._is_cluster:
            return self.first.is_away
        owners = self._owners
        return owners is None or any(each.is_away for each in _distinct(owners))

    def spread(self, until_s: float) -> None:
        """The first server is one of a cluster.

        Raises:
            RedisError, OSError, StorageUnusable: none of its nodes tells its map.
        """
        self._is_cluster = True
        self._owned(until_s)

    def expire(self) -> None:
        """The map of slots may be wrong."""
        self._owners = None

    def all(self, until_s: float) -> list[Connections]:
        """All that have keys.

        Raises:
            RedisError, OSError, StorageUnusable: none tells the map.
        """
        if not self._is_cluster:
            return [self.first]
        return _distinct(self._owned(until_s))

    def of(self, names: Sequence[bytes], until_s: float) -> list[tuple[Connections, list[int]]]:
        """Who has which of these keys, by their numbers.

        Raises:
            RedisError, OSError, StorageUnusable: none tells the map, or nobody has the slot of a key.
        """
        if not self._is_cluster:
            return [(self.first, list(range(len(names))))]
        owners, found = self._owned(until_s), dict[Connections, list[int]]()
        for number, name in enumerate(names):
            owner = owners[key_slot(name)]
            if owner is None:
                self.expire()
                raise ClusterDownError("no node of the cluster has the slot of a key; give it to one")
            found.setdefault(owner, []).append(number)
        return list(found.items())

    def has(self, server: Connections, name: bytes) -> bool:
        """Whether a server has this key, as far as is known without asking."""
        owners = self._owners
        return not self._is_cluster or (owners is not None and owners[key_slot(name)] is server)

    def close(self) -> None:
        """Close the connections that nobody uses."""
        for each in (self.first, *self._known.values()):
            each.close()

    def _owned(self, until_s: float) -> list[Connections | None]:
        owners = self._owners
        if owners is None:
            owners = self._owners = self._read(until_s)
        return owners

    def _read(self, until_s: float) -> list[Connections | None]:
        """The map, as the first node has it that answers. One that hangs leaves time for the next."""
        failure: Exception = RedisError("no node of the cluster is known")
        for asked in (self.first, *self._known.values()):
            try:
                left_s = max(until_s - time.monotonic(), _ASKED_S_MIN)
                with asked.taken(left_s / 2) as exchange:
                    ranges = exchange.ask(b"CLUSTER", b"SLOTS")
            except UNREACHABLE as error:
                failure = error
                continue
            return self._mapped(ranges, asked.server.host)
        raise failure

    def _mapped(self, ranges: Reply, asked_host: str) -> list[Connections | None]:
        """The owner of each slot. Nodes that have none any more are forgotten."""
        owners: list[Connections | None] = [None] * _SLOTS
        known: dict[_Address, Connections] = {}
        for first, last, (host, port, *_), *_ in ranges:
            name = (host or b"").decode() or asked_host  # without one it is that of who was asked
            server = self._settings.server._replace(host=name, port=port)
            owner = self.first
            if server != owner.server:
                owner = self._known.get((name, port)) or known.get((name, port)) or Connections(self._settings, server)
                known[name, port] = owner
            owners[first : last + 1] = [owner] * (last + 1 - first)
        gone = [each for address, each in self._known.items() if address not in known]
        self._known = known
        for each in gone:
            each.close()
        return owners


def _distinct(owners: list[Connections | None]) -> list[Connections]:
    return [each for each in dict.fromkeys(owners) if each is not None]
