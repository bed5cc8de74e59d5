"""People who pause, drain, clear and set weights at any moment, over a network that loses and doubles messages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from kvcached_client import protocol as wire
from kvcached_client.errors import DaemonFailure, ErrorCode, TransportError
from tests.simulation.line import PATIENCE_US, Line
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

_BETWEEN_US = (100 * MS, 3000 * MS)
#: From a pause or drain to the end of it.
_HOLDS_US = (5 * MS, 700 * MS)
_DEADLINES_MS = (0, 20, 200, 1000)
_WEIGHTS = ("one", "two", "three")


class Operator:
    """Somebody with the command line.

    Attributes:
        left: nothing is asked for any more, and copies and leases are granted again.
    """

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.left = False
        self._world = world
        self._process = world.new_process(name)
        self._line = Line(world, self._process)
        self._is_leaving = False
        self._verbs: dict[Callable[[], Awaitable[None]], float] = {
            self._pause: 4.0,
            self._drain: 2.0,
            self._resume_some: 1.0,
            self._clear: 1.0,
            self._set_weights: 1.0,
        }

    def start(self) -> None:
        """Begin."""
        self._process.start(self._live())

    def finish(self) -> None:
        """End what is paused and drained, and leave."""
        self._is_leaving = True

    async def _live(self) -> None:
        chance = self._world.chance
        while not self._is_leaving:
            await self._process.sleep(chance.spread(*_BETWEEN_US), "thinks")
            try:
                await chance.weighted(self._verbs)()
            except TransportError:
                self._world.seen["operator without an answer"] += 1
            except DaemonFailure as error:
                if error.code not in {ErrorCode.CLEARING, ErrorCode.DRAINING}:
                    raise
        await self._resume("", tries=50)
        self._line.close()
        self.left = True

    def _some_replica(self) -> str:
        return self._world.chance.among(list(self._world.plan.replicas))

    async def _pause(self) -> None:
        replica = self._world.chance.among(["", self._some_replica()])
        deadline_ms = self._world.chance.among(_DEADLINES_MS)
        request = wire.Pause(id=self._line.next_id(), replica=replica, deadline_ms=deadline_ms)
        paused, _ = await self._line.ask(request, wire.Paused, patience_us=PATIENCE_US + deadline_ms * MS)
        self._world.seen["pause with copies under way at its deadline"] += bool(paused.under_way)
        await self._end(replica)

    async def _drain(self) -> None:
        deadline_ms = self._world.chance.among(_DEADLINES_MS)
        request = wire.Drain(id=self._line.next_id(), deadline_ms=deadline_ms)
        drained, _ = await self._line.ask(request, wire.Drained, patience_us=PATIENCE_US + deadline_ms * MS)
        is_through = drained.holds and not (drained.leases or drained.copies or drained.requests)
        self._world.seen["drained"] += is_through
        await self._end("")

    async def _end(self, replica: str) -> None:
        """Mostly."""
        await self._process.sleep(self._world.chance.spread(*_HOLDS_US), "has done what it paused for")
        if self._world.chance.happens(0.9):
            await self._resume(replica)

    async def _resume_some(self) -> None:
        await self._resume(self._world.chance.among(["", self._some_replica()]))

    async def _resume(self, replica: str, tries: int = 8) -> None:
        await self._line.ask(wire.Resume(id=self._line.next_id(), replica=replica), wire.Resumed, tries=tries)

    async def _clear(self) -> None:
        request = wire.ClearReplica(id=self._line.next_id(), replica=self._some_replica())
        await self._line.ask(request, wire.ReplicaCleared, tries=8)

    async def _set_weights(self) -> None:
        version = self._world.chance.among(_WEIGHTS)
        request = wire.SetWeights(id=self._line.next_id(), replica=self._some_replica(), version=version)
        renewed, _ = await self._line.ask(request, wire.ReplicaCleared, tries=8)
        if renewed.weights_version != version:
            raise Broken(f"the weights are {renewed.weights_version!r}, {version!r} was asked for")
