"""The connector that vLLM loads: each hook calls the scheduler's or the worker's side.

vLLM creates one object in the scheduler's process and one in every worker. They share only what vLLM transports between
them: pages at the start, orders with each step, and reports.
"""

from __future__ import annotations

import logging
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import vllm
from huggingface_hub import try_to_load_from_cache
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec, iter_layer_specs
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.tensors import current_stream
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.vllm.daemon_thread import DaemonThread
from kvcached_client.vllm.identity import Identity, identify
from kvcached_client.vllm.metrics import (
    KvcachedPromMetrics,
    KvcachedStats,
    scheduler_state,
    scheduler_stats,
    worker_stats,
)
from kvcached_client.vllm.orders import StepOrders, StoreId
from kvcached_client.vllm.request_state import BlockPool
from kvcached_client.vllm.scheduler import SchedulerSide
from kvcached_client.vllm.settings import (
    KvCacheConfig,
    Settings,
    VllmConfig,
    check_config,
    is_replicated,
    read_settings,
)
from kvcached_client.vllm.worker import WorkerSide, marks_of

#: vLLM is untyped here.
VllmObject: TypeAlias = Any

#: How long a thread may keep the interpreter lock while others wait for it. vLLM's main threads spin while they wait
#: for each other; with Python's default of 5 ms, the daemon's thread and the copying thread would wait that long.
_SWITCH_INTERVAL_S: Final = 0.0005

log = logging.getLogger("vllm.kvcached")


