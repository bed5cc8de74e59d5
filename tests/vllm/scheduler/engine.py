"""vLLM's own scheduler with the connector, and a stand-in for its workers."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, resolve_kv_cache_block_sizes
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from kvcached_client.vllm.messages import KvcachedReport
from kvcached_client.vllm.orders import StepOrders
from tests.vllm.scheduler.model import MAX_TOKENS, OUTDATED, VOCABULARY, Blocks, Layers, Memory, Model

SHARDS = 2
_WAITING_SESSION = RequestStatus.WAITING_FOR_STREAMING_REQ
MAX_RUNNING = 5
STEP_TOKENS = 24
#: How many drafts are right.
RIGHT_GUESSES = 0.7
#: How many requests ask that none of their blocks are stored.
NOT_SHARED = 0.1
_HEADS = {"num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}

init_none_hash(sha256)


def spec_of(layers: Layers) -> KVCacheSpec:
    """What vLLM says of a group of layers."""
    match layers.kind:
        case "full":
            return FullAttentionSpec(block_size=layers.block, **_HEADS)
        case "window":
            return SlidingWindowSpec(block_size=layers.block, sliding_window=layers.reach, **_HEADS)
        case "chunk":
            return ChunkedLocalAttentionSpec(block_size=layers.block, attention_chunk_size=layers.reach, **_HEADS)
        case "state":
            return MambaSpec(
                block_size=layers.block,
                shapes=((4, 4),),
                dtypes=(torch.float32,),
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=int(layers.keeps_middle),
                prefill_checkpoint_alignment=1 if layers.keeps_middle else None,
            )


def config_of(folder: Path, model: Model, blocks: int, *, is_async: bool, policy: str) -> VllmConfig:
    """VLLM's configuration."""
    size = next((each.block for each in model.groups if each.kind == "state"), model.groups[0].block)
    config = VllmConfig(
        model_config=ModelConfig(
            model=str(folder), skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_TOKENS, enforce_eager=True
        ),
        cache_config=CacheConfig(block_size=size, enable_prefix_caching=policy != "priority"),
        parallel_config=ParallelConfig(),
        scheduler_config=SchedulerConfig(
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            max_num_seqs=MAX_RUNNING,
            max_num_batched_tokens=STEP_TOKENS,
            enable_chunked_prefill=True,
            async_scheduling=is_async,
            policy=policy,
        ),
        device_config=DeviceConfig("cpu"),
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvcachedHybridConnector" if model.is_grouped else "KvcachedConnector",
            kv_connector_module_path="kvcached_client.vllm",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={},
        ),
    )
    config.parallel_config.tensor_parallel_size = SHARDS
    config.cache_config.block_size = size
    config.cache_config.num_gpu_blocks = blocks
    config.cache_config.prefix_match_unit = model.match_unit
    config.cache_config.mamba_cache_mode = "align"
    if model.drafts:
        config.speculative_config = SpeculativeConfig(method="ngram", num_speculative_tokens=model.drafts)
    return config


@dataclass
class RunningRequest:
    """What the workers know of a request; `drafts` are the tokens that are guessed to come next."""

    tokens: list[int]
    tables: list[list[int]]
    computed: int
    drafts: list[int] = field(default_factory=list)


@dataclass
class Report:
    """What one worker has to say of a step, beside its tokens."""

    loaded: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
    stored: dict[Any, bool] = field(default_factory=dict)
    computed: int | None = None


