"""The pipes to the shards' copy threads."""

from __future__ import annotations

import selectors
from collections.abc import Callable, Sequence

from examples.llama_engine.messages import Channel, ChannelClosed, CopyDone, CopyOrder, JoinSession


class CopyPipes:
    """Tells the copy threads of all shards the same, in the same order, and hears from each.

    Args:
        channels: one to each shard.
        death_of: the error that says that a shard has ended.
    """

    def __init__(self, channels: Sequence[Channel], death_of: Callable[[int], Exception]) -> None:
        self._channels = channels
        self._death_of = death_of

    def __len__(self) -> int:
        return len(self._channels)

    def order(self, order: JoinSession | CopyOrder) -> None:
        """Have every shard do something, after what it was told before.

        Raises:
            ShardDied: a shard has ended.
        """
        for shard, channel in enumerate(self._channels):
            try:
                channel.send(order)
            except ChannelClosed:
                raise self._death_of(shard) from None

    def done(self, *, wait: bool) -> list[CopyDone]:
        """What shards have said since the last call, one answer for each order and shard.

        Args:
            wait: until there is one.

        Raises:
            ShardDied: a shard has ended.
        """
        done: list[CopyDone] = []
        with selectors.DefaultSelector() as selector:
            for shard, channel in enumerate(self._channels):
                selector.register(channel, selectors.EVENT_READ, shard)
            while ready := selector.select(None if wait and not done else 0):
                for key, _ in ready:
                    try:
                        done.append(self._channels[key.data].receive_copy_done())
                    except ChannelClosed:
                        raise self._death_of(key.data) from None
        return done
