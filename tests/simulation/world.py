"""One machine with everything on it, made from one seed: the daemon, its workers, engines, memory, network, faults."""

from __future__ import annotations

import hashlib
from collections import Counter

from kvcached.process.identity import ProcessIdentity
from kvcached.recovery.state_file import HostPoolRecord
from kvcached.service.state_writer import StatePlace
from tests.simulation.checks import Tripwire
from tests.simulation.daemon import Daemon
from tests.simulation.engine import Engine
from tests.simulation.faults import Faults
from tests.simulation.managed_device import ManagedSession
from tests.simulation.managed_engine import ManagedEngine
from tests.simulation.memory import DeviceMemory, Holder, Memory
from tests.simulation.network import Network
from tests.simulation.offload_engine import OffloadEngine
from tests.simulation.operators import Operator
from tests.simulation.plan import draw
from tests.simulation.process import Process
from tests.simulation.promises import Renewed
from tests.simulation.restart import KeptLedger, KeptRecord
from tests.simulation.scheduler import MS, Broken, Scheduler
from tests.simulation.sleeping import kept_memories
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
        editions: all that replicas ever were.
        generations: which generation of a namespace has begun for sure, as some engine was told.
        epochs: of pools and namespaces, the last that were seen.
        reboots: whether the machine is restarted now and then; else only the daemon is.
        sleeps: whether device pools are sent to sleep now and then.
        ledger: what the daemon has written down; `record` the same of generations, on the storage device.
        is_kept: the host pool's memory is that of the daemon before.
        seen: what has happened, by name.
        counters: those of daemons that are dead.
        stored: what the storage device holds.
        policies: write policies as people were told them, by replica, or by label of engines in offload mode.
        holders: of sessions on device pools that go on with one of an earlier daemon: who has its rights.
        over: those of sessions that have expired. Nobody goes on with one of them.
        first_names: what leases were called when they were granted, by the daemon's epoch and their id there. A lease
            that is declared to a later daemon gets another id, and keeps the rights that it had.
    """

    def __init__(self, seed: int, *, reboots: bool = False, sleeps: bool = False) -> None:
        self.reboots = reboots
        self.sleeps = sleeps
        self.scheduler = Scheduler(seed)
        self.chance = self.scheduler.chance
        self.seen: Counter[str] = Counter()
        self.tripwire = Tripwire()
        self.plan = draw(self.chance, reboots=reboots, sleeps=sleeps)
        self.shapes = self.plan.shapes
        self.roots: dict[bytes, int] = dict.fromkeys(self.plan.replicas.values(), 0)
        self.renewed: dict[str, Renewed] = {}
        self.holders: dict[Holder, Holder] = {}
        self.over: set[Holder] = set()
        self.first_names: dict[tuple[int, int], str] = {}
        self._granted: dict[tuple[Holder, str], str] = {}
        self.editions: dict[str, set[Renewed]] = {}
        self.generations: Counter[bytes] = Counter()
        self.epochs: dict[str, int] = {}
        self.counters: Counter[str] = Counter()
        self.processes: list[Process] = []
        self.device_memories: dict[int, DeviceMemory] = {}
        self.host = Memory("host pool", self.plan.slabs * self.plan.slab_bytes)
        self.network = Network(self.scheduler, self.seen)
        self.ledger, self.record = KeptLedger(), KeptRecord(self)
        self.is_kept = True
        self._current: dict[bytes, int] = {}
        self._begun: set[tuple[bytes, int]] = set()
        self.state_place = StatePlace(self.ledger, "this boot", self._host_record())
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
        offload = [
            OffloadEngine(self, f"offload{index}", self.chance.among(self.plan.models))
            for index in range(self.plan.offload_engines)
        ]
        return [*managed, *offload]

    def _host_record(self) -> HostPoolRecord:
        return HostPoolRecord(device=1, inode=1, slabs=self.plan.slabs, slab_bytes=self.plan.slab_bytes, allocated={})

    def first_name(self, session: ManagedSession, lease: int) -> str:
        """What a lease on a device pool was called when it was granted."""
        return self.first_names[session.welcome.daemon_epoch, lease]

    def note_granted(self, epoch: int, session: int, lease: int, request: str) -> None:
        """A lease was granted for a request."""
        name = self._granted[self.holder(epoch, session), request] = f"{epoch}/{lease}"
        self.first_names[epoch, lease] = name

    def note_declared(self, epoch: int, session: int, lease: int, request: str) -> None:
        """The lease that an earlier daemon has granted last for a request goes on."""
        self.first_names[epoch, lease] = self._granted[self.holder(epoch, session), request]

    def holder(self, epoch: int, session: int) -> Holder:
        """Who has the rights of a session on a device pool."""
        opened: Holder = ("session", epoch, session)
        return self.holders.get(opened, opened)

    def process_of(self, identity: ProcessIdentity) -> Process | None:
        """The process that is called so."""
        index = identity.pid - _FIRST_PID
        return self.processes[index] if 0 <= index < len(self.processes) else None

    # --- the daemon's death -----------------------------------------------------------------------------------------

    def kill_daemon(self) -> None:
        """SIGKILL the daemon. It is started again some time later; its workers end by themselves, if they can."""
        daemon, chance = self.daemon, self.chance
        self.network.daemon = None
        self.counters += daemon.cache.counters
        self.survival.note(daemon)
        daemon.die()
        for workers in daemon.workers.values():
            workers.orphan()
            for shard in workers.shards:
                shard.process.after(chance.spread(10, 300 * MS), "ends with its daemon", shard.process.kill)
        self.scheduler.after(chance.spread(100 * MS, 1500 * MS), "the daemon is started again", self._start_next_daemon)

    def restart_machine(self) -> None:
        """Everything ends at once but storage, and people. With it the ledger may go, and some of what storage has."""
        chance, seen = self.chance, self.seen
        if not self.daemon.process.dead:
            self.kill_daemon()
        processes = [shard.process for workers in self.daemon.workers.values() for shard in workers.shards]
        processes += [each.process for each in self.daemon.storage.processes]
        processes += [process for engine in self.engines for process in engine.processes]
        for process in processes:
            process.kill()
        self.host.lose()
        self.survival.forget()
        self.is_kept = False
        self._current.clear()
        roots = {root.hex() for root in self.shapes}
        self.epochs = {name: epoch for name, epoch in self.epochs.items() if name not in roots}
        self.policies = {name: policy for name, policy in self.policies.items() if name in self.plan.replicas}
        if chance.happens(0.5):
            seen["machine restarted, and the ledger is gone"] += 1
            self.ledger.remove()
            self.policies.update(dict.fromkeys(self.plan.replicas, self.plan.write_policy))
        if chance.happens(0.15):
            self.stored.empty()
            seen["storage was emptied"] += 1
        if chance.happens(0.15):
            seen["the record of generations is lost"] += 1
            self.record.lose()
        if not self.ledger.data and self.record.is_lost:
            self.renewed.clear()
        seen["machine restarted"] += 1

    def begins(self, root: bytes, generation: int) -> None:
        """A namespace, by its first root, is in a generation: has it left that before, blocks are to have other bytes.

        After the machine's restart a clear that was never answered may not have happened.
        """
        before = self._current.get(root)
        if before == generation:
            return
        told = [each.generation for name, each in self.renewed.items() if self.plan.replicas[name] == root]
        is_back = before is None and generation >= max([self.generations[root], *told])
        if (root, generation) in self._begun and not is_back:
            self.shapes[root].begun[generation] += 1
        self._begun.add((root, generation))
        self._current[root] = generation

    def _start_next_daemon(self) -> None:
        """Whoever could write into memory by the last daemon's order is dead before the next one uses that memory."""
        if not self.daemon.storage.all_dead():
            self.scheduler.after(5 * MS, "the storage process of before is waited for", self._start_next_daemon)
            return
        for workers in self.daemon.workers.values():
            for shard in workers.shards:
                self.seen["worker outlived its daemon"] += not shard.process.dead
                shard.process.kill()
        memories = kept_memories(self, self.daemon) if self.is_kept else {}
        self.daemon = Daemon(self, self.daemon.cache.epoch + _EPOCH, memories)
        self.is_kept = True
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
