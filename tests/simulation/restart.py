"""What outlives a daemon and is found by the next one: ledger, pools, and engines that live."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

import msgspec

from kvcached.core.generations import Edition, Generations
from kvcached.memory.header_table import HeaderTable
from kvcached.memory.host_pool import HostHeaders
from kvcached.process.identity import ProcessIdentity
from kvcached.recovery import generations, takeover
from kvcached.recovery.generations import Generation, Record, generation_of, write_policy_of
from kvcached.recovery.state_file import Ledger, LedgerFile
from kvcached.recovery.takeover import Takeover
from kvcached.service.replica import Replica
from kvcached_client.types import WritePolicy
from tests.simulation.attachment import Attachment
from tests.simulation.memory import Memory
from tests.simulation.scheduler import MS

if TYPE_CHECKING:
    from kvcached.config.replica import ReplicaConfig
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World


#: From the order to the device, and from there to whoever waits.
_WRITES_US = (50, 20 * MS)
_HANGS_US = (400 * MS, 8000 * MS)
_HEARD_US = (20, 2 * MS)


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


class KeptRecord:
    """The record of generations on a device that no restart of the machine takes along.

    Attributes:
        record: that it holds; None where there is none.
        is_lost: it was removed, and has not been written again since.
    """

    def __init__(self, world: World) -> None:
        self.record: Record | None = None
        self.is_lost = False
        self._world = world

    def lose(self) -> None:
        """Somebody has removed it."""
        self.record, self.is_lost = None, True

    def write(self, record: Record, done: Callable[[str], None]) -> None:
        """`RecordWriter`: at once where the machine is never restarted; else in a while, and maybe not."""
        world = self._world
        if not world.reboots:
            self.record = record
            done("")
            return
        chance, weather, daemon = world.chance, world.stored.weather, world.daemon
        fails = bool(weather.raises) and chance.happens(weather.raises)
        lands_us = chance.spread(*(_HANGS_US if weather.hangs and chance.happens(weather.hangs) else _WRITES_US))

        def land() -> None:
            if not fails:
                self.record, self.is_lost = record, False
            what = "hears of the record of generations"
            daemon.process.after(
                chance.spread(*_HEARD_US), what, daemon.checked(lambda: done("the device failed" if fails else ""))
            )

        daemon.process.after(lands_us, "writes the record of generations", land)


class _Headers(HostHeaders):
    """The daemon's own view of the host pool, which needs no mapping here, and has nothing behind its end."""

    def __init__(self, host: Memory) -> None:
        self.table = HeaderTable(memoryview(host.bytes))

    def trim(self) -> None:
        """Nothing is there."""


def headers_of(host: Memory) -> HostHeaders:
    """The daemon's own view of the host pool."""
    return _Headers(host)


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


def generations_of(world: World, epoch: int) -> tuple[dict[str, Generation], Generations]:
    """In which generation the replicas are, and all namespaces, by the product's own code."""
    first, editions = generations.first_of(epoch, 0), generations.editions_of(world.record.record, ledger_of(world))
    found = {
        name: generation_of(cast("ReplicaConfig", _Configured(world, root)), editions, first)
        for name, root in world.plan.replicas.items()
    }
    editions |= {each.namespace: Edition(each.number, each.weights_version) for each in found.values()}
    return found, Generations(first + 1, editions)


def policies_of(world: World, generations: Mapping[str, Generation]) -> dict[str, WritePolicy]:
    """The replicas' write policies, by the product's own code."""
    ledger = ledger_of(world)
    return {
        name: write_policy_of(cast("ReplicaConfig", _Configured(world, first)), generations[name], ledger)
        for name, first in world.plan.replicas.items()
    }


def ledger_of(world: World) -> Ledger | None:
    """What the last daemon has written down."""
    return msgspec.json.decode(world.ledger.data, type=Ledger) if world.ledger.data else None


def take_over(world: World, daemon: Daemon, replicas: list[Replica], headers: HostHeaders) -> Takeover:
    """Fill a new daemon's cache with what the one before has left, by the product's own code."""
    ledger = ledger_of(world)
    if ledger is None:
        return Takeover()

    def find(process: ProcessIdentity) -> Attachment | None:
        found = world.process_of(process)
        return None if found is None or found.dead else Attachment(world, found, daemon)

    with patch.object(takeover, "_peer", find):
        taken = takeover.take_over(ledger, daemon.cache, replicas, headers if world.is_kept else None)
    world.seen["daemon started again"] += 1
    world.seen["host blocks found after a restart"] += taken.blocks
    world.seen["engine found after a restart"] += len(taken.sessions)
    world.seen["device pool found after a restart"] += sum(replica.is_kept for replica in replicas)
    return taken
