"""What outlives a daemon and is found by the next one: ledger, host pool, workers, and engines that live."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import msgspec

from kvcached import takeover
from kvcached.generations import Generation, generation_of, write_policy_of
from kvcached.ledger import Ledger, LedgerFile, ProcessIdentity
from kvcached.replica import Replica
from kvcached.takeover import Takeover
from kvcached.worker.host_memory import HostHeaders
from kvcached_client.header_table import HeaderTable
from kvcached_client.types import WritePolicy
from tests.simulation.attachment import Attachment
from tests.simulation.memory import Memory

if TYPE_CHECKING:
    from kvcached.config import ReplicaConfig
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World


class KeptLedger(LedgerFile):
    """The ledger as bytes that no process can lose.

    Attributes:
        data: of the ledger; empty where there is none.
    """

    def __init__(self) -> None:
        self.data = b""

    def write(self, ledger: Ledger) -> None:
        self.data = msgspec.json.encode(ledger)

    def remove(self) -> None:
        self.data = b""


def headers_of(host: Memory) -> HostHeaders:
    """The daemon's own view of the host pool, which needs no mapping here."""
    headers = HostHeaders.__new__(HostHeaders)
    headers.table = HeaderTable(memoryview(host.bytes))
    return headers


@dataclass(frozen=True)
class _Configured:
    """A replica as its namespaces come from its configuration."""

    world: World
    first: bytes

    @property
    def write_policy(self) -> WritePolicy:
        return self.world.plan.write_policy

    def namespace(self, generation: int, weights_version: str = "") -> bytes:
        return self.world.root(self.first, generation, weights_version)


def generations_of(world: World) -> dict[str, Generation]:
    """In which generation the replicas are, by the product's own code."""
    ledger = _ledger(world)
    return {
        name: generation_of(cast("ReplicaConfig", _Configured(world, first)), ledger)
        for name, first in world.plan.replicas.items()
    }


def policies_of(world: World, generations: Mapping[str, Generation]) -> dict[str, WritePolicy]:
    """The replicas' write policies, by the product's own code."""
    ledger = _ledger(world)
    return {
        name: write_policy_of(cast("ReplicaConfig", _Configured(world, first)), generations[name], ledger)
        for name, first in world.plan.replicas.items()
    }


def _ledger(world: World) -> Ledger | None:
    return msgspec.json.decode(world.ledger.data, type=Ledger) if world.ledger.data else None


def take_over(world: World, daemon: Daemon, replicas: list[Replica], headers: HostHeaders) -> Takeover:
    """Fill a new daemon's cache with what the one before has left, by the product's own code."""
    ledger = _ledger(world)
    if ledger is None:
        return Takeover()

    def find(process: ProcessIdentity) -> Attachment | None:
        found = world.process_of(process)
        return None if found is None or found.dead else Attachment(world, found, daemon)

    with patch.object(takeover, "_peer", find):
        taken = takeover.take_over(ledger, daemon.cache, replicas, headers)
    world.seen["daemon started again"] += 1
    world.seen["host blocks found after a restart"] += taken.blocks
    world.seen["engine found after a restart"] += len(taken.sessions)
    world.seen["workers adopted"] += sum(replica.workers.adopted for replica in replicas)
    return taken
