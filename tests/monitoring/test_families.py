"""What the metrics say about a daemon whose state is known."""

from __future__ import annotations

import re
from collections import Counter

import msgspec
import pytest
from prometheus_client.core import Metric

from kvcached.core.messages import TransferKind
from kvcached.core.slots.states import SlotState
from kvcached.monitoring.counters import STORAGE_TOTALS, TOTALS
from kvcached.monitoring.families import families
from kvcached.service.replica import HeldMemory
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from tests.monitoring.registry import SLABS, STORAGE, exported_name, metrics_of, pages_of
from tests.project.source_tree import ROOT
from tests.service.office import EPOCH, SLAB_BYTES, SLOTS, FakePeer, FakeWorkers, Office, key_chain
from tests.service.offload_office import BLOCK_BYTES, OffloadOffice

TENANT = ("blocks", "floor_blocks", "cap_blocks")


def value(metrics: dict[str, Metric], name: str, /, **labels: str) -> float:
    """The one sample of a counter or gauge with these labels."""
    family = metrics[name.removesuffix("_total")]
    (found,) = [sample.value for sample in family.samples if sample.labels == labels]
    return found


@pytest.fixture
def office() -> Office:
    return Office("a", host_slabs=SLABS)


def test_names_follow_the_conventions(office: Office) -> None:
    """Names have the prefix, base units and the suffix of their type; no two families have one name."""
    for family in metrics_of(office).values():
        name = exported_name(family)
        assert re.fullmatch(r"(kvcached|process)(_[a-z]+)+", name)
        assert not name.endswith(("_ms", "_us", "_ns", "_count", "_sum", "_bucket"))
        assert name.endswith("_total") == (family.type == "counter")
        assert family.type != "histogram" or name.endswith("_seconds")
        assert family.documentation.endswith(".")


def test_counters_are_0_from_the_start(office: Office) -> None:
    """Before anything has happened each counter has its samples, all 0, with every value that its labels can have."""
    metrics = metrics_of(office, storage=wire.StorageReport(
        id=0, backend="disk", state="ready", why="", backup="every", restarts=0, blocks=0, size_bytes=0,
        capacity_bytes=1, counters={},
    ))  # fmt: skip
    for family in metrics.values():
        if family.type == "counter" and family.name.startswith("kvcached_") and family.name != "kvcached_requests":
            assert family.samples, family.name
            assert {sample.value for sample in family.samples} == {0}, family.name
    assert {sample.labels["code"] for sample in metrics["kvcached_errors"].samples} == set(ErrorCode)
    verbs = {sample.labels["verb"] for sample in metrics["kvcached_request_duration_seconds"].samples}
    assert {"acquire", "commit", "release", "heartbeat", "prepare_stores", "stats"} <= verbs


def test_every_counter_that_is_kept_is_exported() -> None:
    """Each total that the daemon counts is the source of a sample: none is forgotten when one is added."""
    sources = "".join(path.read_text() for path in (ROOT / "kvcached").rglob("*.py"))
    kept = set(re.findall(r'(?:counters\[|\bcount\()"(\w+)"', sources))
    exported = [name for total in (*TOTALS, *STORAGE_TOTALS) for name in total.sources]

    assert kept <= set(exported)
    assert len(exported) == len(set(exported))


def test_work_moves_the_metrics(office: Office) -> None:
    """A stored prompt and its second request: slots, bytes, hits, misses, copies and latencies say so."""
    office.enter(FakePeer(1))
    keys = key_chain(3)
    office.store(keys)
    (transfer,) = office.workers["a"].under_way(TransferKind.STORE)
    before = metrics_of(office)
    office.workers["a"].end(transfer)
    office.store(keys)
    office.service.refused(request_error(ErrorCode.LIMIT, "too many", "ask less"))

    metrics = metrics_of(office)

    (block_bytes,) = {replica.bytes_per_block * replica.layout.shards for replica in described(office).replicas}
    assert value(before, "kvcached_copies_in_flight", executor="worker", kind="store") == 1
    assert value(before, "kvcached_transfers", kind="store", state="running") == 1
    assert value(before, "kvcached_copied_bytes_total", executor="worker", kind="store") == 0
    assert value(metrics, "kvcached_copies_in_flight", executor="worker", kind="store") == 0
    assert value(metrics, "kvcached_copied_bytes_total", executor="worker", kind="store") == 3 * block_bytes
    assert value(metrics, "kvcached_store_blocks_total", outcome="stored") == 3
    assert value(metrics, "kvcached_device_slots", replica="a", state="cached") == office.count("a", SlotState.CACHED)
    assert value(metrics, "kvcached_device_bytes", replica="a", state="cached") == 3 * block_bytes
    assert value(metrics, "kvcached_hit_blocks_total", tier="device") == 3
    assert value(metrics, "kvcached_missed_blocks_total") == 3
    assert value(metrics, "kvcached_errors_total", code="limit") == 1
    assert value(metrics, "kvcached_device_engines", replica="a") == 1
    assert value(metrics, "kvcached_device_epoch", replica="a") == EPOCH
    host = {"namespace": (b"n" * 8).hex(), "name": "a"}
    assert value(metrics, "kvcached_host_slots", **host, state="cached") == 3
    assert value(metrics, "kvcached_host_bytes", **host, state="cached") == round(3 * SLAB_BYTES / 8)
    assert value(metrics, "kvcached_host_free_bytes") == SLAB_BYTES
    durations = {
        sample.labels.get("le"): sample.value
        for sample in metrics["kvcached_request_duration_seconds"].samples
        if sample.labels["verb"] == "acquire"
    }
    assert durations["+Inf"] == 2


