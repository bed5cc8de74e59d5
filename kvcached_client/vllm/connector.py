"""The connector that vLLM loads: each hook calls the scheduler's or the worker's side.

vLLM creates one object in the scheduler's process and one in every worker. They share only what vLLM transports between
them: pages at the start, orders with each step, and reports.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from importlib.metadata import version
from typing import Any, Final

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.copy_process.shards import Shards
from kvcached_client.engines.weights import WeightReader, default_notes_folder, find_snapshot
from kvcached_client.tensors import OtherMemory, current_device, current_stream
from kvcached_client.vllm.cache_events import cache_events, publishes_events
from kvcached_client.vllm.computed_steps import ComputedSteps, steps_of
from kvcached_client.vllm.daemon.connect import common_layout, connect_as, log, own_shard
from kvcached_client.vllm.daemon.thread import DaemonThread
from kvcached_client.vllm.device_memory import RankMemory, own_device, pool_question
from kvcached_client.vllm.device_table import DeviceTable, Engine, KnownIdentity, open_table
from kvcached_client.vllm.groups import canonical_of, check_groups, described, keeps_all_blocks, looks_ahead, tensors_of
from kvcached_client.vllm.identity import EngineDescription
from kvcached_client.vllm.messages import KvcachedOrders, KvcachedPages, KvcachedReport
from kvcached_client.vllm.metrics import (
    KvcachedPromMetrics,
    KvcachedStats,
    scheduler_state,
    scheduler_stats,
    worker_stats,
)
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.request_state import BlockPool
from kvcached_client.vllm.scheduling.scheduler import SchedulerSide
from kvcached_client.vllm.settings import (
    SWITCH_INTERVAL_S,
    KvCacheConfig,
    VllmConfig,
    VllmObject,
    check_config,
    check_device_memory,
    embeddings_warning,
    read_settings,
    shards_of,
)
from kvcached_client.vllm.worker import WorkerSide


class KvcachedConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """vLLM's external KV cache in the host pool of a kvcached daemon on the same machine.

    It does not mix in `SupportsHMA`, so vLLM keeps layers with sliding windows in one group with the other layers, and
    computes the same results. `KvcachedHybridConnector` does.
    """

    #: Whether the connector takes several groups of layers, and groups that do not keep all blocks.
    _takes_groups = False

    _cache_hit_source: Final = CacheHitSource.HOST

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KvCacheConfig) -> None:
        """Check the configuration. The daemon is contacted once the workers have described their tensors.

        Raises:
            ValueError: kvcached cannot be used with this configuration, or `kv_connector_extra_config` is wrong.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        sys.setswitchinterval(min(SWITCH_INTERVAL_S, sys.getswitchinterval()))
        transfer = vllm_config.kv_transfer_config
        self._settings = read_settings(transfer.kv_connector_extra_config, transfer.kv_role)
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        keeps_all = len(specs) == 1 and keeps_all_blocks(specs[0], vllm_config.model_config.max_model_len)
        self._is_grouped = self._takes_groups and not keeps_all
        check_config(
            vllm_config, kv_cache_config, keeps_all_blocks=keeps_all, looks_ahead=looks_ahead(specs),
            takes_groups=self._takes_groups, tells_of_sleep=hasattr(KVConnectorBase_V1, "unregister_kv_caches"),
        )  # fmt: skip
        if self._is_grouped:
            check_groups(specs)
        if self._settings.device_memory == "daemon":
            check_device_memory(vllm_config)
        self._link = DaemonThread(prefetch=self._settings.prefetch)
        self._ending = threading.Event()
        self._is_described = False
        self._scheduler: SchedulerSide | None = None
        self._told: dict[str, float] = {}
        self._pages: EnginePages | None = None
        self._worker: WorkerSide | None = None
        self._memory: RankMemory | None = None
        self._steps = ComputedSteps()
        self._step_number = 0
        self._device: DeviceTable | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """False: if a store is dropped, a later request misses, but no data is lost."""
        return False

    def shutdown(self) -> None:
        """End the threads and the session. Waits for the copy in progress, within a bounded time."""
        self._ending.set()
        if self._worker is not None:
            self._worker.close()
        self._link.close()

    # --- the worker's side ------------------------------------------------------------------------------------------

    def get_mem_pool_context(self) -> AbstractContextManager[object] | None:
        """Where vLLM allocates its KV cache: in memory of the daemon, if that is wanted."""
        if self._settings.device_memory != "daemon":
            return None
        kind, rank = self._vllm_config.device_config.device_type, own_shard(self._vllm_config)
        question = pool_question(self._vllm_config, self._kv_cache_config, rank, own_device(kind, current_device))
        self._memory = RankMemory(question, self._settings)
        return OtherMemory(self._memory.allocate, kind)

    def register_kv_caches(self, kv_caches: Mapping[str, VllmObject]) -> None:
        """Accept the worker's tensors, by layer.

        Raises:
            ValueError: the tensors have another number of blocks than vLLM's pool, so block ids have another meaning.
            BadRequest: the tensors are neither on the CPU nor on one CUDA device, or their blocks are not contiguous.
            DeviceError: this process cannot call the CUDA driver.
        """
        pages = EnginePages.of_tensors(
            tensors_of(kv_caches, self._vllm_config), expected := self._kv_cache_config.num_blocks
        )
        if pages.blocks != expected:
            raise ValueError(
                f"the KV tensors have {pages.blocks} blocks where vLLM counts {expected}, which is no whole number of "
                "rows for each: choose another attention backend"
            )
        self._pages = pages
        shards = Shards(
            pages, own_shard(self._vllm_config), current_stream, log=log,
            deadline_ms=self._settings.hold_deadline_ms,
            in_process=self._settings.copies == "process",
            memory=None if self._memory is None else self._memory.of_copies([layer.address for layer in pages.layers]),
        )  # fmt: skip
        self._worker = WorkerSide(shards)
        if self._memory is not None:
            self._steps = steps_of(pages, current_stream)

    def unregister_kv_caches(self) -> None:
        """Copy nothing more: vLLM takes the tensors' memory away, to sleep.

        Raises:
            RuntimeError: a copy does not end.
        """
        self._of_worker().fall_asleep()

    def restore_kv_caches(self) -> None:
        """Copy again: the tensors' memory is back, where it was."""
        self._of_worker().wake_up()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """The description of the tensors for the scheduler."""
        pages = self._pages
        if pages is None:
            return None
        page_bytes = tuple(layer.page_bytes for layer in pages.layers)
        pool_id = b"" if self._memory is None else self._memory.pool_id([layer.address for layer in pages.layers])
        canonical = canonical_of(pages, self._vllm_config, self._kv_cache_config)
        return KvcachedPages(pages.blocks, pages.block_bytes, page_bytes, pages.fingerprint, pool_id, canonical)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """Accept the orders of a step, before vLLM launches its kernels."""
        super().bind_connector_metadata(connector_metadata)
        if self._memory is not None:
            self._memory.begin_step(is_tracked=connector_metadata.number > 0)

    def start_load_kv(self, forward_context: VllmObject, **kwargs: VllmObject) -> None:  # noqa: ARG002 - as vLLM calls it
        """Begin the loads and stores of a step. vLLM calls this once per step, even if nothing is computed.

        A step's stores are of blocks that earlier steps have filled, and its loads overwrite blocks that earlier steps
        may still use; vLLM has launched the kernels of these steps by now.
        """
        metadata = self._get_connector_metadata()
        self._step_number = metadata.number
        self._of_worker().begin(metadata.orders)

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
        """The stores that have ended, and the last step that is computed. vLLM has launched all of this step."""
        if self._step_number:
            self._steps.launched(self._step_number)
        report, computed = self._of_worker().take_stored(), self._steps.take()
        if report is None and computed is None:
            return None
        done, failed = ({}, set()) if report is None else (report.done, report.failed)
        return KvcachedReport(done, failed, {} if computed is None else {own_shard(self._vllm_config): computed})

    # --- the scheduler's side ---------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: VllmObject) -> None:
        """Accept vLLM's cache manager, and with it the block pool."""
        self._manager = kv_cache_manager
        super().bind_kv_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Accept vLLM's block pool."""
        self._scheduler = SchedulerSide(
            self._link,
            gpu_block_pool,
            chains=self._chains(gpu_block_pool),
            shards=shards_of(self._vllm_config),
            hold_deadline_s=self._settings.hold_deadline_ms / 1000,
            may_fetch=self._settings.prefetch != "off",
            may_store=not self._settings.read_only,
            announces=publishes_events(self._vllm_config),
        )

    def _chains(self, pool: BlockPool) -> Chains:  # noqa: ARG002 - hybrid connectors use it
        """How blocks form chains."""
        return Chains(self._vllm_config.cache_config.block_size)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Mapping[tuple[int, int], KvcachedPages]) -> None:
        """Accept the workers' pages, by pipeline stage and rank, and connect. vLLM 0.33 repeats them when it wakes up.

        Raises:
            ValueError: the blocks of the workers differ.
        """
        if self._is_described:
            return
        if (warning := embeddings_warning(self._vllm_config)) is not None:
            log.warning("kvcached: %s", warning)
        layout, self._is_described = common_layout(metadata, self._vllm_config, self._kv_cache_config), True
        description = EngineDescription(
            self._vllm_config,
            self._kv_cache_config,
            vllm_version=vllm.__version__,
            weights_version=self._settings.weights_version,
            environment=os.environ,
            find_snapshot=find_snapshot,
            groups=described(self._kv_cache_config.kv_cache_groups) if self._is_grouped else None,
        )
        reader = WeightReader(default_notes_folder(), is_ending=self._ending.is_set, log=log)
        identify = KnownIdentity(partial(description.identify, reader))
        self._link.start(connect_as(identify, layout, self._settings, self._link.wake))
        if self._settings.device_memory == "daemon":
            sizes = [group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups]
            self._device = open_table(
                pool_question(self._vllm_config, self._kv_cache_config),
                self._settings,
                [each.pool_id for each in metadata.values()],
                self._manager,
                Engine(layout, identify, f"{vllm.__version__} {version('torch')}", sizes),
            )

    def on_new_request(self, request: VllmObject) -> None:
        """Accept a request that has arrived."""
        if self._device is not None:
            self._device.arrived(request.request_id)
        self._of_scheduler().on_new_request(request)

    def get_num_new_matched_tokens(self, request: VllmObject, num_computed_tokens: int) -> tuple[int | None, bool]:
        """Tokens that can be loaded after those that vLLM has (None = ask again). Loads are always asynchronous."""
        return self._of_scheduler().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: VllmObject, blocks: VllmObject, num_external_tokens: int) -> None:
        """Order the load into the blocks that a request got."""
        if self._device is not None:
            self._device.allocated(request.request_id, is_loading=num_external_tokens > 0)
        self._of_scheduler().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: VllmObject) -> KVConnectorMetadata:
        """The orders for the workers of a step."""
        number = 0 if self._device is None else self._device.step(scheduler_output)
        return KvcachedOrders(self._of_scheduler().step(scheduler_output), number)

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
        if self._device is not None:
            self._device.forget(connector_output.invalid_block_ids or ())
            if report is not None:
                self._device.computed(report.computed)

    def request_finished(self, request: VllmObject, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Note the end of a request. vLLM may free its blocks, because blocks of stores are held separately."""
        if self._device is not None:
            self._device.finished(request.request_id)
        return False, self._of_scheduler().finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Whether further steps are needed, even empty ones, until stores have ended and the last step is computed."""
        return self._of_scheduler().is_busy or (self._device is not None and self._device.is_waiting)

    def has_pending_block_frees(self) -> bool:
        """Whether the end of stores frees blocks, so that vLLM need not preempt a request."""
        if not self._of_scheduler().frees_soon:
            return False
        self._link.hurry()  # vLLM does not schedule more until blocks are free
        return True

    def reset_cache(self) -> bool:
        """Clear the namespace, so that no engine loads its blocks, unless `on_reset` says to keep it.

        vLLM also calls this before it pauses or sleeps. False if the clear is not done yet; vLLM then does not sleep.
        """
        return self._settings.on_reset == "keep" or self._of_scheduler().reset()

    def take_events(self) -> Iterable[VllmObject]:
        """Events of blocks that are in the host pool, or no longer. vLLM publishes them if it publishes its own."""
        block_size = self._vllm_config.cache_config.block_size
        return () if self._scheduler is None else cache_events(self._scheduler.announcements.take(), block_size)

    # --- statistics -------------------------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvcachedStats | None:
        """Statistics since the last call; None if nothing has changed.

        vLLM calls this on the scheduler's side once for each step, after it has processed the step's output. It calls
        `update_connector_output` only if there are reports, so this call marks the end of a step.
        """
        if self._worker is not None and self._pages is not None:
            counts = self._worker.take_counts()
            return None if counts is None else worker_stats(counts, self._pages.block_bytes)
        if (scheduler := self._scheduler) is None:
            return None
        scheduler.step_over()
        if self._device is not None:
            self._device.step_over()
        skipped, late, wishes = scheduler.take_skipped(), scheduler.take_late(), scheduler.take_wishes()
        state = scheduler_state(
            is_up=scheduler.session is not None, prefill_tokens_per_s=scheduler.prefill_tokens_per_s
        )
        if state == self._told and not (skipped or late or any(wishes)):
            return None
        self._told = state
        return scheduler_stats(state, skipped_blocks=skipped, late_requests=late, wishes=wishes)

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