class Workers:
    """The workers' part of a step, as vLLM's model runner does it: on all shards at once.

    Args:
        model: what they compute.
        memory: blocks of each shard.
        epoch: the present one.
        instant: called at each instant at which they could be killed.
        rng: guesses wrongly.
    """

    def __init__(
        self,
        model: Model,
        memory: list[Memory],
        *,
        epoch: Callable[[], int],
        instant: Callable[[], None],
        rng: random.Random,
    ) -> None:
        self.model, self.memory, self._epoch, self._instant, self.rng = model, memory, epoch, instant, rng
        self._requests: dict[str, RunningRequest] = {}
        #: The state that a pass keeps behind some of its tokens: behind how many, and in which block of the request.
        self.kept_state: Callable[[int, int, Layers], tuple[int, int]] = lambda *_: (0, -1)
        self._state_at: dict[str, dict[int, int]] = {}  #: index of the block with the state, by request and group

    def compute(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """The tokens that a step samples, for each of its requests."""
        self._accept(output)
        for block in output.new_block_ids_to_zero or ():
            for memory in self.memory:
                memory[block] = [OUTDATED] * len(memory.get(block, "."))
        for copy in output.kv_cache_block_copies or ():
            self._instant()
            for memory in self.memory:
                memory[copy.dst_block_id] = list(memory.get(copy.src_block_id, [OUTDATED]))
        for name, count in output.num_scheduled_tokens.items():
            self._move_states(name, count)
        return {
            name: self._pass(self._requests[name], count, output.scheduled_spec_decode_tokens.get(name, []))
            for name, count in output.num_scheduled_tokens.items()
        }

    def drafts(self, names: Sequence[str]) -> DraftTokenIds:
        """The tokens that are guessed to come next."""
        return DraftTokenIds(list(names), [list(self._requests[name].drafts) for name in names])

    def _accept(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        for name in {*output.finished_req_ids, *(output.preempted_req_ids or ()), *cached.resumed_req_ids}:
            self._state_at.pop(name, None)
        for name in output.finished_req_ids:
            self._requests.pop(name, None)
        for new in output.scheduled_new_reqs:
            tokens = list(new.prefill_token_ids or new.prompt_token_ids)
            tables = [list(table) for table in new.block_ids]
            self._state_at.pop(new.req_id, None)
            self._requests[new.req_id] = RunningRequest(tokens, tables, new.num_computed_tokens)
        for name, added, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True):
            request = self._requests[name]
            if name in cached.resumed_req_ids:
                request.tables = [[] for _ in self.model.groups]
                request.tokens = list(cached.all_token_ids[name])
                request.computed, request.drafts = computed, []
            elif not self.model.drafts:  # with drafts, the scheduler takes those of a step on its way for right
                request.computed = computed
            for table, blocks in zip(request.tables, added or [[]] * len(request.tables), strict=True):
                table.extend(blocks)

    def _move_states(self, name: str, count: int) -> None:
        """Copy states into the blocks in which this step goes on."""
        request = self._requests[name]
        places = self._state_at.setdefault(name, {})
        for group, layers in enumerate(self.model.groups):
            if layers.kind != "state":
                continue
            before = places.get(group, (request.computed - 1) // layers.block)
            places[group] = now = (request.computed + count - 1) // layers.block
            if before not in (-1, now):
                self._instant()
                for shard, memory in enumerate(self.memory):
                    Blocks(self.model, memory, request.tables, shard).move_state(group, before, now)

    def _pass(self, request: RunningRequest, count: int, asked: Sequence[int]) -> list[int]:
        """Compute tokens, of which those at the end are drafts: `asked` for, or -1 for one that was made before."""
        stop = request.computed + count
        known = [*request.drafts, *[0] * len(asked)]
        drafts = [known[place] if draft < 0 else draft for place, draft in enumerate(asked)]
        inputs = [*request.tokens[: stop - len(drafts)], *drafts]
        shards = [Blocks(self.model, memory, request.tables, shard) for shard, memory in enumerate(self.memory)]
        kept = {
            group: self.kept_state(stop, count, layers)
            for group, layers in enumerate(self.model.groups)
            if layers.keeps_middle
        }
        for position in range(request.computed, stop):
            self._instant()
            for blocks in shards:
                blocks.compute(inputs[position], position, stop, self._epoch())
                for group, (tokens, column) in kept.items():
                    if column >= 0 and position + 1 == request.computed + tokens:
                        blocks.keep_state(group, column, stop)
        request.computed = stop - len(drafts)
        if request.computed < len(request.tokens):
            return []
        sampled = [shards[0].sample(request.computed - 1, stop)]
        while len(sampled) <= len(drafts) and sampled[-1] == drafts[len(sampled) - 1]:
            sampled.append(shards[0].sample(request.computed - 1 + len(sampled), stop))
        request.computed += len(sampled) - 1
        request.tokens += sampled
        request.drafts = [
            token if self.rng.random() < RIGHT_GUESSES else self.rng.randrange(VOCABULARY)
            for token in self.model.output(request.tokens, self.model.drafts)
        ]
        return sampled


class Flight:
    """A step on its way."""

    def __init__(self, output: SchedulerOutput) -> None:
        self.output = output
        self.orders: StepOrders = output.kv_connector_metadata.orders
        self.number: int = output.kv_connector_metadata.number


class OwnScheduler:
    """vLLM's scheduler, and what is on its way to the workers; with the interface of `mini_hybrid.MiniHybrid`.

    Attributes:
        depth: how many steps may be on their way.
        outputs: prompt, length and tokens of what was answered, by request.
    """

    def __init__(self, config: VllmConfig, layers: Sequence[Layers], workers: Workers, *, is_async: bool) -> None:
        groups = [KVCacheGroupSpec([f"layer {number}"], spec_of(each)) for number, each in enumerate(layers)]
        cache = KVCacheConfig(config.cache_config.num_gpu_blocks, kv_cache_tensors=[], kv_cache_groups=groups)
        block_size, self.hash_tokens = resolve_kv_cache_block_sizes(cache, config)
        self.scheduler = (AsyncScheduler if is_async else Scheduler)(
            config, cache, StructuredOutputManager(config), block_size, self.hash_tokens
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware = None  # the daemon is there already
        self.manager = self.scheduler.kv_cache_manager
        self.pool = self.manager.block_pool
        self.workers = workers
        workers.kept_state = self._kept_state
        self.depth = config.max_concurrent_batches
        self._tells_drafts = bool(workers.model.drafts) and not is_async
        self.flights: deque[Flight] = deque()
        self.outputs: dict[str, tuple[list[int], int, list[int]]] = {}
        self.preemptions = self.loads_failed = 0
        self._hasher = get_request_block_hasher(self.hash_tokens, sha256)
        self._aggregator = KVOutputAggregator(SHARDS)

    @property
    def memory(self) -> list[Memory]:
        """The blocks of each shard."""
        return self.workers.memory

    @property
    def by_name(self) -> dict[str, Request]:
        """Requests of which vLLM knows."""
        requests: dict[str, Request] = self.scheduler.requests
        return requests

    def add(
        self, name: str, prompt: list[int], wanted: int, *, skip_reading: bool = False, is_session: bool = False
    ) -> None:
        """A request arrives, or further input of a session; without it the session ends with what it has."""
        rng = self.workers.rng
        wishes = {"kv_transfer_params": {"kvcached": {"share": rng.random() >= NOT_SHARED}}}
        sampling = SamplingParams(
            max_tokens=wanted, ignore_eos=True, skip_reading_prefix_cache=skip_reading, extra_args=wishes
        )
        request = Request(name, list(prompt), sampling, None, block_hasher=self._hasher, resumable=is_session)
        request.priority = rng.randrange(3)
        self.scheduler.add_request(request)

    @property
    def sessions(self) -> list[str]:
        """Sessions that wait for further input."""
        return [name for name, request in self.by_name.items() if request.status is _WAITING_SESSION]

    def abort(self, name: str) -> None:
        """Its client has gone."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def abort_if_stuck(self) -> bool:
        """End the request for which vLLM would wait without end, as its client may do; whether there is one.

        A request whose load has failed has no blocks any more, but vLLM (0.32, 0.33) keeps it before requests that hold
        blocks. If these leave it no room, vLLM does not come to them, though their loads are over.
        """
        scheduler, over = self.scheduler, self.scheduler.finished_recving_kv_req_ids
        holding = [request.request_id for request in scheduler.kv_holding_waiting]
        if scheduler.running or not holding or holding[0] in over or not over.intersection(holding):
            return False
        if is_stuck := not any(self.manager.get_block_ids(holding[0])):
            self.abort(holding[0])
        return is_stuck

    def schedule(self) -> None:
        """One step, onto the flights."""
        output = self.scheduler.schedule()
        self.preemptions += len(output.preempted_req_ids or ())
        self.flights.append(Flight(output))

    def update(self, flight: Flight, sampled: dict[str, list[int]], reports: Sequence[Report]) -> set[str]:
        """What a step brought; the requests whose loads are over."""
        names = list(sampled)
        merged = self._aggregator.aggregate(
            [
                ModelRunnerOutput(
                    req_ids=names,
                    req_id_to_index={name: index for index, name in enumerate(names)},
                    sampled_token_ids=list(sampled.values()),
                    kv_connector_output=self._connector_output(rank, report),
                )
                for rank, report in enumerate(reports)
            ]
        )
        living = {name: self.by_name[name] for name in names if name in self.by_name}
        waiting = set(self.sessions)
        self.scheduler.update_from_output(flight.output, merged)
        if self._tells_drafts:
            self.scheduler.update_draft_token_ids(self.workers.drafts(names))
        for name, request in living.items():
            is_over = request.status is RequestStatus.FINISHED_LENGTH_CAPPED
            if is_over or (request.status is _WAITING_SESSION and name not in waiting):
                prompt = list(request.prompt_token_ids)
                answer = f"{name} to {len(prompt)} tokens"
                self.outputs[answer] = (prompt, request.max_tokens, list(request.output_token_ids))
        told = merged.kv_connector_output
        self.loads_failed += len(told.failed_recving) + bool(told.invalid_block_ids)
        return set(told.finished_recving or ())

    def _kept_state(self, stop: int, count: int, layers: Layers) -> tuple[int, int]:
        """As vLLM's attention backends ask."""
        alignment = self.manager.coordinator._cache_hit_alignment_tokens
        told = compute_mamba_prefill_checkpoints(
            [stop], [count], self.hash_tokens, layers.block, 1, drop_eagle_block=False,
            cache_hit_alignment_tokens=alignment,
        )  # fmt: skip
        (tokens,), (column,) = told
        return tokens, column

    def _connector_output(self, rank: int, report: Report) -> KVConnectorOutput:
        meta = None
        if report.stored or report.computed is not None:
            failed = {store for store, has_failed in report.stored.items() if has_failed}
            computed = {} if report.computed is None else {rank: report.computed}
            meta = KvcachedReport(dict.fromkeys(report.stored, 1), failed, computed)
        is_grouped = self.workers.model.is_grouped
        return KVConnectorOutput(
            finished_recving=report.loaded or None,
            failed_recving=report.failed if is_grouped else set(),
            invalid_block_ids=set() if is_grouped else report.bad,
            kv_connector_worker_meta=meta,
        )
