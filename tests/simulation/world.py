"""One machine with everything on it, made from one seed: the daemon, its workers, engines, memory, network, faults."""

from __future__ import annotations

import hashlib
from collections import Counter

from kvcached.books import Shelf
from kvcached.ledger import HostPoolRecord, ProcessIdentity
from tests.simulation.attached_engine import AttachedEngine
from tests.simulation.checks import Tripwire
from tests.simulation.daemon import Daemon
from tests.simulation.engine import Engine
from tests.simulation.faults import Faults
from tests.simulation.managed_engine import ManagedEngine
from tests.simulation.memory import DeviceMemory, Memory
from tests.simulation.network import Network
from tests.simulation.operators import Operator
from tests.simulation.plan import draw
from tests.simulation.process import Process
from tests.simulation.promises import Renewed
from tests.simulation.restart import KeptLedger
from tests.simulation.scheduler import MS, Broken, Scheduler
from tests.simulation.stored import StoredValues
from tests.simulation.survival import Survival

#: From the end of all faults to the last engine's goodbye.
LIVENESS_US = 120_000 * MS
#: After that, for what is on its way: messages, copies, deaths that nobody has seen yet, workers that are restarted.
AFTERWARDS_US = 8_000 * MS
#: Of the first daemon; each later one has as much more.
_EPOCH = 1000
_FIRST_PID = 1000
#: How long prompts are about one thing.
_TOPIC_US = 1500 * MS


