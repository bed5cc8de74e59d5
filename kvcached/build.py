"""The core as a configuration describes it."""

from __future__ import annotations

from collections.abc import Mapping

from kvcached.config.replica import ReplicaConfig
from kvcached.config.schema import Config
from kvcached.config.tables import HostConfig
from kvcached.core.cache import Cache
from kvcached.core.generations import Generations
from kvcached.core.namespaces import PoolSpec
from kvcached.core.slots.host_slots import HostQuota, QuotaRule
from kvcached.recovery.generations import Generation
from kvcached.storage_start import storage_spec
from kvcached_client.types import WritePolicy


def build_cache(
    config: Config,
    generations: Mapping[str, Generation],
    policies: Mapping[str, WritePolicy],
    epoch: int,
    all_generations: Generations,
) -> Cache:
    """A cache that has served nobody.

    Args:
        config: what to build.
        generations: of each replica's namespace, by the replica's name.
        policies: when its blocks are copied to host memory, by the same.
        epoch: of this daemon.
        all_generations: of every namespace that was written down.
    """
    return Cache(
        [_pool_spec(config, each, generations[each.name], policies[each.name]) for each in config.replica],
        epoch=epoch,
        session_ttl_ms=config.session_ttl_ms,
        host_slabs=0 if config.host is None else config.host.slabs,
        namespaces_max=0 if config.offload is None else config.offload.namespaces_max,
        pin_quota_percent=config.pin_quota_percent,
        host_eviction_policy="lru" if config.host is None else config.host.eviction_policy,
        storage=storage_spec(config),
        generations=all_generations,
        host_quota=host_quota(config.host),
        offload_write_policy=WritePolicy(config.offload.write_policy if config.offload else "write_through"),
        announces=config.events is not None,
    )


def host_quota(host: HostConfig | None) -> HostQuota:
    """Floors and caps of namespaces, as they are configured."""
    if host is None or host.quota is None:
        return HostQuota()
    quota = host.quota
    rules = [QuotaRule(each.label, each.floor_percent, each.cap_percent) for each in quota.namespace]
    tenants = tuple(QuotaRule(each.label, each.floor_percent, each.cap_percent) for each in quota.tenant)
    return HostQuota((*rules, QuotaRule("*", quota.floor_percent, quota.cap_percent)), tenants)


def _pool_spec(config: Config, replica: ReplicaConfig, generation: Generation, write_policy: WritePolicy) -> PoolSpec:
    host = config.host
    return PoolSpec(
        replica.name,
        generation.namespace,
        replica.block_size,
        replica.slot_count,
        shards=replica.shards,
        host_slots_per_slab=0 if host is None else host.slots_per_slab(replica.layout),
        # What is demoted needs a place to go to.
        watermark=0 if host is None else replica.watermark_slots,
        load_threshold=replica.load_threshold_blocks,
        load_quota=replica.load_quota_blocks,
        write_policy=write_policy,
        eviction_policy=replica.eviction_policy,
        generation=generation.number,
    )
