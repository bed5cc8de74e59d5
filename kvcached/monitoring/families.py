"""The state of the daemon as families of Prometheus metrics.

Every family is there from the start, with every sample that can be known then: a counter that has counted nothing is 0.
Labels are names of the configuration, of the protocol and of namespaces, of which there are few at a time. Engines
choose names of namespaces and tenants; characters in these that cannot be printed are escaped, for not every scraper
takes them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple

from prometheus_client import ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from kvcached.core.messages import TransferKind
from kvcached.core.slots.states import NO_MEMORY, DaemonState, PoolState, SlotState, TransferState
from kvcached.log import escaped
from kvcached.monitoring.counters import storage_totals, totals
from kvcached.monitoring.timing import CopyTimes, Durations, Executor, RequestTimes
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol.engine import Description, HostStats, LocalDisk, PoolStats, StatsReport, StorageReport

#: The states of storage, see `kvcached.storage.client.LinkState`, and what a report adds to them.
STORAGE_STATES: Final = ("detached", "starting", "ready", "read_only", "suspended", "waiting")
_NS_PER_S: Final = 1_000_000_000
_SHARED: Final = "+"  #: between the names of replicas that share a namespace

_Samples = Iterable[tuple[tuple[str, ...], float]]
#: Namespaces with their labels.
_Hosts = Iterable[tuple[tuple[str, str], HostStats]]


class Snapshot(NamedTuple):
    """What the metrics are made of: the reports that commands print, and what only metrics tell.

    Attributes:
        stats, description, storage: as `kvcached stats`, `describe` and `storage` print them.
        lasting_namespaces: by replica, digits that tell its namespace from others and stay when it is cleared.
        host_slabs, slab_bytes: of the host pool; 0 without one.
        request_times, copy_times: how long requests and copies take.
        waiting: replies that are owed, by what they wait for.
        attach_refusals: requests that were refused at the attach socket, by code.
        is_ledger_missing: whether the ledger cannot be written.
    """

    stats: StatsReport
    description: Description
    storage: StorageReport
    lasting_namespaces: Mapping[str, str]
    host_slabs: int
    slab_bytes: int
    request_times: RequestTimes
    copy_times: CopyTimes
    waiting: Mapping[str, int]
    attach_refusals: Mapping[ErrorCode, int]
    is_ledger_missing: bool


def families(snapshot: Snapshot) -> Iterator[Metric]:
    """Every metric, one family after the other. The caller may let others have a turn between two of them."""
    yield from _daemon(snapshot)
    yield from _requests(snapshot)
    yield from totals(snapshot.stats.counters)
    yield from _device_pools(snapshot)
    yield from _host_pool(snapshot)
    yield from _copies(snapshot)
    yield from _storage(snapshot)
    yield from ProcessCollector(registry=None).collect()


def _gauge(name: str, meaning: str, samples: _Samples, labels: tuple[str, ...] = ()) -> Metric:
    family = GaugeMetricFamily(f"kvcached_{name}", meaning, labels=labels)
    for values, number in samples:
        family.add_metric(values, number)
    return family


def _one(name: str, meaning: str, number: float) -> Metric:
    return _gauge(name, meaning, [((), number)])


def _histogram(
    name: str, meaning: str, labels: tuple[str, ...], by: Iterable[tuple[tuple[str, ...], Durations]]
) -> Metric:
    family = HistogramMetricFamily(f"kvcached_{name}_seconds", meaning, labels=labels)
    for values, durations in by:
        buckets, seen = [], 0
        for bound, count in zip((*durations.bounds_ns, None), durations.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound is None else str(bound / _NS_PER_S), seen))
        family.add_metric(values, buckets, durations.sum_ns / _NS_PER_S)
    return family


def _daemon(snapshot: Snapshot) -> Iterator[Metric]:
    stats = snapshot.stats
    version = [((snapshot.description.version,), 1.0)]
    yield _gauge("build_info", "1; its label is the version.", version, ("version",))
    yield _one("daemon_epoch", "Changes with each start of the daemon.", stats.daemon_epoch)
    yield _one("uptime_seconds", "Since the daemon's start.", stats.uptime_ms / 1000)
    states = [((str(state),), float(stats.state == state)) for state in DaemonState]
    yield _gauge("state", "1 for the state that the daemon is in, 0 for the others.", states, ("state",))
    missing = "1 while the ledger cannot be written, so that a crash would lose the cache."
    yield _one("ledger_missing", missing, snapshot.is_ledger_missing)
    yield _one("offload_paused", "1 while engines in offload mode start no copies.", stats.offload_paused)
    yield _one("sessions", "Open sessions of engines.", stats.sessions)
    yield _one("index_runs", "Runs in the index; a run is a stretch of a prompt without a branch.", stats.runs)
    yield _one("device_cached_blocks", "Cached blocks of all device pools.", stats.cached_blocks)
    kept = Counter("yes" if pool.used else "no" for pool in stats.engine_pools)
    used = [((value,), float(kept[value])) for value in ("yes", "no")]
    yield _gauge("engine_pools", "Device memory that is kept for engines, by whether one uses it.", used, ("used",))
    size_bytes = sum(pool.size_bytes for pool in stats.engine_pools)
    yield _one("engine_pool_bytes", "Size of the device memory that is kept for engines.", size_bytes)
    yield _one("engine_pool_limit_bytes", "Limit of that memory.", stats.device_memory_bytes)


def _requests(snapshot: Snapshot) -> Iterator[Metric]:
    yield _histogram(
        "request_duration",
        "From a decoded request until its reply is handed to the socket, by verb. Waiting for loads, slots, prefetches"
        " and workers is included.",
        ("verb",),
        (((_tag(verb),), durations) for verb, durations in snapshot.request_times.by_verb.items()),
    )
    waiting = [((wait,), float(count)) for wait, count in snapshot.waiting.items()]
    yield _gauge("waiting_requests", "Requests without a reply yet, by what they wait for.", waiting, ("wait",))
    refusals = CounterMetricFamily(
        "kvcached_attach_refusals", "Refused requests at the attach socket, by code.", labels=["code"]
    )
    for code in ErrorCode:
        refusals.add_metric([code], snapshot.attach_refusals.get(code, 0))
    yield refusals


def _tag(verb: type) -> str:
    return str(verb.__struct_config__.tag)  # type: ignore[attr-defined] # each is a message


# --- tiers ------------------------------------------------------------------------------------------------------------

_DEVICE_STATES: Final = tuple(state.name.lower() for state in SlotState if state is not SlotState.ABSENT)
_HOST_STATES: Final = ("free", "cached", "filling", "quarantined")


def _device_pools(snapshot: Snapshot) -> Iterator[Metric]:
    pools = snapshot.stats.pools
    block_bytes = {
        each.name: each.bytes_per_block * each.layout.shards for each in snapshot.description.replicas
    }  # fmt: skip
    slots = [((pool.replica, state), pool.states[state]) for pool in pools for state in _DEVICE_STATES]
    has_memory = {pool.replica: pool.state not in NO_MEMORY for pool in pools}
    sizes = [((name, state), count * block_bytes[name] * has_memory[name]) for (name, state), count in slots]
    labels = ("replica", "state")
    yield _gauge("device_slots", "Slots of a device pool, by state.", slots, labels)
    yield _gauge("device_bytes", "Memory of these slots, of all shards; 0 while the pool sleeps.", sizes, labels)
    states = [((pool.replica, str(state)), float(pool.state == state)) for pool in pools for state in PoolState]
    yield _gauge("device_pool_state", "1 for the state that a device pool is in, 0 for the others.", states, labels)

    def each(name: str, meaning: str, number: Mapping[str, float]) -> Metric:
        return _gauge(name, meaning, [((replica,), value) for replica, value in number.items()], ("replica",))

    def of(field: str) -> dict[str, float]:
        return {pool.replica: float(getattr(pool, field)) for pool in pools}

    yield each("device_evictable_slots", "Cached slots that can be evicted at once.", of("evictable"))
    yield each("device_pinned_blocks", "Blocks that pins keep in a device pool.", of("pinned"))
    yield each("device_leases", "Requests that hold slots of a device pool.", of("leases"))
    engines = {pool.replica: float(pool.session > 0) for pool in pools}
    yield each("device_engines", "1 while an engine has a session on a device pool.", engines)
    yield each("device_epoch", "Epoch of a device pool; it changes when its memory is lost.", of("epoch"))
    yield each("device_paused", "1 while no copies are started for a device pool.", of("paused"))
    healthy = {pool.replica: float(pool.healthy and has_memory[pool.replica]) for pool in pools}
    yield each("workers_healthy", "1 while all workers of a replica live and it has its memory.", healthy)
    yield each("workers_degraded", "1 while workers die repeatedly, or cannot be started.", of("degraded"))
    yield _restarts(pools)


def _restarts(pools: Iterable[PoolStats]) -> Metric:
    family = CounterMetricFamily(
        "kvcached_worker_restarts", "How often the workers of a replica were replaced.", labels=["replica"]
    )
    for pool in pools:
        family.add_metric([pool.replica], pool.restarts)
    return family


def _host_pool(snapshot: Snapshot) -> Iterator[Metric]:
    hosts = [(_names(host, snapshot.lasting_namespaces), host) for host in snapshot.stats.hosts]
    yield _one("host_pool_bytes", "Size of the host pool; 0 without one.", snapshot.host_slabs * snapshot.slab_bytes)
    free = snapshot.host_slabs - sum(host.slabs for _, host in hosts)
    yield _one("host_free_bytes", "Part of the host pool that no namespace has.", free * snapshot.slab_bytes)
    slots: Counter[tuple[str, ...]] = Counter()
    sizes: Counter[tuple[str, ...]] = Counter()
    for names, host in hosts:
        pool_bytes = snapshot.host_slabs * snapshot.slab_bytes
        slot_bytes = pool_bytes / host.slots if host.slots else 0.0  # with its header, and what a slab's end wastes
        for state in _HOST_STATES:
            slots[*names, state] += host.states[state]
            sizes[*names, state] += round(host.states[state] * slot_bytes)
    labels = ("namespace", "name")
    yield _gauge("host_slots", "Slots of the slabs that a namespace has, by state.", slots.items(), (*labels, "state"))
    yield _gauge("host_bytes", "Memory of these slots, of all shards.", sizes.items(), (*labels, "state"))

    def each(name: str, meaning: str, field: str) -> Metric:
        numbers: Counter[tuple[str, ...]] = Counter()
        for names, host in hosts:
            numbers[names] += getattr(host, field)
        return _gauge(name, meaning, numbers.items(), labels)

    yield each("host_slabs", "Slabs of the host pool that a namespace has.", "slabs")
    yield each("host_pinned_blocks", "Blocks that pins keep in the host pool.", "pinned")
    yield each("host_sessions", "Sessions of engines in offload mode.", "sessions")
    yield each("host_leases", "Requests of engines in offload mode that hold blocks.", "leases")
    yield each("host_asked_blocks", "Blocks of prompts that the estimates are of, the latest ones.", "asked_blocks")
    yield _hit_ratio_estimates(hosts)
    yield from _tenants(hosts)
    yield each("host_generation", "Generation of a namespace; it changes when the namespace is cleared.", "generation")


def _hit_ratio_estimates(hosts: _Hosts) -> Metric:
    """Of namespaces whose labels are alike, the ratio is of the blocks of all of them."""
    hit: defaultdict[tuple[str, ...], float] = defaultdict(float)
    asked: Counter[tuple[str, ...]] = Counter()
    for names, host in hosts:
        for each in host.hit_estimates:
            values = (*names, f"{each.size_ratio:g}")
            hit[values] += each.hit_ratio * host.asked_blocks
            asked[values] += host.asked_blocks
    meaning = "Part of these blocks that a host pool of `size` times the size would hit."
    ratios = [(values, hit[values] / (count or 1)) for values, count in asked.items()]
    return _gauge("host_hit_ratio_estimate", meaning, ratios, ("namespace", "name", "size"))


def _tenants(hosts: _Hosts) -> Iterator[Metric]:
    for name, meaning, field in (
        ("blocks", "Blocks of a tenant with a quota in the host pool.", "blocks"),
        ("floor_blocks", "Blocks that such a tenant does not lose to others.", "floor_blocks"),
        ("cap_blocks", "Blocks that such a tenant has at most.", "cap_blocks"),
    ):
        numbers: Counter[tuple[str, ...]] = Counter()
        for names, host in hosts:
            for tenant in host.tenants:
                numbers[*names, escaped(tenant.tenant)] += getattr(tenant, field)
        yield _gauge(f"host_tenant_{name}", meaning, numbers.items(), ("namespace", "name", "tenant"))


def _names(host: HostStats, lasting: Mapping[str, str]) -> tuple[str, str]:
    """A namespace's labels. Those of namespaces that were cleared while slots are in use are alike.

    They stay when a namespace is cleared: else each clear of replicas, whose root it changes, would begin new series.
    """
    namespace = lasting[host.replicas[0]] if host.replicas else host.namespace
    return namespace, escaped(host.label) or _SHARED.join(host.replicas)


# --- copies -----------------------------------------------------------------------------------------------------------


def _copies(snapshot: Snapshot) -> Iterator[Metric]:
    times, transfers = snapshot.copy_times, snapshot.stats.transfers
    labels = ("executor", "kind")
    queue = [
        ((str(kind), str(state)), transfers[f"{state}_{kind}s"])
        for kind in TransferKind
        for state in (TransferState.QUEUED, TransferState.RUNNING)
    ]
    meaning = "Copies between device memory and the host pool that have not ended."
    yield _gauge("transfers", meaning, queue, ("kind", "state"))
    under_way = [((executor, kind), times.count(executor, kind)) for executor in Executor for kind in TransferKind]
    yield _gauge(
        "copies_in_flight", "Copies that were ordered and have not ended, by who makes them.", under_way, labels
    )
    copied = CounterMetricFamily(
        "kvcached_copied_bytes",
        "What copies have copied: workers and engines between device memory and the host pool, storage between the host"
        " pool and storage. A backup counts blocks that storage had already.",
        labels=labels,
    )
    for place, size_bytes in times.copied_bytes.items():
        copied.add_metric(place, size_bytes)
    yield copied
    yield _histogram(
        "copy_duration", "From the order of a copy until its last shard is done.", labels, times.durations.items()
    )


def _storage(snapshot: Snapshot) -> Iterator[Metric]:
    storage = snapshot.storage
    is_there = bool(storage.backend)
    states = [((state,), float(storage.state == state)) for state in STORAGE_STATES if is_there]
    meaning = (
        "1 for the state that storage is in, 0 for the others. No sample without storage, as of all metrics below."
    )
    yield _gauge("storage_state", meaning, states, ("state",))

    def known(name: str, meaning: str, number: int) -> Metric:
        return _gauge(name, meaning, [((), number)] if is_there and number >= 0 else [])

    yield known("storage_blocks", "Blocks that storage holds.", storage.blocks)
    yield known("storage_bytes", "Bytes that storage uses.", storage.size_bytes)
    yield known("storage_capacity_bytes", "Bytes that storage may use.", storage.capacity_bytes)
    disk = storage.local_disk or LocalDisk(blocks=-1, size_bytes=-1, capacity_bytes=-1, read_blocks=0)
    meaning = "Blocks that the local disk in front of storage holds. No sample without one, as of its bytes."
    yield known("storage_local_disk_blocks", meaning, disk.blocks)
    yield known("storage_local_disk_bytes", "Bytes that the local disk in front of storage uses.", disk.size_bytes)
    yield known(
        "storage_local_disk_capacity_bytes",
        "Bytes that the local disk in front of storage may use.",
        disk.capacity_bytes,
    )
    meaning = (
        "Blocks read from the local disk, and not from the service behind it. Begins anew with the storage process."
    )
    read = CounterMetricFamily("kvcached_storage_local_disk_read_blocks", meaning)
    if is_there:
        read.add_metric((), disk.read_blocks)
    yield read
    due = storage.counters.get("forgets_due", 0)
    yield known("storage_forgets_due", "Cleared namespaces whose blocks storage has not deleted yet.", due)
    ages = [((), storage.record_age_ms / 1000)] if storage.record_age_ms >= 0 else []
    meaning = (
        "Seconds since the record of generations was seen that several machines share: what others have cleared since"
        " then is not cleared here. No sample where storage is not shared."
    )
    yield _gauge("storage_record_age_seconds", meaning, ages)
    restarts = CounterMetricFamily("kvcached_storage_restarts", "How often the storage process was restarted.")
    if is_there:
        restarts.add_metric((), storage.restarts)
    yield restarts
    yield from storage_totals(storage.counters if is_there else None)
