"""A service without sockets: fake processes, fake workers, answers in a list."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from kvcached.core.cache import Cache
from kvcached.core.generations import Generations
from kvcached.core.messages import AbandonLoad, HurryTransfer, StartTransfer, TransferKind
from kvcached.core.namespaces import PoolSpec
from kvcached.core.slots.states import SlotState
from kvcached.events.token_book import TokenBook
from kvcached.process.access import Grants
from kvcached.process.identity import ProcessIdentity
from kvcached.service.offload.admission import HostShare
from kvcached.service.pending import Answer
from kvcached.service.replica import HeldMemory, Replica, Settled
from kvcached.service.service import Service
from kvcached.service.state_writer import Headers, StatePlace
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.types import ShardIndex, TransferId, Verify
from tests.access.grants import OWN

LAYOUT = Layout(
    block_size=4, shards=2, groups=(KvGroup(layers=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype="float32"),)
)
SLOTS = 16
EPOCH = 100
#: Eight blocks of a page, with their headers, for each of two shards.
SLAB_BYTES = 2 * 9 * 4096
#: The descriptor of the host pool.
HOST_MEMORY, READ_ONLY_HOST_MEMORY = 77, 78
#: Routing ids as ZeroMQ makes them.
ONE, TWO = b"\0\0\0\0\1", b"\0\0\0\0\2"
R = TypeVar("R", bound=wire.Header)


@dataclass(eq=False)
class FakePeer:
    """A process that dies when told to."""

    pid: int
    dead: bool = False
    identity: ProcessIdentity | None = None
    grants: Grants = OWN
    is_seen: bool = True

    def is_dead(self) -> bool:
        return self.dead

    def close(self) -> None:
        pass

    def is_same_process(self, other: FakePeer) -> bool:
        return self is other or self.pid == other.pid != 0


@dataclass
class FakeWorkers:
    """Workers that hold no memory and copy nothing; a probe fails if told to, a transfer ends when told to."""

    failure: str = ""
    answers: bool = True
    generation: int = 0
    is_degraded: bool = False
    last_loss: str = ""
    restarts: int = 0
    registered: tuple[wire.HostRegistration, ...] = ()
    pending: list[asyncio.Future[None]] = field(default_factory=list)
    probes: list[tuple[int, int]] = field(default_factory=list)
    transfers: dict[TransferId, tuple[StartTransfer, Settled]] = field(default_factory=dict)
    hurried: list[HurryTransfer] = field(default_factory=list)
    abandoned: list[AbandonLoad] = field(default_factory=list)

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        return (1000 + shard, 2000 + shard)

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        self.transfers[transfer.transfer] = (transfer, settled)

    def hurry(self, transfer: HurryTransfer) -> None:
        self.hurried.append(transfer)

    def abandon(self, load: AbandonLoad) -> None:
        self.abandoned.append(load)

    def under_way(self, kind: TransferKind) -> list[TransferId]:
        """Transfers that no shard is through with."""
        return [number for number, (transfer, _) in self.transfers.items() if transfer.kind is kind]

    def end(self, number: TransferId, error: str = "", corrupt: tuple[int, ...] = ()) -> None:
        """Both shards are through with a transfer; the error, or the corrupt blocks, are the second one's."""
        _, settled = self.transfers.pop(number)
        settled(ShardIndex(0), "", ())
        settled(ShardIndex(1), error, corrupt)

    def end_all(self) -> None:
        """Carry out whatever is ordered, and what is ordered then."""
        while self.transfers:
            self.end(next(iter(self.transfers)))

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        self.probes.append((first, second))
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self.failure:
            answer.set_exception(request_error(ErrorCode.WORKER_LOST, self.failure, "see the log"))
        elif self.answers:
            answer.set_result(None)
        self.pending.append(answer)
        return answer

    def unprobed(self) -> str:
        return "" if self.answers else "shard 0 (process 7) waits, or hangs"


@dataclass(eq=False)
class FakeHolder:
    """Memory that comes and goes when told to; what the service waits for, in the order in which it was asked."""

    ended: list[Callable[[], None]] = field(default_factory=list)
    given: list[Callable[[], None]] = field(default_factory=list)
    made: list[Callable[[HeldMemory | RequestError], None]] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    trouble: str = ""

    def end_workers(self, ended: Callable[[], None]) -> None:
        self.ended.append(ended)

    def give_back(self, given: Callable[[], None]) -> None:
        self.given.append(given)

    def make(self, generation: int, made: Callable[[HeldMemory | RequestError], None]) -> None:
        self.made.append(made)
        self.generations.append(generation)

    def make_when_possible(self, generation: int, made: Callable[[HeldMemory], None]) -> None:
        self.make(generation, made)  # type: ignore[arg-type] # it is never told of an error

    def sleep(self) -> None:
        """All that a sleep waits for."""
        self.ended.pop()()
        self.given.pop()()


@dataclass(eq=False)
class FakeTimer:
    """Rings when told to."""

    delay_s: float
    ring: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


class FakeTimers(list[FakeTimer]):
    """All timers that were asked for."""

    def later(self, delay_s: float, call: Callable[[], None]) -> FakeTimer:
        self.append(FakeTimer(delay_s, call))
        return self[-1]