class World:
    """Everything that outlives the daemon, and the daemon.

    Attributes:
        host: the host pool's memory.
        shapes: how each namespace lies in it, by root.
        roots: namespaces of replicas, with their generations.
        renewed: what was told of replicas that were cleared or got other weights.
        generations: which generation of a namespace has begun for sure, as some engine was told.
        epochs: of pools and namespaces, the last that were seen.
        ledger: what the daemon has written down.
        seen: what has happened, by name.
        counters: those of daemons that are dead.
        stored: what the storage device holds.
        policies: write policies as people were told them, by replica, or by label of engines in attached mode.
    """

    def __init__(self, seed: int) -> None:
        self.scheduler = Scheduler(seed)
        self.chance = self.scheduler.chance
        self.seen: Counter[str] = Counter()
        self.tripwire = Tripwire()
        self.plan = draw(self.chance)
        self.shapes = self.plan.shapes
        self.roots: dict[bytes, int] = dict.fromkeys(self.plan.replicas.values(), 0)
        self.renewed: dict[str, Renewed] = {}
        self.generations: Counter[bytes] = Counter()
        self.epochs: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.device_memories: dict[int, DeviceMemory] = {}
        self.host = Memory("host pool", self.plan.slabs * self.plan.slab_bytes)
        self.network = Network(self.scheduler, self.seen)
        self.ledger = KeptLedger()
        self.shelf = Shelf(self.ledger, "this boot", self._host_record())
        self.stored = StoredValues(self.chance, self.seen)
        self.policies = dict.fromkeys(self.plan.replicas, self.plan.write_policy)
        self.survival = Survival(self)
        self.faults = Faults(self)
        self.daemon = Daemon(self, _EPOCH, {})
        self.network.daemon = self.daemon
        self.engines = self._engines()
        self.operators = [Operator(self, f"operator{index}") for index in range(self.plan.operators)]

    def _engines(self) -> list[Engine]:
        names = [*self.plan.replicas, *(["a"] if self.plan.rival else [])]
        managed = [ManagedEngine(self, f"managed{index}", name) for index, name in enumerate(names)]
        attached = [
            AttachedEngine(self, f"attached{index}", self.chance.among(self.plan.models))
            for index in range(self.plan.attached_engines)
        ]
        return [*managed, *attached]

    def _host_record(self) -> HostPoolRecord:
        return HostPoolRecord(device=1, inode=1, slabs=self.plan.slabs, slab_bytes=self.plan.slab_bytes, lent={})

    def process_of(self, identity: ProcessIdentity) -> Process | None:
        """The process that is called so."""
        index = identity.pid - _FIRST_PID
        return self.processes[index] if 0 <= index < len(self.processes) else None

    # --- the daemon's death -----------------------------------------------------------------------------------------

    def kill_daemon(self, *, workers_survive: bool) -> None:
        """SIGKILL the daemon. It is started again some time later; its workers wait for that, or die, too."""
        daemon, chance = self.daemon, self.chance
        self.network.daemon = None
        self.counters += daemon.cache.counters
        self.survival.note(daemon)
        daemon.die()
        for workers in daemon.workers.values():
            workers.orphan()
            for shard in workers.shards:
                if not workers_survive:
                    self.scheduler.after(chance.spread(10, 50 * MS), f"{shard.process.name} ends", shard.process.kill)
        self.scheduler.after(chance.spread(100 * MS, 1500 * MS), "the daemon is started again", self._adopt_workers)

    def _adopt_workers(self) -> None:
        """Workers of before are adopted once they copy nothing. One that does not answer is killed with its fellows.

        The storage process of before is dead before anything else.
        """
        if not self.daemon.storage.all_dead():
            self.scheduler.after(5 * MS, "the storage process of before is waited for", self._adopt_workers)
            return
        groups = {name: workers.shards for name, workers in self.daemon.workers.items()}
        busy = [each for shards in groups.values() for each in shards if each.busy and not each.process.dead]
        if busy and not any(shard.process.stopped for shard in busy):
            self.scheduler.after(5 * MS, "workers are waited for", self._adopt_workers)
            return
        adopted = {}
        for name, shards in groups.items():
            if all(not shard.process.dead and not shard.process.stopped for shard in shards):
                adopted[name] = shards
            else:
                for shard in shards:
                    shard.process.kill()
        self.daemon = Daemon(self, self.daemon.cache.epoch + _EPOCH, adopted)
        self.daemon.start()
        self.network.daemon = self.daemon
        self.network.reconnect()

    def root(self, first: bytes, generation: int, weights_version: str) -> bytes:
        """The namespace of replicas whose first one that was, at a generation, with a version of weights."""
        if not generation and not weights_version:
            return first
        root = hashlib.blake2b(first + f"{generation} {weights_version}".encode(), digest_size=32).digest()
        self.shapes[root], self.roots[root] = self.shapes[first], generation
        return root

    # --- making things ----------------------------------------------------------------------------------------------

    def new_process(self, name: str) -> Process:
        process = Process(self.scheduler, name, _FIRST_PID + len(self.processes))
        self.processes.append(process)
        return process

    def new_device_memory(self, name: str, slots: int, block_bytes: int) -> DeviceMemory:
        handle = 10 + len(self.device_memories)
        memory = self.device_memories[handle] = DeviceMemory(name, handle, slots, block_bytes)
        return memory

    def some_symbols(self) -> list[int]:
        """What a prompt is about: long enough to need room, alike enough to be shared. A block each."""
        chance = self.chance
        topic = self.scheduler.now_us // _TOPIC_US % self.plan.topics
        parts = (int(chance.happens(self.plan.diversity)) for _ in range(chance.number(0, 8)))
        return [topic, *parts, chance.number(0, 2)]

    # --- phases -----------------------------------------------------------------------------------------------------

    def safety(self, steps: int) -> None:
        """Whatever fails, nothing is wrong at any moment.

        Raises:
            Broken: something is.
        """
        self.daemon.start()
        for engine in self.engines:
            self.scheduler.after(self.chance.spread(1, 300 * MS), f"{engine.name} is started", engine.start)
        for operator in self.operators:
            operator.start()
        self.faults.begin()
        while self.scheduler.count < steps:
            self.scheduler.step()

    def liveness(self) -> None:
        """Faults cease: every engine gets done with its requests and leaves, and nothing is held then.

        Raises:
            Broken: somebody is not done in time, or something is left.
        """
        self.scheduler.note("faults cease")
        self.faults.cease()
        everybody: list[Engine | Operator] = [*self.engines, *self.operators]
        for each in everybody:
            each.finish()
        end_us = self.scheduler.now_us + LIVENESS_US
        while not all(each.left for each in everybody):
            self.scheduler.step()
            if self.scheduler.now_us > end_us:
                late = [each.name for each in everybody if not each.left]
                raise Broken(f"{LIVENESS_US // MS} ms after the last fault {late} are not done")
        end_us = self.scheduler.now_us + AFTERWARDS_US
        while self.scheduler.now_us < end_us or (any(self.daemon.storage.left().values()) and self._has_time(end_us)):
            self.scheduler.step()
        self.daemon.look_at_the_end()
        for workers in self.daemon.workers.values():
            if workers.busy:
                raise Broken("workers are not done, though nobody asks anything of them")

    def _has_time(self, end_us: int) -> bool:
        """For a last copy to storage that was begun late."""
        return self.scheduler.now_us < end_us + AFTERWARDS_US