def test_sleeping_pool_has_neither_bytes_nor_workers() -> None:
    """A pool whose memory was given back is 0 bytes and has no healthy workers, also while its memory is made anew."""
    office = Office("a", "b")
    before = metrics_of(office)
    office.ask_late(wire.Sleep(id=office.next_id(), target="a", deadline_ms=0))
    falling = metrics_of(office)
    office.holders["a"].sleep()
    asleep = metrics_of(office)
    office.ask_late(wire.Wake(id=office.next_id(), target="a"))
    waking = metrics_of(office)
    office.holders["a"].made.pop()(HeldMemory(FakeWorkers()))
    awake = metrics_of(office)

    every = (before, falling, asleep, waking, awake)
    (block_bytes, _) = [replica.bytes_per_block * replica.layout.shards for replica in described(office).replicas]
    assert [value(each, "kvcached_workers_healthy", replica="a") for each in every] == [1, 1, 0, 0, 1]
    sizes = [value(each, "kvcached_device_bytes", replica="a", state="free") for each in every]
    assert sizes == [SLOTS * block_bytes * has_memory for has_memory in (1, 1, 0, 0, 1)]
    assert value(asleep, "kvcached_workers_healthy", replica="b") == 1
    assert value(asleep, "kvcached_device_bytes", replica="b", state="free") == SLOTS * block_bytes


def test_copies_of_an_engine_count_with_its_last_shard() -> None:
    """A copy of an engine in offload mode counts, with the bytes of all shards, once every shard has done it well."""
    office = OffloadOffice()
    welcome = office.attach(FakePeer(1))
    stored = office.storing(3)
    store = {"executor": "engine", "kind": "store"}
    office.expect(wire.Settled, office.transfer_done(welcome, stored.transfer, 0))
    half = metrics_of(office)
    office.expect(wire.Settled, office.transfer_done(welcome, stored.transfer, 1))
    held = office.acquire_blocks(3, request="again")
    loads = [office.expect(wire.LoadPrepared, office.prepare_load(held.lease, 2)).transfer for _ in range(2)]
    for shard in (0, 1):
        done = office.transfer_done(welcome, loads[0], shard, kind="load")
        office.expect(wire.Settled, done)
        failed = office.transfer_done(welcome, loads[1], shard, kind="load")
        office.expect(wire.Settled, msgspec.structs.replace(failed, error="it broke"))
    metrics = metrics_of(office)

    assert value(half, "kvcached_copies_in_flight", **store) == 1
    assert value(half, "kvcached_copied_bytes_total", **store) == 0
    assert value(metrics, "kvcached_copies_in_flight", **store) == 0
    assert value(metrics, "kvcached_copied_bytes_total", **store) == 3 * 2 * BLOCK_BYTES
    assert value(metrics, "kvcached_copied_bytes_total", executor="engine", kind="load") == 2 * 2 * BLOCK_BYTES
    (sessions,) = [each for each in metrics["kvcached_host_sessions"].samples if each.labels["name"] == "tiny"]
    assert sessions.value == 1


def described(office: Office) -> wire.Description:
    return office.expect(wire.Description, wire.Describe(id=office.next_id()))


def test_waiting_request_counts_until_its_reply(office: Office) -> None:
    """A request without a reply is one that waits; when it has its reply, its duration is one of its verb."""
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    answers = office.ask_late(wire.Pause(id=office.next_id(), deadline_ms=1000))
    waiting = metrics_of(office)
    (transfer,) = office.workers["a"].under_way(TransferKind.STORE)
    office.workers["a"].end(transfer)
    answered = metrics_of(office)

    assert len(answers) == 1
    assert [value(each, "kvcached_waiting_requests", wait="operator") for each in (waiting, answered)] == [1, 0]
    assert [paused(each) for each in (waiting, answered)] == [0, 1]


def paused(metrics: dict[str, Metric]) -> float:
    """How many durations of `pause` there are."""
    name = "kvcached_request_duration_seconds"
    (count,) = [
        sample.value
        for sample in metrics[name].samples
        if sample.name == f"{name}_count" and sample.labels == {"verb": "pause"}
    ]
    return count


