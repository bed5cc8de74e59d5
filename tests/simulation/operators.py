"""People who pause, drain, clear, set weights and policies, pin, and take storage off and put it back, at any moment.

The network loses and doubles what they say.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Literal

from kvcached_client.errors import DaemonFailure, ErrorCode, RequestError, TransportError
from kvcached_client.keys import KeyChain
from kvcached_client.protocol import engine as wire
from kvcached_client.types import WritePolicy
from tests.core.model import chain_keys
from tests.simulation.line import PATIENCE_US, Line, is_not_written_down
from tests.simulation.managed_engine import ManagedEngine
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

_BETWEEN_US = (100 * MS, 3000 * MS)
#: From a pause or drain to the end of it.
_HOLDS_US = (5 * MS, 700 * MS)
#: From the end of an engine to the request for sleep: the daemon may not have seen the death yet.
_DEATH_SEEN_US = (1 * MS, 100 * MS)
_SLEEP_DEADLINES_MS = (0, 50, 2000)
_DEADLINES_MS = (0, 20, 200, 1000)
_WEIGHTS = ("one", "two", "three")
_STORAGE_PATIENCE_US = 1000 * MS
_TTLS_MS = (20, 300, 1500, 4000)
#: A namespace that no engine has declared, or that was forgotten; a pin over the quota; storage that is not there.
_REFUSALS = frozenset(
    {
        ErrorCode.CLEARING,
        ErrorCode.DRAINING,
        ErrorCode.UNKNOWN_REPLICA,
        ErrorCode.LIMIT,
        ErrorCode.BAD_VALUE,
        ErrorCode.POOL_BUSY,
        ErrorCode.ASLEEP,
        ErrorCode.REQUEST_CONFLICT,
    }
)


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
            self._clear: 4.0 if world.reboots else 1.0,
            self._set_weights: 4.0 if world.reboots else 1.0,
            self._set_policy: 2.0,
            self._pin: 4.0,
            self._unpin: 1.0,
            self._change_storage: 1.5,
        }
        if world.sleeps:
            self._verbs[self._sleep] = 8.0
        self._pinned: list[tuple[str, bytes]] = []

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
            except RequestError as error:
                if error.code not in _REFUSALS and not is_not_written_down(error):
                    raise
        await self._resume("", tries=50)
        await self._put_storage_back()
        if self._world.sleeps:
            await self._wake_all()
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
        is_any = self._world.reboots  # runs that are there for clears
        target = self._some_target() if is_any else self._some_replica()
        request = wire.ClearNamespace(id=self._line.next_id(), target=target)
        cleared, _ = await self._line.ask(request, wire.NamespaceCleared, tries=8)
        if not cleared.replicas:
            begun = self._world.generations
            begun[cleared.namespace] = max(begun[cleared.namespace], cleared.generation)
            self._world.seen["namespace of engines cleared by people"] += 1

    async def _set_weights(self) -> None:
        version = self._world.chance.among(_WEIGHTS)
        request = wire.SetWeights(id=self._line.next_id(), target=self._some_replica(), version=version)
        renewed, _ = await self._line.ask(request, wire.NamespaceCleared, tries=8)
        if renewed.weights_version != version:
            raise Broken(f"the weights are {renewed.weights_version!r}, {version!r} was asked for")

    # --- sleep ------------------------------------------------------------------------------------------------------

    async def _sleep(self) -> None:
        """End the engine of a replica, give its memory back for a while, and mostly wake it."""
        replica = self._some_replica()
        for engine in self._world.engines:
            if isinstance(engine, ManagedEngine) and engine.replica == replica:
                for process in engine.processes:
                    process.kill()
        await self._process.sleep(self._world.chance.spread(*_DEATH_SEEN_US), "has ended an engine")
        deadline_ms = self._world.chance.among(_SLEEP_DEADLINES_MS)
        request = wire.Sleep(id=self._line.next_id(), target=replica, deadline_ms=deadline_ms)
        await self._line.ask(request, wire.Slept, tries=3, patience_us=PATIENCE_US + deadline_ms * MS)
        await self._process.sleep(self._world.chance.spread(*_HOLDS_US), "uses the device for something else")
        if self._world.chance.happens(0.9):
            await self._wake(replica)

    async def _wake(self, replica: str) -> None:
        await self._line.ask(wire.Wake(id=self._line.next_id(), target=replica), wire.Woken, tries=8)

    async def _wake_all(self) -> None:
        """What another one has sent to sleep as well."""
        waiting = list(self._world.plan.replicas)
        while waiting:
            try:
                await self._wake(waiting[-1])
                waiting.pop()
            except RequestError as error:
                if error.code not in {ErrorCode.ASLEEP, ErrorCode.REQUEST_CONFLICT}:
                    raise
                await self._process.sleep(200 * MS, "tries to wake it again")

    # --- policies and pins ------------------------------------------------------------------------------------------

    def _some_target(self) -> str:
        """A replica, or what engines in offload mode call their namespace."""
        return self._world.chance.among([self._some_replica(), self._world.chance.among(self._world.plan.models).label])

    async def _set_policy(self) -> None:
        target, policy = self._some_target(), self._world.chance.among(list(WritePolicy))
        request = wire.SetPolicy(id=self._line.next_id(), target=target, policy=policy)
        told, _ = await self._line.ask(request, wire.PolicySet)
        if told.policy is not policy:
            raise Broken(f"the policy of {target} is {told.policy}, {policy} was asked for")

    async def _pin(self) -> None:
        """A prefix that engines use, at times one more time."""
        chance = self._world.chance
        target = self._some_target()
        keys = self._keys(target)
        if self._pinned and chance.happens(0.3):
            target, keys = chance.among(self._pinned)
        self._pinned.append((target, keys))
        request = wire.Pin(id=self._line.next_id(), target=target, ttl_ms=chance.among(_TTLS_MS))
        pinned, _ = await self._line.ask(request, wire.Pinned, (keys,))
        self._world.seen["pinned blocks"] += pinned.device + pinned.host

    async def _unpin(self) -> None:
        if self._pinned:
            target, keys = self._pinned.pop()
            request = wire.Unpin(id=self._line.next_id(), target=target)
            unpinned, _ = await self._line.ask(request, wire.Unpinned, (keys,))
            self._world.seen["unpinned"] += unpinned.was_pinned

    def _keys(self, target: str) -> bytes:
        """Of a prompt as engines have them there: its beginning, or all of it."""
        plan, symbols = self._world.plan, self._world.some_symbols()
        symbols = symbols[: self._world.chance.number(1, len(symbols))]
        model = next((each for each in plan.models if each.label == target), None)
        if model is not None:
            return b"".join(chain_keys((model.number, *symbols)))
        size = plan.layout.block_size
        namespace = self._world.daemon.cache.tree_of(target).namespace
        return KeyChain(namespace, size, [symbol for symbol in symbols for _ in range(size)]).keys

    # --- storage ----------------------------------------------------------------------------------------------------

    async def _change_storage(self) -> None:
        """Take it off for a while, or have it forget everything."""
        actions: list[Literal["status", "detach", "clear"]] = ["status", "detach", "detach", "clear"]
        action = self._world.chance.among(actions)
        await self._control(action, tries=3)
        if action == "detach":
            await self._process.sleep(self._world.chance.spread(*_HOLDS_US), "has replaced the device")
            await self._control("attach", tries=8)

    async def _put_storage_back(self) -> None:
        if self._world.plan.storage is not None:
            await self._control("attach", tries=50)

    async def _control(self, action: Literal["status", "attach", "detach", "clear"], tries: int) -> None:
        request = wire.StorageControl(id=self._line.next_id(), action=action)
        try:
            await self._line.ask(request, wire.StorageReport, tries=tries, patience_us=_STORAGE_PATIENCE_US)
        except DaemonFailure as error:
            if action != "clear" or error.code != ErrorCode.INTERNAL:
                raise
            self._world.seen["storage that could not be cleared"] += 1
