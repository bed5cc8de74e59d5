"""The connector's scheduler side between a vLLM and a daemon that are both made up: requests that decode, step by step.

A request's blocks fill one after the other, those of different requests in different steps, and each full block is
offered, planned, handed to the worker and reported: all that a miss costs the scheduler's thread after its admission.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter_ns
from typing import Any, Final

import numpy as np

from kvcached_client.offload import Piece, PreparedStore
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId, TransferId
from kvcached_client.vllm.daemon.commands import Command, Connected, Event, Found, Offer, Planned, Seek
from kvcached_client.vllm.orders import SessionNote, StoreId
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide

BLOCK_SIZE: Final = 32
_PROMPT_BLOCKS: Final = 8
_HASH_BYTES: Final = 32
#: Blocks that a request may fill, prompt and output.
_BLOCKS_MAX: Final = 1024
_SESSION: Final = 1


@dataclass(slots=True)
class _Request:
    """As much of vLLM's request as the connector reads."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    num_computed_tokens: int
    block_hashes: list[bytes]
    block_ids: list[int]
    max_tokens: int = 16
    pooling_params: object | None = None
    num_preemptions: int = 0
    skip_reading_prefix_cache: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: object | None = None
    all_token_ids: Sequence[int] = ()
    cache_salt: str | None = None
    lora_request: object | None = None
    mm_features: Sequence[object] = ()
    prompt_embeds: object | None = None


@dataclass(frozen=True, slots=True)
class _New:
    req_id: str
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int


@dataclass(frozen=True, slots=True)
class _Cached:
    req_ids: list[str] = field(default_factory=list)
    resumed_req_ids: set[str] = field(default_factory=set)
    new_block_ids: list[tuple[list[int], ...] | None] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Step:
    scheduled_new_reqs: list[_New]
    scheduled_cached_reqs: _Cached
    num_scheduled_tokens: dict[str, int]
    preempted_req_ids: set[str] | None = None
    kv_connector_block_state: None = None


class _Pool:
    """Blocks whose users nobody counts."""

    def __init__(self) -> None:
        self.blocks: Sequence[Any] = range(1 << 20)

    def touch(self, blocks: Sequence[object]) -> None:
        """Nothing."""

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """Nothing."""


class _Link:
    """A daemon that knows nothing, has room for everything, and has always answered by the next step.

    Attributes:
        is_taking: see `LinkPort`.
        answer_s: see `LinkPort`.
        offered_blocks: so far.
    """

    def __init__(self) -> None:
        self.is_taking = True
        self.answer_s = 0.0
        self.offered_blocks = 0
        self._numbers = count(1)
        self._commands: list[Command] = []
        self._events: deque[Event] = deque([Connected(SessionNote(_SESSION, b"grant"))])

    def submit(self, command: Command) -> bool:
        """Take a question; it is answered between steps."""
        self._commands.append(command)
        return True

    def answer(self) -> None:
        """Answer what was asked, as the daemon and the link's thread would."""
        for command in self._commands:
            match command:
                case Seek(ticket=ticket):
                    self._events.append(Found(ticket, _SESSION, LeaseId(next(self._numbers)), 0, None))
                case Offer(ticket=ticket, start=start, keys=keys):
                    blocks = len(keys) // KEY_SIZE_BYTES
                    self.offered_blocks += blocks
                    self._events.append(Planned(ticket, self._plan(start, blocks)))
                case _:
                    pass
        self._commands.clear()

    def _plan(self, start: int, blocks: int) -> PreparedStore:
        slots = np.arange(blocks, dtype=np.int32)
        return PreparedStore(TransferId(next(self._numbers)), start + blocks, 1, (Piece(start, blocks),), slots)

    def hurry(self) -> None:
        """Nothing waits for others."""

    def take(self) -> list[Event]:
        """The answers since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]

    def wait(self, timeout_s: float) -> bool:
        """Nothing comes during a step."""
        del timeout_s
        return False

    def clear(self, timeout_s: float) -> bool:
        """Nothing to clear."""
        del timeout_s
        return True


class SchedulerRig:
    """So many requests that decode for as long as they are asked to.

    Attributes:
        offered_blocks: that the daemon was offered so far.
    """

    def __init__(self, running: int) -> None:
        self._link = _Link()
        self._side = SchedulerSide(self._link, _Pool(), chains=Chains(BLOCK_SIZE), shards=1, hold_deadline_s=1.0)
        self._reports: dict[StoreId, int] = {}
        source = random.Random("scheduler")
        self._hashes = [source.randbytes(_HASH_BYTES) for _ in range(_BLOCKS_MAX)]
        self._next_block = count()
        self._requests = [self._request(number, running) for number in range(running)]
        for request in self._requests:
            self._side.on_new_request(request)
            self._link.answer()
            assert self._side.matched_tokens(request, 0) == (0, False)
            self._side.allocated(request, [request.block_ids], 0)
        self._link.answer()
        self._hooks(self._first_step())
        for _ in range(BLOCK_SIZE):  # until prompts are stored
            self.step_ns()

    @property
    def offered_blocks(self) -> int:
        """See the class."""
        return self._link.offered_blocks

    def step_ns(self) -> int:
        """One more token for every request; nanoseconds in the hooks."""
        step = self._decode_step()
        start = perf_counter_ns()
        self._hooks(step)
        spent_ns = perf_counter_ns() - start
        self._link.answer()
        return spent_ns

    def _hooks(self, step: _Step) -> None:
        """What the connector's hooks do in a step, in vLLM's order."""
        orders = self._side.step(step)
        self._side.loaded((), (), ())
        if self._reports:
            self._side.stored(self._reports, ())
        self._side.take_skipped()
        _ = self._side.is_busy
        self._reports = {order.id: 1 for order in orders.stores}

    def _request(self, number: int, running: int) -> _Request:
        """Its prompt ends at another place in a block than that of the others."""
        tokens = _PROMPT_BLOCKS * BLOCK_SIZE + number * BLOCK_SIZE // running
        blocks = [next(self._next_block) for _ in range(_PROMPT_BLOCKS + 1)]
        return _Request(f"request-{number}", tokens, tokens, 0, self._hashes[:_PROMPT_BLOCKS], blocks)

    def _first_step(self) -> _Step:
        new = [_New(request.request_id, (list(request.block_ids),), 0) for request in self._requests]
        scheduled = {request.request_id: request.num_tokens for request in self._requests}
        for request in self._requests:
            request.num_computed_tokens = request.num_tokens
        return _Step(new, _Cached(), scheduled)

    def _decode_step(self) -> _Step:
        cached = _Cached()
        for request in self._requests:
            request.num_tokens += 1
            blocks = request.num_tokens // BLOCK_SIZE
            if blocks > len(request.block_hashes):
                request.block_hashes.append(self._hashes[blocks - 1])
            added = None
            if request.num_tokens > len(request.block_ids) * BLOCK_SIZE:
                added = ([next(self._next_block)],)
                request.block_ids += added[0]
            cached.req_ids.append(request.request_id)
            cached.new_block_ids.append(added)
            cached.num_computed_tokens.append(request.num_computed_tokens)
            request.num_computed_tokens += 1
        return _Step([], cached, dict.fromkeys(cached.req_ids, 1))