def test_clear_begins_no_new_series() -> None:
    """Samples of a namespace of replicas keep their labels after a clear and new weights, and its generation grows."""
    office = Office("a", "b", host_slabs=SLABS)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    office.workers["a"].end_all()
    seen = []
    for request in (
        wire.ClearNamespace(id=office.next_id(), target="b"),
        wire.SetWeights(id=office.next_id(), target="a", version="step 2"),
    ):
        seen.append(metrics_of(office))
        office.expect(wire.NamespaceCleared, request)
    seen.append(metrics_of(office))

    labels = {"namespace": (b"n" * 8).hex(), "name": "a+b"}
    assert [value(each, "kvcached_host_generation", **labels) for each in seen] == [0, 1, 2]
    assert [value(each, "kvcached_host_slots", **labels, state="cached") for each in seen] == [3, 0, 0]
    before, *after = [series_of(each) for each in seen]
    assert all(each == before for each in after)


def series_of(metrics: dict[str, Metric]) -> set[tuple[str, ...]]:
    """The series of the host pool."""
    samples = [each for family in metrics.values() for each in family.samples if "_host_" in each.name]
    return {(each.name, *each.labels.values()) for each in samples}


def test_namespaces_of_one_name_are_one_sample(office: Office) -> None:
    """Namespaces that were cleared while slots are in use have the same labels: their numbers are added up."""
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    snapshot = pages_of(office)._snapshot()
    (host,) = snapshot.stats.hosts
    cleared = msgspec.structs.replace(host, namespace="0" * 16, replicas=())
    stats = msgspec.structs.replace(snapshot.stats, hosts=(host, cleared, cleared))
    metrics = {family.name: family for family in families(snapshot._replace(stats=stats))}

    assert value(metrics, "kvcached_host_slabs", namespace=host.namespace, name="a") == host.slabs
    assert value(metrics, "kvcached_host_slabs", namespace="0" * 16, name="") == 2 * host.slabs


def test_no_two_samples_are_alike(office: Office) -> None:
    """Of namespaces with the same labels, tenants' blocks are added up, and a hit ratio is that of all their blocks."""
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    snapshot = pages_of(office)._snapshot()
    (host,) = snapshot.stats.hosts
    cleared = [
        msgspec.structs.replace(
            host,
            namespace="0" * 16,
            replicas=(),
            tenants=(wire.TenantStats("acme", blocks, 10, 20),),
            asked_blocks=asked,
            hit_estimates=(wire.HitEstimate(0.5, ratio),),
        )
        for blocks, asked, ratio in ((1, 300, 0.5), (2, 100, 0.9))
    ]
    stats = msgspec.structs.replace(snapshot.stats, hosts=(host, *cleared))
    metrics = {family.name: family for family in families(snapshot._replace(stats=stats))}

    samples = Counter((each.name, *each.labels.items()) for family in metrics.values() for each in family.samples)
    assert samples.most_common(1)[0][1] == 1
    labels = {"namespace": "0" * 16, "name": ""}
    figures = [value(metrics, f"kvcached_host_tenant_{each}", **labels, tenant="acme") for each in TENANT]
    assert figures == [3, 20, 40]
    assert value(metrics, "kvcached_host_hit_ratio_estimate", **labels, size="0.5") == pytest.approx(0.6)


def test_names_of_engines_are_printable(office: Office) -> None:
    """A namespace's and a tenant's name stand in labels without characters that end lines or drive a terminal."""
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    snapshot = pages_of(office)._snapshot()
    (host,) = snapshot.stats.hosts
    tenants = (wire.TenantStats("free\r#", 1, 0, 2), wire.TenantStats("\x1b[2J", 1, 0, 2))
    host = msgspec.structs.replace(host, label="Qwén 3\n\u2028", tenants=tenants)
    stats = msgspec.structs.replace(snapshot.stats, hosts=(host,))
    metrics = {family.name: family for family in families(snapshot._replace(stats=stats))}

    samples = metrics["kvcached_host_tenant_blocks"].samples
    assert {sample.labels["name"] for sample in samples} == {r"Qwén 3\n\u2028"}
    assert {sample.labels["tenant"] for sample in samples} == {r"free\r#", r"\x1b[2J"}
    texts = [text for family in metrics.values() for each in family.samples for text in each.labels.values()]
    assert all(map(str.isprintable, texts))


def test_without_storage_there_are_no_samples_of_it(office: Office) -> None:
    """A daemon without storage exports the names of its metrics, and no numbers."""
    none = wire.StorageReport(
        id=0, backend="", state="detached", why="", backup="never", restarts=0, blocks=-1, size_bytes=-1,
        capacity_bytes=-1, counters={},
    )  # fmt: skip
    with_storage, without = metrics_of(office), metrics_of(office, storage=none)
    of_storage = [name for name in without if name.startswith("kvcached_storage_")]

    assert of_storage
    assert all(with_storage[name].samples and not without[name].samples for name in of_storage)
    assert value(with_storage, "kvcached_storage_blocks") == STORAGE.blocks
    assert value(with_storage, "kvcached_storage_record_age_seconds") == STORAGE.record_age_ms / 1000
    assert value(with_storage, "kvcached_storage_local_disk_bytes") == 200
    assert value(with_storage, "kvcached_storage_local_disk_read_blocks_total") == 7
    assert value(with_storage, "kvcached_storage_state", state="ready") == 1
    assert value(with_storage, "kvcached_storage_state", state="suspended") == 0
