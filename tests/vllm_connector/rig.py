"""Stand-ins for vLLM's scheduler and for the link, by which tests call the scheduler's side as vLLM does."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from kvcached_client.offload import Piece, PreparedLoad, PreparedStore
from kvcached_client.types import LeaseId, TransferId
from kvcached_client.vllm.daemon.commands import (
    Command,
    Connected,
    Event,
    Found,
    Lost,
    NotFound,
    Offer,
    Planned,
    Seek,
    Unplanned,
)
from kvcached_client.vllm.orders import SessionNote, StepOrders
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide

BLOCK = 4
GENERATION = 7
C = TypeVar("C")


def hashes_of(tokens: Sequence[int]) -> list[bytes]:
    """32 bytes for each full block, chained as vLLM's."""
    hashes: list[bytes] = []
    for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
        parent = hashes[-1] if hashes else b"root"
        hashes.append(hashlib.sha256(parent + repr(list(tokens[start : start + BLOCK])).encode()).digest())
    return hashes


class FakeRequest:
    """A request of vLLM's scheduler."""

    def __init__(self, request_id: str, tokens: Iterable[int], *, skip_reading: bool = False) -> None:
        self.request_id = request_id
        self.tokens = list(tokens)
        self.num_prompt_tokens = len(self.tokens)
        self.max_tokens = 16
        self.pooling_params: object | None = None
        self.num_computed_tokens = 0
        self.num_preemptions = 0
        self.skip_reading_prefix_cache = skip_reading
        self.kv_transfer_params: dict[str, Any] | None = None
        self.kv_hints: object | None = None
        self.cache_salt: str | None = None
        self.lora_request: object | None = None
        self.mm_features: list[object] = []
        self.prompt_embeds: object | None = None
        self.block_hashes: list[bytes] = []
        self.append()

    def append(self, *tokens: int) -> None:
        """Tokens of output."""
        self.tokens += tokens
        self.block_hashes += hashes_of(self.tokens)[len(self.block_hashes) :]

    def ask_more(self, *tokens: int) -> None:
        """Tokens of input, which a session may get at any time."""
        self.append(*tokens)
        self.num_prompt_tokens = self.num_tokens

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def all_token_ids(self) -> list[int]:
        return self.tokens

    def keys(self, start: int, stop: int) -> bytes:
        """Of its blocks, as the daemon gets them."""
        return b"".join(each[:16] for each in self.block_hashes[start:stop])


@dataclass(eq=False)
class FakeBlock:
    block_id: int
    block_hash: bytes | None = None


