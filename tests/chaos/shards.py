"""The shards of an engine as its scheduler sees them: orders go out in one order for all, answers come back."""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

_MESSAGE_BYTES_MAX = 1 << 18


class ShardDied(Exception):
    """A shard's process is gone."""


@dataclass(eq=False)
class Order:
    """What every shard was told.

    Attributes:
        waiting: shards that have not answered.
        answers: by shard.
        then: called when all have.
    """

    verb: str
    waiting: set[int]
    answers: dict[int, Any] = field(default_factory=dict)
    then: Callable[[Order], None] | None = None

    @property
    def is_done(self) -> bool:
        """Whether every shard has answered."""
        return not self.waiting


class Shards:
    """Links to all shards, in their order."""

    def __init__(self, links: Sequence[socket.socket]) -> None:
        self._links = links
        self._orders: dict[int, Order] = {}
        self._last = 0

    @property
    def queued(self) -> int:
        """Orders that some shard has not answered."""
        return len(self._orders)

    def order(self, verb: str, *arguments: Any, then: Callable[[Order], None] | None = None) -> Order:
        """Tell every shard.

        Raises:
            ShardDied: one is gone.
        """
        self._last += 1
        order = self._orders[self._last] = Order(verb, set(range(len(self._links))), then=then)
        data = msgspec.msgpack.encode([self._last, verb, *arguments])
        try:
            for link in self._links:
                link.send(data)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ShardDied from error
        return order

    def pump(self, timeout_s: float) -> None:
        """Hear what shards have answered; wait for the first of it for so long.

        Raises:
            ShardDied: one is gone.
        """
        readable, _, _ = select.select(self._links, [], [], timeout_s)
        while readable:
            for link in readable:
                try:
                    data = link.recv(_MESSAGE_BYTES_MAX)
                except ConnectionResetError:
                    data = b""
                if not data:
                    raise ShardDied
                number, shard, answer = msgspec.msgpack.decode(data)
                order = self._orders[number]
                order.waiting.discard(shard)
                order.answers[shard] = answer
                if order.is_done:
                    del self._orders[number]
                    if order.then is not None:
                        order.then(order)
            readable, _, _ = select.select(self._links, [], [], 0)
