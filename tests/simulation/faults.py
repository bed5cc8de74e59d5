"""What goes wrong: processes die, stop and are slow, bits rot, machines sleep, and the network gets better or worse."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.states import SlotState
from kvcached.core.transfers.transfer import EngineTransfer, WorkerTransfer
from tests.core.tier_world import slots_of, solid_slots
from tests.simulation.network import Weather
from tests.simulation.process import Process
from tests.simulation.scheduler import MS
from tests.simulation.stored import DeviceWeather

if TYPE_CHECKING:
    from tests.simulation.workers import WorkerShard
    from tests.simulation.world import World

_BETWEEN_US = (20 * MS, 900 * MS)
#: Shorter than a session's time to live, or longer.
_STOPS_US = ((2 * MS, 200 * MS), (1200 * MS, 3000 * MS), (1200 * MS, 3000 * MS))
#: Between two restarts of the machine.
_RESTARTS_US = (800 * MS, 5000 * MS)


class Faults:
    """Makes faults until told to cease.

    Attributes:
        ceased: there are none any more.
    """

    def __init__(self, world: World) -> None:
        self.ceased = False
        self._world = world
        self._kinds = {
            "engine process killed": self._kill_engine_process,
            "engine process stopped": self._stop_engine_process,
            "engine stopped": self._stop_engine,
            "worker killed": self._kill_worker,
            "worker hangs": self._hang_worker,
            "worker is slow": self._slow_worker,
            "copy fails": self._fail_copy,
            "bit rots": self._rot,
            "machine suspended": self._suspend,
            "daemon stalls": self._stall_daemon,
            "daemon killed": self._kill_daemon,
            "weather changes": self._change_weather,
            "storage killed": self._kill_storage,
            "storage hangs": self._hang_storage,
            "storage weather changes": self._change_storage_weather,
            "stored bit rots": self._rot_stored,
        }

    def begin(self) -> None:
        self._change_weather()
        self._plan_next()
        if self._world.reboots:
            self._plan_restart()

    def cease(self) -> None:
        """No faults from now on: messages get through, what was stopped goes on, workers are as fast as usual."""
        self.ceased = True
        self._world.network.weather = Weather()
        self._world.stored.weather = DeviceWeather()
        for process in self._world.processes:
            process.go_on()
        for workers in self._world.daemon.workers.values():
            for shard in workers.shards:
                shard.slowness, shard.fails_next = 1, False

    def _plan_next(self) -> None:
        world = self._world
        world.scheduler.after(world.chance.spread(*_BETWEEN_US), "a fault is due", self._happen)

    def _plan_restart(self) -> None:
        world = self._world
        world.scheduler.after(world.chance.spread(*_RESTARTS_US), "a restart of the machine is due", self._restart)

    def _restart(self) -> None:
        if not self.ceased:
            self._world.restart_machine()
            self._plan_restart()

    def _happen(self) -> None:
        if self.ceased:
            return
        weights = {name: weight for name, weight in self._world.plan.fault_weights.items() if weight}
        if weights:
            name = self._world.chance.weighted(weights)
            if self._kinds[name]():
                self._world.seen[f"fault: {name}"] += 1
                self._world.scheduler.note(f"fault: {name}")
        self._plan_next()

    # --- engines ----------------------------------------------------------------------------------------------------

    def _some_engine(self) -> list[Process]:
        """Living processes of an engine, mostly of one that is in the middle of a copy."""
        chance = self._world.chance
        engines = [engine for engine in self._world.engines if any(not each.dead for each in engine.processes)]
        busy = [engine for engine in engines if engine.is_copying()]
        if busy and chance.happens(0.7):
            engines = busy
        return [each for each in chance.among(engines).processes if not each.dead] if engines else []

    def _kill_engine_process(self) -> bool:
        if processes := self._some_engine():
            self._world.chance.among(processes).kill()
        return bool(processes)

    def _stop_engine_process(self) -> bool:
        if processes := self._some_engine():
            self._stop([self._world.chance.among(processes)])
        return bool(processes)

    def _stop_engine(self) -> bool:
        if processes := self._some_engine():
            self._stop(processes)
        return bool(processes)

    def _stop(self, processes: list[Process]) -> None:
        """SIGSTOP, and SIGCONT some time later, which is not the same for all of them."""
        chance = self._world.chance
        bounds = chance.among(_STOPS_US)
        for process in processes:
            process.stop()
            self._world.scheduler.after(chance.spread(*bounds), f"{process.name} goes on", process.go_on)
        self._world.scheduler.note(f"stopped: {', '.join(process.name for process in processes)}")

    # --- workers ----------------------------------------------------------------------------------------------------

    def _kill_worker(self) -> bool:
        shard = self._some_shard()
        if shard is not None:
            shard.process.kill()
        return shard is not None

    def _hang_worker(self) -> bool:
        shard = self._some_shard()
        if shard is None:
            return False
        process = shard.process
        process.stop()
        self._world.scheduler.after(
            self._world.chance.spread(900 * MS, 6000 * MS), f"{process.name} goes on", process.go_on
        )
        return not process.dead

    def _slow_worker(self) -> bool:
        shard = self._some_shard()
        if shard is not None:
            shard.slowness = self._world.chance.among([1, 5, 30])
        return shard is not None

    def _fail_copy(self) -> bool:
        shard = self._some_shard()
        if shard is not None:
            shard.fails_next = True
        return shard is not None

    def _some_shard(self) -> WorkerShard | None:
        """Of a replica that does not sleep; None where all do."""
        chance = self._world.chance
        awake = [workers.shards for workers in self._world.daemon.workers.values() if workers.shards]
        return chance.among(chance.among(awake)) if awake else None

    # --- the machine ------------------------------------------------------------------------------------------------

    def _rot(self) -> bool:
        """A bit of a stored block or its header changes, while nobody copies it."""
        world = self._world
        places = [
            (world.shapes[tree.namespace], slot) for tree in world.daemon.cache.trees for slot in self._idle(tree)
        ]
        if not places:
            return False
        shape, slot = world.chance.among(places)
        shard = world.chance.number(0, shape.geometry.shards - 1)
        start, end = world.chance.among([shape.header(slot, shard), shape.block(slot, shard), shape.block(slot, shard)])
        world.host.rot(world.chance.number(start, end - 1))
        return True

    def _idle(self, tree: PrefixTree) -> list[int]:
        """Host slots with blocks that nobody copies."""
        cache, host = self._world.daemon.cache, tree.host
        if host is None:
            return []
        under_way: list[WorkerTransfer | EngineTransfer] = [*cache.transfers.values(), *cache.offload.transfers]
        busy = {slot for copy in under_way if copy.tree is tree for slot in slots_of(copy.host)}
        slots = [slot for run in tree.runs() for slot in solid_slots(run, HOST).values()]
        return [slot for slot in slots if slot not in busy and host.holds(slot, 1, SlotState.CACHED)]

    def _suspend(self) -> bool:
        self._world.scheduler.jump(self._world.chance.spread(300 * MS, 60_000 * MS))
        return True

    def _stall_daemon(self) -> bool:
        process = self._world.daemon.process
        process.stop()
        self._world.scheduler.after(self._world.chance.spread(50 * MS, 3000 * MS), "the daemon goes on", process.go_on)
        return True

    def _kill_daemon(self) -> bool:
        alive = not self._world.daemon.process.dead
        if alive:
            self._world.kill_daemon()
        return alive

    def _change_weather(self) -> bool:
        self._world.network.weather = Weather.drawn(self._world.chance)
        return True

    # --- storage ----------------------------------------------------------------------------------------------------

    def _storage_process(self) -> Process | None:
        living = [each.process for each in self._world.daemon.storage.processes if not each.process.dead]
        return living[-1] if living else None

    def _kill_storage(self) -> bool:
        process = self._storage_process()
        if process is not None:
            process.kill()
        return process is not None

    def _hang_storage(self) -> bool:
        """For less than a call of it may take, or for so long that it is killed."""
        process = self._storage_process()
        if process is None:
            return False
        process.stop()
        delay_us = self._world.chance.spread(100 * MS, 6000 * MS)
        self._world.scheduler.after(delay_us, f"{process.name} goes on", process.go_on)
        return True

    def _change_storage_weather(self) -> bool:
        if self._world.plan.storage is not None:
            self._world.stored.weather = DeviceWeather.drawn(self._world.chance)
        return self._world.plan.storage is not None

    def _rot_stored(self) -> bool:
        return self._world.stored.rot()
