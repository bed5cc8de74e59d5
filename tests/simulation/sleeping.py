"""Memory of device pools that comes and goes, and what has to hold at each step of that."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from kvcached.core.slots.states import PoolState
from kvcached.service.replica import HeldMemory
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import engine as wire
from tests.simulation.restart import ledger_of
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.memory import DeviceMemory
    from tests.simulation.world import World

_GIVES_BACK_US: Final = (50, 300 * MS)
_MAKES_US: Final = (1 * MS, 600 * MS)
_FAILS: Final = 0.2


class SimulatedHolder:
    """`PoolHolder`: one replica's memory and workers, as one daemon has them made and ended."""

    def __init__(self, world: World, daemon: Daemon, replica: str) -> None:
        self._world = world
        self._daemon = daemon
        self._replica = replica
        self._free_us = 0  #: when what was asked for before is over
        self.trouble = ""

    def end_workers(self, ended: Callable[[], None]) -> None:
        self._daemon.workers[self._replica].retire(self._daemon.checked(ended))

    def give_back(self, given: Callable[[], None]) -> None:
        def give() -> None:
            workers = self._daemon.workers[self._replica]
            for memory in workers.memories:
                memory.close()
            workers.memories, workers.shards = [], []
            given()

        self._later(_GIVES_BACK_US, "memory is given back", give)

    def make(self, generation: int, made: Callable[[HeldMemory | RequestError], None]) -> None:
        def make() -> None:
            if self._daemon.workers[self._replica].memories:
                raise Broken(f"{self._replica} gets memory, and has some")
            self._world.seen["memory of a pool that wakes"] += 1
            workers = self._daemon.new_workers(self._replica, None, generation)
            self._daemon.workers[self._replica] = workers
            held = HeldMemory(workers, headers=workers.memories[0].headers)
            self._later(_MAKES_US, "workers are there", lambda: made(held))

        def fail() -> None:
            self._world.seen["memory that could not be made"] += 1
            made(request_error(ErrorCode.ASLEEP, "the device is full", "free it"))

        is_failing = not self._world.faults.ceased and self._world.chance.happens(_FAILS)
        self._later(_MAKES_US, "memory is made", fail if is_failing else make)

    def make_when_possible(self, generation: int, made: Callable[[HeldMemory], None]) -> None:
        """Devices are never lost here."""
        raise Broken(f"{self._replica} waits for a device")

    def _later(self, bounds_us: tuple[int, int], what: str, call: Callable[[], None]) -> None:
        """Behind what was asked for before."""
        now_us = self._world.scheduler.now_us
        self._free_us = max(self._free_us, now_us) + self._world.chance.spread(*bounds_us)
        self._daemon.process.after(self._free_us - now_us, f"{self._replica}: {what}", self._daemon.checked(call))


class SleepPromises:
    """What was told of sleep and wake, and what the next daemon finds."""

    def __init__(self, world: World, daemon: Daemon) -> None:
        self._world = world
        self._daemon = daemon

    def answered(self, header: wire.Header) -> None:
        """A reply is about to be sent.

        Raises:
            Broken: it is not so.
        """
        if isinstance(header, wire.Slept):
            for name in header.replicas:
                if self._daemon.workers[name].memories or self._state(name) is not PoolState.ASLEEP:
                    raise Broken(f"{name} is said to be asleep, and is {self._state(name)}, maybe with memory")
        elif isinstance(header, wire.Woken):
            for name in header.replicas:
                if not self._daemon.workers[name].memories or self._state(name) is not PoolState.AWAKE:
                    raise Broken(f"{name} is said to be awake, and is {self._state(name)}, maybe without memory")

    def look(self) -> None:
        """What serves has memory, and the state file says of each pool what a successor has to know.

        Raises:
            Broken: that is not so.
        """
        asleep = asleep_in(self._world)
        for name in self._daemon.cache.pools:
            state, memories = self._state(name), self._daemon.workers[name].memories
            if state in {PoolState.AWAKE, PoolState.FALLING_ASLEEP} and (not memories or name in asleep):
                raise Broken(f"{name} is {state}, without memory, or the state file says that it sleeps")
            if state is PoolState.WAKING and name not in asleep:
                raise Broken(f"{name} is waking, and the state file says that it is awake")
            self._world.seen[f"events with a pool that is {state}"] += state is not PoolState.AWAKE

    def _state(self, name: str) -> PoolState:
        return self._daemon.cache.pools[name].state


def asleep_in(world: World) -> set[str]:
    """Replicas that sleep by what the last daemon has written down."""
    ledger = ledger_of(world)
    return set() if ledger is None else {each.name for each in ledger.replicas if each.asleep}


def kept_memories(world: World, daemon: Daemon) -> dict[str, list[DeviceMemory]]:
    """The memory that the next daemon takes over, by the product's rules: none of a pool that sleeps.

    Raises:
        Broken: a pool is awake by the state file, and its memory is gone, or another one.
    """
    ledger = ledger_of(world)
    if ledger is None:
        return {}
    found: dict[str, list[DeviceMemory]] = {}
    for record in ledger.replicas:
        memories = daemon.workers[record.name].memories
        if record.asleep:
            world.seen["daemon started with a pool asleep"] += 1
            world.seen["memory of a sleeping pool that a dead daemon had not given back"] += bool(memories)
            found[record.name] = []
        elif not memories or memories[0].headers.identity != record.headers:
            raise Broken(f"by the state file {record.name} is awake, and its memory is not there")
        else:
            found[record.name] = memories
    return found