class FakePool:
    """vLLM's blocks, with the users that the connector has counted for each."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [FakeBlock(index) for index in range(blocks)]
        self.held: Counter[int] = Counter()
        self.freed: list[int] = []

    def touch(self, blocks: Sequence[Any]) -> None:
        self.held.update(block.block_id for block in blocks)

    def free_blocks(self, ordered_blocks: Iterable[Any]) -> None:
        for block in ordered_blocks:
            assert self.held[block.block_id] > 0, f"block {block.block_id} was not held"
            self.held[block.block_id] -= 1
            self.freed.append(block.block_id)
        self.held += Counter()


class FakeDaemonThread:
    """A link whose commands wait for the test's answers."""

    def __init__(self) -> None:
        self.is_taking = True
        self.commands: list[Command] = []
        self.events: list[Event] = []
        self.clears: list[float] = []
        self.hurries = 0
        self.clear_works = True
        self.answer_s = 0.0005
        self.waits: list[float] = []
        self.during_wait: Callable[[float], None] = lambda _: None  #: what happens while the scheduler waits

    def submit(self, command: Command) -> bool:
        if isinstance(command, (Seek, Offer)) and not self.is_taking:
            return False
        self.commands.append(command)
        return True

    def hurry(self) -> None:
        self.hurries += 1

    def take(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def wait(self, timeout_s: float) -> bool:
        self.waits.append(timeout_s)
        self.during_wait(timeout_s)
        return bool(self.events)

    def clear(self, timeout_s: float) -> bool:
        self.clears.append(timeout_s)
        return self.clear_works

    def taken(self, kind: type[C]) -> list[C]:
        """Commands of a kind since they were taken last."""
        found: list[C] = [command for command in self.commands if isinstance(command, kind)]
        self.commands = [command for command in self.commands if not isinstance(command, kind)]
        return found


@dataclass
class New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass
class Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass
class HandedOff:
    boundary_state_offloads: dict[str, list[tuple[int, int, int]]]


@dataclass
class FakeStep:
    scheduled_new_reqs: list[New] = field(default_factory=list)
    scheduled_cached_reqs: Cached = field(default_factory=Cached)
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: HandedOff | None = None


class Rig:
    """A scheduler's side between a fake vLLM and a fake link, with a session."""

    def __init__(
        self,
        *,
        shards: int = 1,
        is_connected: bool = True,
        pool_blocks: int = 16_384,
        announces: bool = False,
        chains: Chains | None = None,
    ) -> None:
        self.now = 100.0
        self.link = FakeDaemonThread()
        self.pool = FakePool(pool_blocks)
        self.side = SchedulerSide(
            self.link,
            self.pool,
            chains=chains or Chains(BLOCK),
            shards=shards,
            hold_deadline_s=1.0,
            announces=announces,
            clock=lambda: self.now,
        )
        self.number = 0
        self.tells_tokens = False
        self._lease = 0
        self._transfer = 1000
        self._next_block = 1
        if is_connected:
            self.connect()

    def pass_time(self, seconds: float) -> None:
        """The clock goes on."""
        self.now += seconds

    # --- the daemon's part ------------------------------------------------------------------------------------------

    def connect(self) -> SessionNote:
        self.number += 1
        note = SessionNote(self.number, b"grant")
        self.link.is_taking = True
        self.link.events.append(Connected(note, self.tells_tokens))
        return note

    def lose(self) -> None:
        self.link.events.append(Lost(self.number))

    def found(self, hit: int, *, loadable: bool = True) -> Found:
        """Answer the one seek that waits."""
        (seek,) = self.link.taken(Seek)
        self._lease += 1
        self._transfer += 1
        slots = np.arange(500, 500 + hit, dtype=np.int32)
        load = (
            PreparedLoad(TransferId(self._transfer), GENERATION, slots, 0) if hit and seek.load and loadable else None
        )
        event = Found(seek.ticket, self.number, LeaseId(self._lease), hit, load)
        self.link.events.append(event)
        return event

    def not_found(self) -> None:
        (seek,) = self.link.taken(Seek)
        self.link.events.append(NotFound(seek.ticket))

    def plan(
        self, *, depth: int | None = None, pieces: Sequence[tuple[int, int]] | None = None, offer: Offer | None = None
    ) -> PreparedStore:
        """Answer the one offer that waits, or a given one: by default all of it is wanted."""
        offer = self.link.taken(Offer)[0] if offer is None else offer
        blocks = len(offer.keys) // 16
        wanted = tuple(Piece(*piece) for piece in ([(offer.start, blocks)] if pieces is None else pieces))
        count = sum(piece.blocks for piece in wanted)
        self._transfer += 1
        plan = PreparedStore(
            TransferId(self._transfer if count else 0),
            offer.start + blocks if depth is None else depth,
            GENERATION,
            wanted,
            np.arange(900, 900 + count, dtype=np.int32),
        )
        self.link.events.append(Planned(offer.ticket, plan))
        return plan

    def unplan(self) -> None:
        (offer,) = self.link.taken(Offer)
        self.link.events.append(Unplanned(offer.ticket))

    # --- vLLM's part ------------------------------------------------------------------------------------------------

    def arrive(self, request_id: str, tokens: int, *, skip_reading: bool = False) -> FakeRequest:
        request = FakeRequest(request_id, range(tokens), skip_reading=skip_reading)
        self.side.on_new_request(request)
        return request

    def blocks(self, count: int) -> list[int]:
        """Ids that no other request has."""
        first, self._next_block = self._next_block, self._next_block + count
        return list(range(first, first + count))

    def matched(self, request: FakeRequest, computed: int = 0) -> tuple[int | None, bool]:
        return self.side.matched_tokens(request, computed)

    def start(
        self, request: FakeRequest, computed: int, scheduled: int, *, blocks: list[int] | None = None
    ) -> list[int]:
        """Admit and schedule a request without a load; its blocks."""
        blocks = self.blocks(-(-(computed + scheduled) // BLOCK)) if blocks is None else blocks
        self.side.allocated(request, [blocks], 0)
        self.run_new(request, blocks, computed, scheduled)
        return blocks

    def run_new(self, request: FakeRequest, blocks: list[int], computed: int, scheduled: int) -> StepOrders:
        step = FakeStep(
            scheduled_new_reqs=[New(request.request_id, (list(blocks),), computed)],
            num_scheduled_tokens={request.request_id: scheduled},
        )
        request.num_computed_tokens = computed + scheduled
        return self.side.step(step)

    def run(
        self, request: FakeRequest, scheduled: int, *, added: list[int] | None = None, resumed: bool = False
    ) -> StepOrders:
        """Schedule a request that was scheduled before."""
        cached = Cached(
            [request.request_id],
            {request.request_id} if resumed else set(),
            [None if added is None else (list(added),)],
            [request.num_computed_tokens],
        )
        step = FakeStep(scheduled_cached_reqs=cached, num_scheduled_tokens={request.request_id: scheduled})
        request.num_computed_tokens += scheduled
        return self.side.step(step)

    def idle(self, *, preempted: set[str] | None = None) -> StepOrders:
        """A step that schedules nothing."""
        return self.side.step(FakeStep(preempted_req_ids=preempted))

    def preempt(self, request: FakeRequest) -> None:
        """As in the middle of scheduling: the next step names it."""
        request.num_preemptions += 1
        request.num_computed_tokens = 0

    def finish(self, request: FakeRequest, blocks: list[int]) -> None:
        self.side.finished(request, blocks)

    def report(self, orders: StepOrders, *, workers: int = 1, failed: bool = False) -> None:
        """Workers are through with the stores of a step."""
        done = {order.id: workers for order in orders.stores}
        self.side.stored(done, set(done) if failed else set())

    @property
    def held(self) -> list[int]:
        """Blocks that the connector holds."""
        return sorted(self.pool.held)


def generate(rig: Rig, request: FakeRequest, blocks: int) -> list[int]:
    """A step that fills so many more blocks with output; these."""
    added = rig.blocks(blocks)
    request.append(*range(blocks * BLOCK))
    rig.run(request, blocks * BLOCK, added=added)
    return added


def running(rig: Rig, request_id: str, prompt: int, *, hit: int = 0) -> tuple[FakeRequest, list[int]]:
    """A request with a lease whose prompt is scheduled in the step that was just built."""
    request = rig.arrive(request_id, prompt)
    if prompt > BLOCK:
        rig.found(hit, loadable=False)
        rig.matched(request)
    return request, rig.start(request, 0, prompt)
