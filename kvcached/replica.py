"""A configured replica at run time: its name, its shape, and the workers that hold its memory."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

from kvcached_client.layout import Layout
from kvcached_client.protocol import ReplicaInfo
from kvcached_client.types import ShardIndex


class Workers(Protocol):
    """What the service needs of a replica's workers."""

    def memory_fd(self, shard: ShardIndex) -> int:
        """The descriptor of a shard's sealed pool memory; it stays the workers' own."""

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Write, copy and read back through two slots on every shard.

        The future is done when nobody writes into the slots any more, however that came: it may take long. It fails
        with DaemonFailure, which says what failed on which shard.
        """


@dataclass(frozen=True, slots=True)
class Replica:
    """What does not change while the daemon runs.

    Attributes:
        namespace: 32 bytes, root of every chain of keys; replicas that share it share their prefixes.
        generation: of the namespace.
    """

    name: str
    device: str
    model: str
    key_algorithm: str
    layout: Layout
    slots: int
    namespace: bytes
    generation: int
    workers: Workers

    def info(self) -> ReplicaInfo:
        """The replica as `describe` tells it."""
        return ReplicaInfo(
            name=self.name,
            layout=self.layout,
            fingerprint=self.layout.fingerprint(),
            slots=self.slots,
            bytes_per_block=self.layout.bytes_per_block(),
            device=self.device,
            model=self.model,
            key_algorithm=self.key_algorithm,
        )
