"""A configured replica at run time: its name, its shape, and the workers that hold its memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvcached.core.effects import AbandonLoad, HurryTransfer, StartTransfer
from kvcached.ledger import ProcessIdentity
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.layout import Layout
from kvcached_client.protocol import ReplicaInfo
from kvcached_client.types import ShardIndex, WritePolicy

#: A shard is through with a transfer: (shard, error or "", corrupt blocks).
Settled = Callable[[ShardIndex, str, tuple[int, ...]], None]


class Workers(Protocol):
    """What the service needs of a replica's workers.

    Attributes:
        generation: of the namespace, for what is ordered from now on.
    """

    generation: int

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: sealed pool memory, sealed progress page, an eventfd for each of its entries.

        They stay the workers' own.

        Raises:
            DaemonFailure: the shard has no worker now.
        """

    @property
    def is_degraded(self) -> bool:
        """Whether they die again and again, so that they are started as rarely as possible, or are on probation."""

    @property
    def restarts(self) -> int:
        """How often they were replaced since the daemon's start."""

    @property
    def adopted(self) -> bool:
        """Whether they are an earlier daemon's, with what its engines had written."""

    @property
    def processes(self) -> Mapping[ShardIndex, ProcessIdentity]:
        """Which processes they are; without those that are not there."""

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Order a copy on every shard. `settled` is called once per shard, later, in this thread; it never raises."""

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started copy. Does nothing where it is over."""

    def abandon(self, load: AbandonLoad) -> None:
        """Tell the progress pages that a load failed which was never started."""

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Write, copy and read back through two slots on every shard.

        The future is done when nobody writes into the slots any more, however that came: it may take long. It fails
        with DaemonFailure, which says what failed on which shard.
        """


@dataclass(slots=True, eq=False)
class Replica:
    """What is served under a name. Only clearing it changes anything: namespace, generation, weights version.

    Attributes:
        namespace: 32 bytes, root of every chain of keys; replicas that share it share their prefixes.
        generation: of the namespace.
        root_of: the namespace of a generation and a weights version.
        weights_version: what was set for it; empty = what the configuration says.
        header_namespace: what headers of its blocks in the host pool say, 16 bytes, the same in every generation.
        write_policy: that the configuration says; another one may have been set since.
        host_geometry: the host pool as its blocks lie in it; None without a host tier.
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
    root_of: Callable[[int, str], bytes]
    weights_version: str = ""
    header_namespace: bytes = bytes(16)
    host_geometry: HostGeometry | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH

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
            namespace=self.namespace.hex(),
            generation=self.generation,
            weights_version=self.weights_version,
        )
