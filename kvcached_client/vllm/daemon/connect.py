"""As what an engine connects to the daemon: its identity, its layout, and how to reach the daemon."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path

import vllm
from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

from kvcached_client.blocks.host_layout import host_parts
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.protocol.fields import NAME_LENGTH_MAX
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.vllm.groups import has_states
from kvcached_client.vllm.identity import Identity
from kvcached_client.vllm.messages import KvcachedPages
from kvcached_client.vllm.settings import KvCacheConfig, Settings, VllmConfig, is_replicated, shards_of

log = logging.getLogger("vllm.kvcached")


def own_shard(config: VllmConfig) -> int:
    """The number of the part of every block that this worker has."""
    stage, rank = get_pp_group().rank_in_group, get_tensor_model_parallel_rank()
    return _shard(config, stage, rank)


def _shard(config: VllmConfig, stage: int, rank: int) -> int:
    ranks: int = config.parallel_config.tensor_parallel_size
    return stage * ranks + rank


def common_layout(told: Mapping[tuple[int, int], object], config: VllmConfig, cache: KvCacheConfig) -> OffloadLayout:
    """The layout that is declared to the daemon.

    Args:
        told: what the workers have told of their blocks, by pipeline stage and rank.
        config: vLLM's configuration.
        cache: its groups of layers.

    Raises:
        ValueError: the blocks of the workers differ, or a worker has not described its blocks.
    """
    pages = {_shard(config, *place): each for place, each in told.items() if isinstance(each, KvcachedPages)}
    if others := {type(each).__name__ for each in told.values() if not isinstance(each, KvcachedPages)}:
        raise ValueError(
            f"the workers have told of {', '.join(sorted(others))} instead of their KV tensors: MultiConnector hands "
            "on what the first of its connectors tells; use none beside kvcached that tells something"
        )
    shards = shards_of(config)
    if sorted(pages) != list(range(shards)):
        raise ValueError(f"of {shards} workers, {sorted(pages)} have told of their KV tensors")
    kinds = {(each.block_bytes, each.fingerprint, each.canonical) for each in pages.values()}
    if len(kinds) > 1:
        words = ", ".join(
            f"{shard}: {each.block_bytes} bytes, {each.fingerprint.hex()}" for shard, each in sorted(pages.items())
        )
        raise ValueError(
            f"the workers' blocks differ ({words}): choose a tensor_parallel_size that divides the model's KV heads, "
            "and a pipeline_parallel_size that divides its layers"
        )
    block_bytes, fingerprint, canonical = kinds.pop()
    states = any(has_states(group.kv_cache_spec) for group in cache.kv_cache_groups)
    replicated = is_replicated(config, has_states=states)
    if canonical is not None and not canonical.divides(block_bytes, host_parts(shards, replicated=replicated)):
        canonical = None  # its pieces are too small: the daemon would refuse it
    return OffloadLayout(config.cache_config.block_size, shards, block_bytes, fingerprint, replicated, canonical)


def connect_as(
    identify: Callable[[], Identity], layout: OffloadLayout, settings: Settings, on_stale: Callable[[], None]
) -> Callable[[], OffloadClient]:
    """A function that opens a session with the daemon; every session is of the same engine instance.

    Args:
        identify: makes the engine's identity. It is called once, by the first call of the function.
        layout: the layout of blocks.
        settings: the connector's settings.
        on_stale: called by another thread when the session is over.
    """
    instance = new_instance()
    run_dir = Path(settings.run_dir or default_run_dir()).absolute()

    @cache
    def identified() -> Identity:
        identity = identify()
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
        return identity

    def connect() -> OffloadClient:
        identity = identified()
        return OffloadClient.connect(
            run_dir,
            engine=f"vllm {vllm.__version__}"[:NAME_LENGTH_MAX],
            instance=instance,
            keyspace=identity.keyspace,
            label=identity.label,
            layout=layout,
            deadline_ms=settings.hold_deadline_ms,
            on_stale=on_stale,
            read_only=settings.read_only,
        )

    return connect