class Office:
    """One service, its cache, and a clock that stands still. With `host_slabs`, a host pool of slabs of 8 blocks.

    With `spaces`, that many namespaces of engines in offload mode may use it. With `announces`, routers are told of
    blocks, with `book` of their tokens, too.
    """

    def __init__(
        self,
        *names: str,
        host_slabs: int = 0,
        spaces: int = 0,
        state_place: StatePlace | None = None,
        headers: Headers | None = None,
        known_blocks_min: int = wire.KNOWN_BLOCKS_MIN,
        has_canonical_storage: bool = False,
        generation: int = 0,
        generations: Generations | None = None,
        announces: bool = False,
        book: TokenBook | None = None,
    ) -> None:
        names = names or ("a",)
        namespace = root_of(generation, "") if generation else b"n" * 32
        self.workers = {name: FakeWorkers() for name in names}
        self.holders = {name: FakeHolder() for name in names}
        self.cache = Cache(
            [
                PoolSpec(name, namespace, 4, SLOTS, shards=LAYOUT.shards, host_slots_per_slab=8 if host_slabs else 0)
                for name in names
            ],
            epoch=EPOCH,
            session_ttl_ms=1000,
            host_slabs=host_slabs,
            namespaces_max=spaces,
            generations=generations,
            announces=announces or book is not None,
        )
        replicas = [
            Replica(
                name=name,
                device="cpu",
                model="tiny",
                key_algorithm="blake3",
                layout=LAYOUT,
                slots=SLOTS,
                namespace=namespace,
                generation=generation,
                workers=self.workers[name],
                holder=self.holders[name],
                header_namespace=b"n" * 16,
                root_of=root_of,
            )
            for name in names
        ]
        self.forgotten: list[FakePeer] = []
        self.watched: list[FakePeer] = []
        self.now_ms = 0
        self.timers = FakeTimers()
        self.service = Service(
            self.cache,
            replicas,
            now_ms=lambda: self.now_ms,
            endpoint="ipc:///nowhere",
            heartbeat_interval_ms=100,
            answers_kept_per_session=16,
            known_blocks_min=known_blocks_min,
            share=HostShare(
                HOST_MEMORY,
                READ_ONLY_HOST_MEMORY,
                host_slabs,
                SLAB_BYTES,
                verify=Verify.ALWAYS,
                has_canonical_storage=has_canonical_storage,
            )
            if spaces
            else None,
            later=self.timers.later,
            headers=headers,
            state_place=state_place,
            book=book,
        )
        self.service.watch = self
        self._request = 0

    def watch(self, peer: FakePeer) -> None:
        self.watched.append(peer)

    def forget(self, peer: FakePeer) -> None:
        self.forgotten.append(peer)

    def count(self, replica: str, state: SlotState) -> int:
        """Slots of a replica's pool in a state."""
        return self.cache.pools[replica].counts[state]

    def next_id(self) -> int:
        self._request += 1
        return self._request

    def ask(self, request: wire.Request, *frames: bytes, peer: bytes = ONE) -> Answer:
        """The one answer to a request."""
        answers: list[Answer] = []
        self.service.submit(peer, request, list(frames), answers.append)
        (answer,) = answers
        assert answer.header.id == request.id
        return answer

    def ask_late(self, request: wire.Request, *, peer: bytes = ONE) -> list[Answer]:
        """The answers to a request that may come later; the list grows when they do."""
        answers: list[Answer] = []
        self.service.submit(peer, request, [], answers.append)
        return answers

    async def health(self) -> wire.HealthReport:
        """The answer to a health request."""
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.service.submit(b"cli", wire.Health(id=1), [], answered.set_result)
        header = (await answered).header
        assert isinstance(header, wire.HealthReport)
        return header

    def expect(self, kind: type[R], request: wire.Request, *frames: bytes, peer: bytes = ONE) -> R:
        """The answer's header, which must be of a type."""
        header = self.ask(request, *frames, peer=peer).header
        assert isinstance(header, kind), header
        return header

    def error(self, request: wire.Request, *frames: bytes, peer: bytes = ONE) -> ErrorCode:
        """The code of the error that a request must get."""
        return self.expect(wire.ErrorReply, request, *frames, peer=peer).code

    def hello(self, process: FakePeer, replica: str = "a", *, layout: str = "", version: int = 1) -> wire.Hello:
        return wire.Hello(
            id=self.next_id(),
            version_min=version,
            version_max=version,
            member=self.service.identify(process).member,
            replica=replica,
            layout=layout,
        )

    def enter(self, process: FakePeer, replica: str = "a", *, peer: bytes = ONE) -> wire.Welcome:
        """A session for a process."""
        return self.expect(wire.Welcome, self.hello(process, replica), peer=peer)

    def acquire(self, keys: bytes, request: str = "r") -> wire.Acquire:
        return wire.Acquire(id=self.next_id(), epoch=EPOCH, request=request, tokens=len(keys) // 4, full=True)

    def store(self, keys: bytes, *, peer: bytes = ONE) -> None:
        """Compute and release a chain."""
        header, (_, ranges) = self.ask(self.acquire(keys, f"store-{self._request}"), keys, peer=peer)
        assert isinstance(header, wire.Acquired)
        release = wire.Release(id=self.next_id(), epoch=EPOCH, lease=header.lease, start=header.hit)
        self.expect(wire.Released, release, keys[16 * header.hit :], ranges, peer=peer)


def root_of(generation: int, weights_version: str) -> bytes:
    """Another namespace for each."""
    return f"{weights_version} {generation}".encode().ljust(32, b"n")


def key_chain(blocks: int, seed: int = 0) -> bytes:
    """Keys that nothing else shares."""
    return b"".join(array("q", (seed, index)).tobytes() for index in range(blocks))