@dataclass
class KvcachedPages(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's description of its tensors, its first message to the scheduler.

    Attributes:
        blocks: number of blocks.
        block_bytes: bytes of one block, all layers.
        page_bytes: bytes of one block, by layer.
        fingerprint: fingerprint of the order of bytes in a block.
    """

    blocks: int
    block_bytes: int
    page_bytes: tuple[int, ...]
    fingerprint: bytes


@dataclass
class KvcachedOrders(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, from the scheduler to the workers."""

    orders: StepOrders


@dataclass
class KvcachedReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report of a step: how many workers have ended each store, and which stores failed."""

    stored: dict[StoreId, int]
    failed: set[StoreId]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine two workers' reports."""
        return KvcachedReport(dict(Counter(self.stored) + Counter(other.stored)), self.failed | other.failed)


class KvcachedConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's external KV cache in the host pool of a kvcached daemon on the same machine.

    It does not mix in `SupportsHMA`, so vLLM keeps layers with sliding windows in one group with the other layers, and
    computes the same results. State-space models need that mixin, and are not supported.
    """

    _cache_hit_source: Final = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KvCacheConfig) -> None:
        """Check the configuration. The daemon is contacted once the workers have described their tensors.

        Raises:
            ValueError: kvcached cannot be used with this configuration, or `kv_connector_extra_config` is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        sys.setswitchinterval(min(_SWITCH_INTERVAL_S, sys.getswitchinterval()))
        self._settings = read_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        groups = kv_cache_config.kv_cache_groups
        longest = vllm_config.model_config.max_model_len
        keeps_all = len(groups) == 1 and keeps_all_blocks(groups[0].kv_cache_spec, longest)
        check_config(vllm_config, kv_cache_config, keeps_all_blocks=keeps_all)
        self._link = DaemonThread(prefetch=self._settings.prefetch)
        self._scheduler: SchedulerSide | None = None
        self._told: dict[str, float] = {}
        self._pages: EnginePages | None = None
        self._worker: WorkerSide | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: if a store is dropped, a later request misses, but no data is lost."""
        return False

    def shutdown(self) -> None:
        """End the threads and the session. Waits for the copy in progress, within a bounded time."""
        if self._worker is not None:
            self._worker.close()
        self._link.close()

    # --- the worker's side ------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: Mapping[str, VllmObject]) -> None:
        """Accept the worker's tensors, by layer.

        Raises:
            ValueError: the tensors have another number of blocks than vLLM's pool, so block ids have another meaning.
            BadRequest: the tensors are neither on the CPU nor on one CUDA device, or their blocks are not contiguous.
            DeviceError: this process cannot call the CUDA driver.
        """
        pages = EnginePages.of_tensors(kv_caches)
        expected = self._kv_cache_config.num_blocks
        if pages.blocks != expected:
            raise ValueError(
                f"the KV tensors have {pages.blocks} blocks where vLLM counts {expected}: its attention kernels split "
                "blocks; choose a --block-size that they take whole"
            )
        self._pages = pages
        shard, deadline_ms = get_tensor_model_parallel_rank(), self._settings.hold_deadline_ms
        self._worker = WorkerSide(
            lambda grant: OffloadShard.join(grant, shard, pages, deadline_ms=deadline_ms),
            mark=marks_of(pages, current_stream),
        )

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The description of the tensors for the scheduler."""
        pages = self._pages
        if pages is None:
            return None
        page_bytes = tuple(layer.page_bytes for layer in pages.layers)
        return KvcachedPages(pages.blocks, pages.block_bytes, page_bytes, pages.fingerprint)

    def start_load_kv(self, forward_context: VllmObject, **kwargs: VllmObject) -> None:  # noqa: ARG002 - as vLLM calls it
        """Begin the loads and stores of a step. vLLM calls this once per step, even if nothing is computed.

        A step's stores are of blocks that earlier steps have filled, and its loads overwrite blocks that earlier steps
        may still use; vLLM has launched the kernels of these steps by now.
        """
        self._of_worker().begin(self._get_connector_metadata().orders)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: requests are computed after their loads."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: VllmObject, attn_metadata: VllmObject, **kwargs: VllmObject
    ) -> None:
        """Do nothing: blocks are stored once they are full."""

    def wait_for_save(self) -> None:
        """Do nothing: the scheduler's side holds the blocks of stores until the stores are reported."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:  # noqa: ARG002 - as vLLM calls it
        """Requests whose stores (always None: vLLM frees their blocks at once) and whose loads have ended."""
        return None, self._of_worker().take_loaded() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were not loaded correctly. vLLM calls this after `get_finished`."""
        return self._of_worker().take_bad_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """The stores that have ended."""
        report = self._of_worker().take_stored()
        return None if report is None else KvcachedReport(report.done, report.failed)

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Accept vLLM's block pool."""
        self._scheduler = SchedulerSide(
            self._link,
            gpu_block_pool,
            block_size=self._vllm_config.cache_config.block_size,
            shards=self._vllm_config.parallel_config.tensor_parallel_size,
            hold_deadline_s=self._settings.hold_deadline_ms / 1000,
        )

    def set_xfer_handshake_metadata(self, metadata: Mapping[int, KvcachedPages]) -> None:
        """Accept the workers' pages, by rank, and connect to the daemon.

        Raises:
            ValueError: the blocks of the workers differ.
        """
        layout = common_layout(metadata, self._vllm_config)
        identity = identify(
            self._vllm_config,
            self._kv_cache_config,
            vllm_version=vllm.__version__,
            weights_version=self._settings.weights_version,
            environment=os.environ,
            find_snapshot=_find_snapshot,
        )
        for warning in identity.warnings:
            log.warning("kvcached: %s", warning)
        log.info(
            "kvcached: vLLM %s, namespace %r, blocks of %d tokens and %d bytes on each of %d shards",
            vllm.__version__,
            identity.label,
            layout.block_size,
            layout.block_bytes,
            layout.shards,
        )
        self._link.start(_connect_as(identity, layout, self._settings, self._link.wake))

    def on_new_request(self, request: VllmObject) -> None:
        """Accept a request that has arrived."""
        self._of_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: VllmObject, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded after those that vLLM has (None = ask again). Loads are always asynchronous."""
        return self._of_scheduler().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: VllmObject, blocks: VllmObject, num_external_tokens: int) -> None:
        """Order the load into the blocks that a request got."""
        self._of_scheduler().allocated(request, blocks.get_block_ids()[0], num_external_tokens)

    def build_connector_meta(self, scheduler_output: VllmObject) -> KVConnectorMetadata:
        """The orders for the workers of a step."""
        return KvcachedOrders(self._of_scheduler().step(scheduler_output))

    def update_connector_output(self, connector_output: VllmObject) -> None:
        """Accept the workers' reports of a step."""
        scheduler, report = self._of_scheduler(), connector_output.kv_connector_worker_meta
        scheduler.loaded(
            connector_output.finished_recving or (),
            connector_output.failed_recving or (),
            connector_output.invalid_block_ids or (),
        )
        if report is not None:
            scheduler.stored(report.stored, report.failed)

    def request_finished(self, request: VllmObject, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request. vLLM may free its blocks, because blocks of stores are held separately."""
        self._of_scheduler().finished(request, block_ids)
        return False, None

    def has_pending_push_work(self) -> bool:
        """Whether further steps are needed, even empty ones, until all stores have ended."""
        return self._of_scheduler().is_busy

    def has_pending_block_frees(self) -> bool:
        """Whether the end of stores frees blocks, so that vLLM need not preempt a request."""
        return self._of_scheduler().frees_soon

    def reset_cache(self) -> bool:
        """Clear the namespace, so that no engine loads its blocks. False if the clear is not done yet."""
        return self._of_scheduler().reset()

    # --- statistics -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvcachedStats | None:
        """Statistics since the last call; None if nothing has changed.

        vLLM calls this on the scheduler's side once for each step, after it has processed the step's output. It calls
        `update_connector_output` only if there are reports, so this call marks the end of a step.
        """
        if self._worker is not None and self._pages is not None:
            counts = self._worker.take_counts()
            return None if counts is None else worker_stats(counts, self._pages.block_bytes)
        if self._scheduler is None:
            return None
        self._scheduler.step_over()
        skipped, late = self._scheduler.take_skipped(), self._scheduler.take_late()
        state = scheduler_state(
            is_up=self._scheduler.session is not None, prefill_tokens_per_s=self._scheduler.prefill_tokens_per_s
        )
        if state == self._told and not (skipped or late):
            return None
        self._told = state
        return scheduler_stats(state, skipped_blocks=skipped, late_requests=late)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvcachedStats:
        """Statistics from the data of another process."""
        return KvcachedStats(data={} if data is None else data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: Mapping[type, Callable[..., Any]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvcachedPromMetrics:
        """The Prometheus metrics."""
        return KvcachedPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    # --- roles ------------------------------------------------------------------------------------------------------

    def _of_worker(self) -> WorkerSide:
        if self._worker is None:
            raise RuntimeError("vLLM has not registered its KV tensors with this connector")
        return self._worker

    def _of_scheduler(self) -> SchedulerSide:
        if self._scheduler is None:
            raise RuntimeError("vLLM has not bound its block pool to this connector")
        return self._scheduler


def keeps_all_blocks(spec: VllmObject, max_model_len: int) -> bool:
    """Whether vLLM keeps all blocks of a request for each layer of a group: no block leaves a sliding window."""
    return all(
        isinstance(layer, FullAttentionSpec)
        or (isinstance(layer, SlidingWindowSpec) and layer.sliding_window >= max_model_len)
        for layer in iter_layer_specs(spec)
    )


def common_layout(pages: Mapping[int, KvcachedPages], config: VllmConfig) -> OffloadLayout:
    """The layout that is declared to the daemon.

    Raises:
        ValueError: the blocks of the workers differ, or a worker has not described its blocks.
    """
    shards = config.parallel_config.tensor_parallel_size
    if sorted(pages) != list(range(shards)):
        raise ValueError(f"of {shards} workers, ranks {sorted(pages)} have told of their KV tensors")
    kinds = {(each.block_bytes, each.fingerprint) for each in pages.values()}
    if len(kinds) > 1:
        told = ", ".join(
            f"rank {rank}: {each.block_bytes} bytes, {each.fingerprint.hex()}" for rank, each in sorted(pages.items())
        )
        raise ValueError(
            f"the workers' blocks differ ({told}): choose a tensor_parallel_size that divides the model's KV heads"
        )
    block_bytes, fingerprint = kinds.pop()
    return OffloadLayout(
        config.cache_config.block_size, shards, block_bytes, fingerprint, replicated=is_replicated(config)
    )


def _connect_as(
    identity: Identity, layout: OffloadLayout, settings: Settings, on_stale: Callable[[], None]
) -> Callable[[], OffloadClient]:
    instance = new_instance()
    run_dir = Path(settings.run_dir or default_run_dir()).absolute()

    def connect() -> OffloadClient:
        return OffloadClient.connect(
            run_dir,
            engine=f"vllm {vllm.__version__}"[:NAME_LENGTH_MAX],
            instance=instance,
            keyspace=identity.keyspace,
            label=identity.label,
            layout=layout,
            deadline_ms=settings.hold_deadline_ms,
            on_stale=on_stale,
        )

    return connect


def _find_snapshot(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """The directory of a model in the Hugging Face cache."""
    found = try_to_load_from_cache(model, "config.json", cache_dir=download_dir, revision=revision)
    return str(Path(found).parent) if isinstance(found, str) else None
