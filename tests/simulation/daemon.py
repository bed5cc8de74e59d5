"""The daemon of the simulation: the real cache, service and codec, with virtual time and without sockets.

Everything in here goes with the daemon. The memory of the host pool, the processes of engines and what they believe
belong to the `World`, and outlive it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from kvcached.core.cache import Cache
from kvcached.core.messages import Ticked
from kvcached.core.slots.states import SessionState, SlotState
from kvcached.recovery.generations import Generation
from kvcached.server.decoding import decode
from kvcached.service.offload.admission import HostShare
from kvcached.service.pending import Answer
from kvcached.service.replica import Replica
from kvcached.service.service import Service
from kvcached_client.blocks.header import NAMESPACE_BYTES
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId, Verify
from tests.core.model import expand
from tests.simulation.attachment import Attachment, Crew
from tests.simulation.checks import Checks, effect_of_requests
from tests.simulation.line import in_words
from tests.simulation.memory import DeviceMemory, Span
from tests.simulation.network import Connection
from tests.simulation.pin_promises import PinPromises
from tests.simulation.policy_promises import PolicyPromises
from tests.simulation.prefetch_promises import PrefetchPromises
from tests.simulation.promises import Promises
from tests.simulation.restart import generations_of, headers_of, policies_of, take_over
from tests.simulation.scheduler import MS, Broken
from tests.simulation.sleeping import SimulatedHolder, SleepPromises
from tests.simulation.storage_tier import StorageOfDaemon
from tests.simulation.store_wait_promises import StoreWaitPromises
from tests.simulation.virtual_loop import VirtualLoop
from tests.simulation.workers import SimulatedWorkers, WorkerShard

if TYPE_CHECKING:
    from tests.simulation.world import World

HEARTBEAT_INTERVAL_MS: Final = 250
SESSION_TTL_MS: Final = 1000
#: The host pool's descriptor.
HOST_HANDLE: Final = 3
#: Requests whose retries must get the same answer, byte for byte; so must an acquire while its hit is loading.
_KEPT: Final = (
    wire.Hello,
    wire.HelloOffload,
    wire.Rejoin,
    wire.Declare,
    wire.DeclareOver,
    wire.Allocate,
    wire.Commit,
    wire.Release,
    wire.PrepareLoad,
    wire.PrepareStore,
    wire.PrepareStores,
)
_LATE: Final = (
    wire.Load,
    wire.WaitForSlots,
    wire.Pause,
    wire.Drain,
    wire.Clear,
    wire.ClearNamespace,
    wire.SetWeights,
    wire.Prefetch,
    wire.StorageControl,
    wire.Sleep,
    wire.Wake,
)


@dataclass
class _Delivery:
    """A request as it arrived once."""

    request: wire.Request
    connection: Connection
    asked_ms: int
    replies: int = 0


class _Known(NamedTuple):
    """What a request was answered: to which session, and whether a retry has to get the same."""

    session: int | None
    whole: bytes
    is_kept: bool


class Daemon:
    """The real parts, put together as `kvcached.daemon` does it.

    Attributes:
        process: it may be stopped; then messages wait.
        attachments: connections to its attach socket.
        crews: who is behind each session that was ever opened.
        watched: processes whose deaths it is told of.
        unanswered: requests that wait for their reply.
        storage: the tier below the host pool.
    """

    def __init__(self, world: World, epoch: int, memories: Mapping[str, list[DeviceMemory]]) -> None:
        self._world = world
        plan = world.plan
        self.process = world.new_process("daemon")
        self.attachments: dict[Attachment, None] = {}
        self.crews: dict[int, Crew] = {}
        self.watched: dict[Attachment, None] = {}
        self.storage = StorageOfDaemon(world, self)
        self.loop = VirtualLoop(world, self)
        generations, all_generations = generations_of(world, epoch)
        policies = policies_of(world, generations)
        self.workers = {
            name: self.new_workers(name, memories.get(name), generations[name].number) for name in plan.replicas
        }
        self.cache = Cache(
            plan.pool_specs({name: each.namespace for name, each in generations.items()}, policies),
            epoch=epoch,
            session_ttl_ms=SESSION_TTL_MS,
            host_slabs=plan.slabs,
            namespaces_max=plan.spaces,
            host_eviction_policy=plan.eviction_policy,
            pin_quota_percent=plan.pin_quota_percent,
            storage=plan.storage,
            generations=all_generations,
            offload_write_policy=plan.namespaces_policy,
            announces=True,
        )
        replicas = [self._replica(name, generations[name]) for name in plan.replicas]
        self.promises = Promises(self.cache, world.renewed, world.editions)
        self.pins = PinPromises(self.cache, self.now_ms, plan.pin_quota_percent)
        self.prefetches = PrefetchPromises(self.cache)
        self.store_waits = StoreWaitPromises(self.cache)
        self.sleeps = SleepPromises(world, self)
        self.policies = PolicyPromises(self.cache, world.policies, plan.namespaces_policy)
        self.promises.found(replicas)
        headers = headers_of(world.host)
        taken = take_over(world, self, replicas, headers)
        self.service = Service(
            self.cache,
            replicas,
            now_ms=self.now_ms,
            endpoint="ipc:///simulation",
            heartbeat_interval_ms=HEARTBEAT_INTERVAL_MS,
            answers_kept_per_session=1024,
            known_blocks_min=1,
            share=HostShare(HOST_HANDLE, HOST_HANDLE, plan.slabs, plan.slab_bytes, verify=Verify.ALWAYS),
            headers=headers,
            state_place=world.state_place,
            later=self.loop.call_later,
        )
        self.service.watch = self
        self.service.index_changed = self.cache.index_changes.clear  # nobody listens: the checks compare what was told
        self.unanswered: dict[int, _Delivery] = {}
        self._deliveries = 0
        self._answers: dict[tuple[bytes, type[wire.Header], int], _Known] = {}
        self._checks = Checks(world, self)
        self._ticked_ms = 0
        self.service.take_in(taken.shapes, taken.sessions)
        world.survival.look_at(self)
        self._checks.look()
        self.process.after(0, "ticks", self._tick)

    def _replica(self, name: str, generation: Generation) -> Replica:
        plan, first = self._world.plan, self._world.plan.replicas[name]
        return Replica(
            name=name,
            device="cpu",
            model="tiny",
            key_algorithm="blake3",
            layout=plan.layout,
            slots=plan.slots,
            namespace=generation.namespace,
            generation=generation.number,
            workers=self.workers[name],
            holder=SimulatedHolder(self._world, self, name),
            root_of=partial(self._world.root, first),
            weights_version=generation.weights_version,
            header_namespace=first[:NAMESPACE_BYTES],
            host_geometry=self._world.shapes[first].geometry,
            write_policy=plan.write_policy,
            is_kept=self.workers[name].is_kept,
            headers=next((each.headers for each in self.workers[name].memories), None),
        )

    def new_workers(self, name: str, memories: list[DeviceMemory] | None, generation: int) -> SimulatedWorkers:
        """Of a replica, on memory of before or on new memory."""
        plan = self._world.plan
        shape = self._world.shapes[plan.replicas[name]]
        return SimulatedWorkers(self._world, self, name, shape, plan.slots, memories, generation)

    def start(self) -> None:
        """The world knows of it."""
        self.loop.run()
        self.storage.start()

    def die(self) -> None:
        """SIGKILL: what was on its way to it is lost, and its sockets are closed."""
        self.process.kill()
        for attachment in self.attachments:
            attachment.dropped("the daemon is dead")
        self.storage.orphan()

    def now_ms(self) -> int:
        return self._world.scheduler.now_us // MS + 1

    # --- what happens to it -----------------------------------------------------------------------------------------

    def checked(self, action: Callable[[], None]) -> Callable[[], None]:
        """The same, with a look at everything afterwards."""

        def act() -> None:
            action()
            self._checks.look()

        return act

    def look_at_the_end(self) -> None:
        """Everybody has left: nothing is held.

        Raises:
            Broken: something is.
        """
        self._checks.look_at_the_end()

    def is_active(self, session: int, epoch: int) -> bool:
        """Whether a session that the daemon of an epoch has opened is alive for this one at this moment."""
        if epoch != self.cache.epoch or self.process.dead:
            return False
        number = SessionId(session)
        found = self.cache.managed.sessions.get(number) or self.cache.offload.sessions.get(number)
        return found is not None and found.state is SessionState.ACTIVE

    def forget(self, peer: Attachment) -> None:
        """`PeerWatch`, as the attach server does it: who joined sees its connection closed."""
        self.watched.pop(peer, None)
        if peer.joined:
            peer.dropped("no session needs it")

    def watch(self, peer: Attachment) -> None:
        """`PeerWatch`: tell of its death."""
        self.watched[peer] = None

    def see_death(self, peer: Attachment) -> None:
        """A pidfd turned readable."""
        if peer in self.watched:
            self.forget(peer)
            self.service.peer_lost(peer)

    def _tick(self) -> None:
        self.process.after(HEARTBEAT_INTERVAL_MS * MS, "ticks", self._tick)
        now_ms, before = self.now_ms(), self.cache.counters["sessions_expired"]
        late = bool(self._ticked_ms) and now_ms - self._ticked_ms > SESSION_TTL_MS // 2
        self._look_at_waiting(self._ticked_ms)
        self._ticked_ms = now_ms
        self.service.on_event(Ticked(now_ms))
        self.pins.ticked(now_ms)
        expired = self.cache.counters["sessions_expired"] - before
        if late and expired:
            raise Broken(f"{expired} sessions expired at a tick that was late itself")
        self._world.seen["session expired in silence"] += expired
        self._world.seen["late tick"] += late
        self._checks.look()

    def _look_at_waiting(self, ticked_ms: int) -> None:
        """Whoever was overdue at the last tick has its answer, for what was due then has happened since.

        Raises:
            Broken: it has not.
        """
        for delivery in self.unanswered.values():
            request = delivery.request
            if isinstance(request, wire.Prefetch) and delivery.asked_ms + request.deadline_ms < ticked_ms:
                raise Broken(f"past its deadline of {request.deadline_ms} ms nobody has answered {in_words(request)}")

    # --- requests ---------------------------------------------------------------------------------------------------

    def receive(self, connection: Connection, parts: list[bytes]) -> None:
        """A message arrives: decoded, served, and answered at once or later, but once."""
        request, frames = decode(parts)
        key = connection.id, type(request), request.id
        session = self._session_of(connection)
        known = self._answers.get(key)
        repeated = known is not None and known.is_kept and known.session == session is not None
        before = effect_of_requests(self.cache) if repeated else ()
        self._deliveries += 1
        number, delivery = self._deliveries, _Delivery(request, connection, self.now_ms())
        self.unanswered[number] = delivery

        def respond(answer: Answer) -> None:
            delivery.replies += 1
            if delivery.replies > 1 or not getattr(request, "reply", True):
                raise Broken(f"reply {delivery.replies} to {in_words(request)}")
            self.unanswered.pop(number)
            self._answer(connection, request, frames, answer)

        self.promises.asked(request)
        self.service.submit(connection.id, request, frames, respond)
        if repeated and before != effect_of_requests(self.cache):
            raise Broken(f"a retry has an effect: {in_words(request)}: {before}, then {effect_of_requests(self.cache)}")
        self._world.seen["retry of a kept request"] += repeated
        if not getattr(request, "reply", True):
            self.unanswered.pop(number)
        elif not delivery.replies:
            if not isinstance(request, _LATE):
                raise Broken(f"no reply to {in_words(request)}")
            if isinstance(request, wire.Prefetch) and request.stop == "best_effort":
                raise Broken(f"somebody waits who did not want to: {in_words(request)}")
            self._world.seen[f"deferred: {type(request).__name__}"] += 1
        self._checks.look()

    def _session_of(self, connection: Connection) -> int | None:
        group = self.service._groups.of_connection(connection.id)
        return None if group is None else group.session

    def _answer(self, connection: Connection, request: wire.Request, frames: list[bytes], answer: Answer) -> None:
        parts = [wire.encode(answer.header), *answer.frames]
        self.promises.answered(request, answer.header)
        self.pins.answered(request, frames, answer.header)
        self.policies.answered(answer.header)
        self.sleeps.answered(answer.header)
        key, whole = (connection.id, type(request), request.id), b"|".join(parts)
        session, known = self._session_of(connection), self._answers.get(key)
        if known is not None and known.is_kept and known.session == session is not None and known.whole != whole:
            raise Broken(f"a retry of {in_words(request)} gets another answer: {in_words(answer.header)}")
        if known is None or known.whole != whole:
            is_loading = isinstance(answer.header, wire.Acquired) and bool(answer.header.loads)
            self._answers[key] = _Known(session, whole, isinstance(request, _KEPT) or is_loading)
            self._give_rights(connection, request, frames, answer)
        name = type(answer.header).__name__
        if isinstance(answer.header, wire.ErrorReply):
            name = f"refusal: {answer.header.code}"
            self._world.seen[name] += 1
        else:
            self._world.seen[f"verb: {type(request).__name__}"] += 1
        self._world.network.to_client(connection.id, parts, in_words(answer.header))

    def _give_rights(self, connection: Connection, request: wire.Request, frames: list[bytes], answer: Answer) -> None:
        """What this answer gives to somebody, nobody else may have."""
        header, session = answer.header, self._session_of(connection)
        if isinstance(request, wire.Rejoin) and isinstance(header, wire.Welcome):
            group = self.service._groups.of_session(SessionId(header.session))
            members = [] if group is None else cast("list[Attachment]", group.members)
            self.crews[header.session] = Crew([member.process for member in members])
            earlier = self._world.holder(request.daemon_epoch, request.session)
            if earlier in self._world.over:
                raise Broken(
                    f"session {request.session} of epoch {request.daemon_epoch} goes on, though it had expired"
                )
            self._world.holders["session", self.cache.epoch, header.session] = earlier
        elif isinstance(header, wire.Declared) and isinstance(request, wire.Declare) and session is not None:
            self._world.note_declared(self.cache.epoch, session, header.lease, request.request)
            self._take_over_rights(session, header.lease, frames[1], frames[2])
        elif isinstance(header, wire.DeclareEnded) and session is not None:
            self._checks.look_at_returned(self.cache.managed.sessions[SessionId(session)])
        elif isinstance(header, wire.Welcome | wire.WelcomeOffload):
            before = [crew for crew in self.crews.values() if connection.process in crew.processes]
            self._world.seen["session taken over"] += bool(before)
            self.crews[header.session] = Crew([connection.process])
        elif isinstance(header, wire.Acquired) and isinstance(request, wire.Acquire) and session is not None:
            self._world.note_granted(self.cache.epoch, session, header.lease, request.request)
            self._give_device(session, header.lease, answer.frames[1])
        elif isinstance(header, wire.Allocated | wire.Loaded) and isinstance(request, wire.Allocate | wire.Load):
            self._give_device(session, request.lease, answer.frames[0])
        elif isinstance(header, wire.StorePrepared | wire.StoresPrepared) and session is not None:
            granted = header if isinstance(header, wire.StorePrepared) else header.outcomes[0]  # engines offer one
            shape = self._world.shapes[self.cache.offload.sessions[SessionId(session)].namespace.spec.root]
            slots = expand(answer.frames[1])
            self.policies.look_at_offer(session, granted.transfer)
            for shard in range(shape.geometry.shards):
                writers = self.crews[session].shards.setdefault(shard, [])
                holder = "session", self.cache.epoch, session, shard, granted.transfer
                self._world.host.claim(holder, shape.spans(slots, shard), writers)

    def _take_over_rights(self, session: int, lease: int, held: bytes, own: bytes) -> None:
        """A declared lease: what it held it holds. Its own slots it may write as before."""
        pool = self.cache.managed.sessions[SessionId(session)].pool
        for slot in (*expand(held), *expand(own)):
            if pool.state_of(slot) not in {SlotState.LEASED, SlotState.CACHED}:
                raise Broken(f"slot {slot} was declared for lease {lease}, and is {pool.state_of(slot).name}")
        self._give_device(session, lease, own)

    def _shards_of(self, session: int | None) -> list[WorkerShard]:
        """Of the replica that a session is on."""
        held = None if session is None else self.cache.managed.sessions.get(SessionId(session))
        return [] if held is None else self.workers[held.pool.name].shards

    def _give_device(self, session: int | None, lease: int, ranges: bytes) -> None:
        if session is None:
            return
        holder = *self._world.holder(self.cache.epoch, session), self._world.first_names[self.cache.epoch, lease]
        for shard in self._shards_of(session):
            spans: list[Span] = [shard.memory.block(slot) for slot in expand(ranges)]
            shard.memory.claim(holder, spans, self.crews[session].processes)
