"""Which memory a start keeps of what the service manager hands to it, and when memory that it drops is free."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from kvcached import daemon, memory_start
from kvcached.config.schema import Config, load_config
from kvcached.memory import available
from kvcached.memory.available import NotEnoughMemory
from kvcached.memory.device_headers import DeviceHeaders
from kvcached.memory.device_pool import ShardMemory
from kvcached.memory.dropped import DroppedMemory
from kvcached.memory.host_pool import HostMemory, MemoryIdentity, create_host_memory
from kvcached.memory.token_table import TABLE_PREFIX, TokenTable
from kvcached.process.identity import ProcessIdentity, identity_of, pid_namespace
from kvcached.recovery import device_pools, inheritance
from kvcached.recovery.device_pools import kept_device
from kvcached.recovery.engine_pools import EnginePools
from kvcached.recovery.inheritance import HOST_MEMORY_NAME, Inheritance, inherit
from kvcached.recovery.state_file import (
    LEDGER_NAME,
    HostPoolRecord,
    Ledger,
    LedgerFile,
    MemberRecord,
    NamespaceRecord,
    ReplicaRecord,
    SessionRecord,
    boot_id,
)
from kvcached.start_errors import StartError
from kvcached.stopping import Stop
from kvcached_client.blocks.engine_table import NO_PARENT, Row
from kvcached_client.blocks.header import pack_claim
from kvcached_client.blocks.host_layout import slots_per_slab
from kvcached_client.blocks.pages import pool_geometry
from kvcached_client.doctor.memory_bounds import MemoryBound
from tests.daemon.conftest import CONFIG
from tests.recovery.test_engine_pools import IDENTITY, NAMESPACE, Manager, claim, close, manager

__all__ = ["manager"]

SLABS, SLAB_BYTES, BLOCK_BYTES = 4, 1 << 20, 4096
HOST = f"{CONFIG}[host]\nsize_bytes = {SLABS * SLAB_BYTES}\nslab_bytes = {SLAB_BYTES}\n"
OFFLOAD = HOST + "[offload]\n"
ROOT = NAMESPACE.hex()


@pytest.fixture
def kept_by(manager: Manager, monkeypatch: pytest.MonkeyPatch) -> Manager:
    """A service manager that hands what it keeps to each start."""
    for module in (inheritance, device_pools):
        monkeypatch.setattr(module, "store", manager.store)
        monkeypatch.setattr(module, "remove", manager.remove)
    monkeypatch.setattr(inheritance, "take_stored", manager.given)
    return manager


@pytest.fixture
def host() -> Iterator[HostMemory]:
    memory = create_host_memory(SLABS, SLAB_BYTES)
    yield memory
    memory.close()


def configuration(directory: Path, text: str) -> Config:
    (directory / "kvcached.toml").write_text(text)
    return load_config(directory / "kvcached.toml", environment={}, options={"run_dir": str(directory)})


def record_of(host: HostMemory) -> HostPoolRecord:
    device, inode = host.identity
    return HostPoolRecord(device=device, inode=inode, slabs=SLABS, slab_bytes=SLAB_BYTES, allocated={})


def ledger_of(host: HostMemory, process: ProcessIdentity | None, *, slots: int = 0) -> Ledger:
    """A daemon had an engine in offload mode; `slots` is as of the namespace's slabs, 0 = as they are now."""
    space = NamespaceRecord(
        root=ROOT, label="tiny", fingerprint="", block_size=4, shards=1, block_bytes=BLOCK_BYTES, generation=0,
        slots_per_slab=slots or slots_per_slab(SLAB_BYTES, BLOCK_BYTES, 1),
    )  # fmt: skip
    session = SessionRecord(id=1, epoch=1, mode="offload", place=ROOT, members=(MemberRecord(process=process),))
    return Ledger(
        boot=boot_id(), epoch=1, pid_namespace=pid_namespace(), host=record_of(host), namespaces=(space,),
        sessions=(session,),
    )  # fmt: skip


def is_kept(directory: Path, text: str, ledger: Ledger) -> bool:
    """Whether a start with this configuration keeps the host pool."""
    LedgerFile(directory / LEDGER_NAME).write(ledger)
    config = configuration(directory, text)

    async def start() -> Inheritance:
        with ExitStack() as parts:
            pools = EnginePools(0)
            return await inherit(
                directory, config.host, config.replica, pools, DroppedMemory(), parts,
                has_offload=config.offload is not None,
            )  # fmt: skip

    return asyncio.run(start()).is_kept


def dead() -> ProcessIdentity:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = identity_of(process.pid)
    assert found is not None
    return found


@pytest.mark.parametrize("text", [OFFLOAD, HOST], ids=["offload", "no offload"])
@pytest.mark.parametrize("who", ["living", "unseen", "dead"])
def test_host_pool_that_somebody_writes_is_kept_where_he_is_known(
    tmp_path: Path, kept_by: Manager, host: HostMemory, text: str, who: str
) -> None:
    """Without offload mode nobody sets aside the slots of its engines: while one may live, the pool is a new one."""
    process = {"living": identity_of(os.getpid()), "unseen": None, "dead": dead()}[who]
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)

    assert is_kept(tmp_path, text, ledger_of(host, process)) == (text == OFFLOAD or who == "dead")
    (now,) = kept_by.kept[HOST_MEMORY_NAME]
    assert (MemoryIdentity.of(now) == host.identity) == (text == OFFLOAD or who == "dead")


def test_host_pool_that_is_written_in_another_layout_is_not_kept(
    tmp_path: Path, kept_by: Manager, host: HostMemory
) -> None:
    """A namespace whose blocks lie elsewhere now is not restored: slots that its engine writes could be anybody's."""
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)
    assert not is_kept(tmp_path, OFFLOAD, ledger_of(host, identity_of(os.getpid()), slots=7))


@pytest.mark.parametrize(("who", "slab", "keeps"), [("living", 3, False), ("dead", 3, True), ("living", 0, True)])
def test_smaller_host_pool_is_a_new_one_where_an_engine_writes_behind_its_end(
    tmp_path: Path, kept_by: Manager, host: HostMemory, who: str, slab: int, *, keeps: bool
) -> None:
    """A claim in a slab that goes would be forgotten, and a later, larger pool would give its slot to others."""
    ledger = ledger_of(host, identity_of(os.getpid()) if who == "living" else dead())
    ledger = msgspec.structs.replace(ledger, host=msgspec.structs.replace(record_of(host), allocated={ROOT: (0, 3)}))
    os.pwrite(host.descriptor, pack_claim(epoch=1, session=1), slab * SLAB_BYTES)
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)

    smaller = OFFLOAD.replace(f"size_bytes = {SLABS * SLAB_BYTES}", f"size_bytes = {2 * SLAB_BYTES}", 1)
    assert is_kept(tmp_path, smaller, ledger) == keeps


@pytest.mark.parametrize("is_given", [True, False])
def test_memory_that_nobody_has_kept_is_told(
    tmp_path: Path, kept_by: Manager, host: HostMemory, caplog: pytest.LogCaptureFixture, *, is_given: bool
) -> None:
    """Pools that the ledger names and nobody hands over are lost, and the log says whose; a replica asleep has none."""
    awake, asleep = (
        ReplicaRecord(
            name=name, fingerprint="", namespace="", generation=0, weights_version="", slots=16,
            memory=(host.identity, host.identity), asleep=name == "asleep",
        )
        for name in ("awake", "asleep")
    )  # fmt: skip
    if is_given:
        for name in (HOST_MEMORY_NAME, "device-awake-0", "device-awake-1"):
            kept_by.store(name, host.descriptor)
    ledger = msgspec.structs.replace(ledger_of(host, None), replicas=(awake, asleep))

    with caplog.at_level("INFO"):
        assert is_kept(tmp_path, OFFLOAD, ledger) == is_given

    lost = "nobody has kept the host pool and the device pool of replica awake for this daemon, and the blocks are lost"
    assert (lost in caplog.text) == (not is_given)
    assert ("has ended, or there was none\n" in caplog.text) == (not is_given)
    assert ("keeps the new host pool" in caplog.text) == (not is_given)


@pytest.mark.parametrize(
    ("cause", "level", "why"),
    [
        ("stop", "INFO", "the daemon before was stopped, and nobody has kept the host pool and the device pool of"),
        ("kill", "WARNING", "has ended, or there was none"),
        ("parts", "WARNING", "the pools had 301 parts, and the supervisor or the keeper usually keeps 256"),
        ("other", "WARNING", "the supervisor or the keeper has kept other parts only"),
    ],
)
def test_reason_of_a_loss_is_told_as_far_as_it_is_known(
    tmp_path: Path,
    kept_by: Manager,
    host: HostMemory,
    caplog: pytest.LogCaptureFixture,
    cause: str,
    level: str,
    why: str,
) -> None:
    """A stop in order with its supervisor is no reason for a warning; too many parts are named where there are."""
    record = ReplicaRecord(
        name="a", fingerprint="", namespace="", generation=0, weights_version="", slots=16,
        memory=(host.identity,) * (300 if cause == "parts" else 2),
    )  # fmt: skip
    ledger = msgspec.structs.replace(ledger_of(host, None), replicas=(record,))
    if cause == "stop":
        LedgerFile(tmp_path / LEDGER_NAME).note_stop(ledger.epoch)
    if cause == "other":
        kept_by.store("device-a-0", host.descriptor)

    with caplog.at_level("INFO"):
        is_kept(tmp_path, OFFLOAD, ledger)

    (told,) = (each for each in caplog.records if "nobody has kept" in each.getMessage())
    assert (told.levelname, why in told.getMessage()) == (level, True)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"slots": 64}, "it has 64 slots, and the configuration asks for {slots}"),
        ({"fingerprint": "00"}, "its blocks have another layout than the configured one"),
        ({"shards": 2}, "it is of 2 shards, and the configuration asks for 1"),
        ({"cuda_ordinals": (1,)}, "it is on CUDA devices 1, and the configuration asks for the CPU"),
        ({"name": "old"}, "no replica of this name is configured"),
        ({}, ""),
        ({"asleep": True, "slots": 64}, ""),
    ],
)
def test_device_pool_of_another_configuration_is_told(
    tmp_path: Path,
    kept_by: Manager,
    host: HostMemory,
    caplog: pytest.LogCaptureFixture,
    change: dict[str, Any],
    said: str,
) -> None:
    """A pool that is here and not as it is configured now is lost, and one line says whose, and how it differs."""
    (replica,) = configuration(tmp_path, CONFIG).replica
    change = change.copy()
    shards = change.pop("shards", 1)
    record = ReplicaRecord(
        name=replica.name, fingerprint=replica.layout.fingerprint(), namespace="", generation=0, weights_version="",
        slots=replica.slot_count, memory=(host.identity,) * shards,
    )  # fmt: skip
    record = msgspec.structs.replace(record, **change)
    for shard in range(shards):
        kept_by.store(f"device-{record.name}-{shard}", host.descriptor)

    is_kept(tmp_path, CONFIG, Ledger(boot=boot_id(), epoch=1, replicas=(record,)))

    start = f"the device pool of replica {record.name} that was kept cannot be used, and its blocks are lost: "
    told = [each.getMessage() for each in caplog.records if each.getMessage().startswith(start)]
    assert told == ([start + said.format(slots=replica.slot_count)] if said else [])


def test_host_pool_that_is_no_longer_configured_is_told(
    tmp_path: Path, kept_by: Manager, host: HostMemory, caplog: pytest.LogCaptureFixture
) -> None:
    """A configuration without [host] loses the kept host pool, and the log says so."""
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)
    assert not is_kept(tmp_path, CONFIG, ledger_of(host, None))
    assert "the host pool that was kept is dropped, and its blocks are lost: [host] is no longer" in caplog.text


def test_first_start_has_lost_nothing(tmp_path: Path, kept_by: Manager, caplog: pytest.LogCaptureFixture) -> None:
    """A ledger without pools, as of a daemon that never had any, is no reason for a warning."""
    with caplog.at_level("WARNING"):
        assert not is_kept(tmp_path, OFFLOAD, Ledger(boot=boot_id(), epoch=1))
    assert caplog.text == ""


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_host_pools_the_ledgers_is_kept(
    tmp_path: Path, kept_by: Manager, host: HostMemory, *, is_first: bool
) -> None:
    """The manager was not reached to remove the first pool, and has two under one name."""
    other = create_host_memory(SLABS, SLAB_BYTES)
    for each in (host, other) if is_first else (other, host):
        kept_by.store(HOST_MEMORY_NAME, each.descriptor)
    other.close()

    assert is_kept(tmp_path, OFFLOAD, ledger_of(host, None))


@pytest.mark.parametrize("is_first", [True, False])
def test_of_two_device_pools_the_ledgers_is_kept(tmp_path: Path, *, is_first: bool) -> None:
    """The same for a device pool on the CPU and its headers; of memory of CUDA devices nothing tells which is which."""
    (replica,) = configuration(tmp_path, CONFIG).replica
    with ExitStack() as parts:
        size_bytes = pool_geometry(replica.layout, replica.slot_count).size_bytes
        pools = [ShardMemory.make("test", size_bytes) for _ in range(2)]
        headers = [DeviceHeaders.make("test", replica.slot_count) for _ in range(2)]
        for pool, header in zip(pools, headers, strict=True):
            parts.callback(pool.close)
            parts.callback(header.close)
        record = ReplicaRecord(
            name=replica.name, fingerprint=replica.layout.fingerprint(), namespace="", generation=0,
            weights_version="", slots=replica.slot_count, memory=(MemoryIdentity.of(pools[0].descriptor),),
            headers=headers[0].identity,
        )  # fmt: skip
        order = 1 if is_first else -1
        found = {
            f"device-{replica.name}-0": [os.dup(each.descriptor) for each in pools[::order]],
            f"headers-{replica.name}": [os.dup(each.descriptor) for each in headers[::order]],
        }
        doubled = {name: [os.dup(each) for each in descriptors] for name, descriptors in found.items()}
        for descriptor in (each for descriptors in doubled.values() for each in descriptors):
            parts.callback(os.close, descriptor)
        kept = kept_device(replica, found, Ledger(boot="", epoch=1, replicas=(record,)))
        assert kept is not None
        assert kept.headers is not None
        taken = [*kept.shards, kept.headers]
        for descriptor in taken:
            parts.callback(os.close, descriptor)
        assert [MemoryIdentity.of(each) for each in taken] == [*record.memory, record.headers]
        assert found == {}

        on_cuda = replica.model_copy(update={"device": "cuda"})
        recorded = msgspec.structs.replace(record, cuda_ordinals=on_cuda.cuda_ordinals, memory=(headers[0].identity,))
        assert kept_device(on_cuda, doubled, Ledger(boot="", epoch=1, replicas=(recorded,))) is None


def test_dropped_memory_is_given_back_before_new_memory_is_made(
    kept_by: Manager, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager is waited for between the last removal and the first new device pool: there may be room for one."""
    done: list[str] = []

    async def taken_in() -> bool:
        done.append("waited")
        return True

    def remove(name: str) -> bool:
        done.append(f"removed {name}")
        return kept_by.remove(name)

    on_cpu = device_pools._on_cpu

    def make(*about: object) -> tuple[ShardMemory, ...]:
        done.append("made")
        return on_cpu(*about)  # type: ignore[arg-type]

    for module in (inheritance, device_pools):
        monkeypatch.setattr(module, "remove", remove)
    monkeypatch.setattr(device_pools, "taken_in", taken_in)
    monkeypatch.setattr(device_pools, "_on_cpu", make)
    gone = create_host_memory(1, SLAB_BYTES)
    kept_by.store("device-gone-0", gone.descriptor)
    gone.close()
    is_kept(tmp_path, CONFIG, Ledger(boot=boot_id(), epoch=1))

    waited = done.index("waited")
    assert {"removed host", "removed device-gone-0", "removed device-default-0"} <= set(done[:waited])
    assert "made" in done[waited:]


def test_second_start_has_the_engine_pools(tmp_path: Path, kept_by: Manager, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start that cannot use the ledger is done again with the engine pools that were kept: a clear reaches them."""
    pools = EnginePools(5 << 20)
    _, descriptors = claim(pools, "first")
    close(descriptors)
    (pool,) = pools._pools
    pool.table.identify(IDENTITY, NAMESPACE)
    pool.table.write(Row(3, 1, pool.table.epoch, NO_PARENT, 0, b"hash"))
    pools.close()
    given = [kept_by.given(), {}]
    monkeypatch.setattr(inheritance, "take_stored", lambda: given.pop(0))
    LedgerFile(tmp_path / LEDGER_NAME).write(Ledger(boot=boot_id(), epoch=1))
    take_over, config = inheritance.take_over_timed, configuration(tmp_path, OFFLOAD + 'device_memory_bytes = "5MiB"\n')

    def fail(*_: object, **__: object) -> None:
        monkeypatch.setattr(daemon, "take_over_timed", take_over)
        raise ValueError("what is in the ledger")

    monkeypatch.setattr(daemon, "take_over_timed", fail)
    assert asyncio.run(cleared_named(config)) == (1, 0)
    assert not given


async def cleared_named(config: Config) -> tuple[int, int]:
    """How many blocks the only engine pool of a daemon names, before and after its namespace is cleared."""
    async with AsyncExitStack() as parts:
        service = await daemon._started(config, 2, Stop(0), parts)
        pools = service._engine_pools
        (before,) = pools.stats()
        pools.cleared(lambda namespace: namespace == NAMESPACE)
        return before.named, sum(each.named for each in pools.stats())


@pytest.mark.parametrize("stored", [0, 1])
def test_start_waits_for_memory_only_where_some_was_kept(
    tmp_path: Path, kept_by: Manager, monkeypatch: pytest.MonkeyPatch, stored: int
) -> None:
    """Where an earlier daemon had memory, some of it may not be free yet; else the first look decides."""
    patience: list[float] = []

    async def refuse(size_bytes: int, purpose: str, patience_s: float, *_: int) -> None:
        patience.append(patience_s)
        raise NotEnoughMemory("it needs more")

    monkeypatch.setattr(memory_start, "await_available", refuse)
    monkeypatch.setenv("LISTEN_PID", str(os.getpid()))
    monkeypatch.setenv("LISTEN_FDS", str(stored))
    with pytest.raises(StartError):
        asyncio.run(cleared_named(configuration(tmp_path, OFFLOAD)))
    assert [each > 0 for each in patience] == [bool(stored)]


@contextmanager
def engine_that_maps(memory: HostMemory) -> Iterator[subprocess.Popen[bytes]]:
    """A process that maps a host pool, and has no descriptor of it any more."""
    code = f"import mmap, os; it = mmap.mmap({memory.descriptor}, 0); os.close({memory.descriptor}); print(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[memory.descriptor], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


async def is_started(config: Config) -> bool:
    async with AsyncExitStack() as parts:
        try:
            await daemon._started(config, 2, Stop(0), parts)
        except StartError as error:
            assert "are available (a limit)" in str(error)
            return False
        return True


@pytest.mark.parametrize("too_much", [0, 1], ids=["there is room", "there is no room"])
def test_larger_host_pool_needs_room_for_what_is_new(
    tmp_path: Path, kept_by: Manager, host: HostMemory, monkeypatch: pytest.MonkeyPatch, too_much: int
) -> None:
    """What the pool has already is not asked for again; where there is no room for the rest, the start says so."""
    text = f"[host]\nsize_bytes = {(SLABS + 2) * SLAB_BYTES}\nslab_bytes = {SLAB_BYTES}\n[offload]\n"
    os.pwrite(host.descriptor, bytes(SLABS * SLAB_BYTES), 0)
    bound = MemoryBound(100 << 20, 2 * SLAB_BYTES - too_much, "a limit", 50 << 20)
    monkeypatch.setattr(available, "memory_bounds", lambda *_: [bound])
    monkeypatch.setattr(memory_start, "_FREED_WAIT_S", 0)
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)
    LedgerFile(tmp_path / LEDGER_NAME).write(ledger_of(host, None))

    assert asyncio.run(is_started(configuration(tmp_path, text))) == (not too_much)


@pytest.mark.parametrize("cause", ["slabs of another size", "no ledger", "a ledger that fails"])
@pytest.mark.parametrize("too_much", [0, 1], ids=["there is room", "there is no room without it either"])
def test_dropped_host_pool_is_no_reason_to_refuse_a_start(
    tmp_path: Path,
    kept_by: Manager,
    host: HostMemory,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    *,
    cause: str,
    too_much: int,
) -> None:
    """What engines still map of a pool that is dropped counts as free, and the log names them; not what nobody has."""
    slabs, times = (SLABS + 2, 2) if cause == "slabs of another size" else (SLABS, 1)
    text = f"[host]\nsize_bytes = {slabs * SLAB_BYTES}\nslab_bytes = {times * SLAB_BYTES}\n[offload]\n"
    size_bytes = SLABS * SLAB_BYTES - SLAB_BYTES // 2  # as far as the pool has been written
    os.pwrite(host.descriptor, bytes(size_bytes), 0)
    bound = MemoryBound(100 << 20, slabs * SLAB_BYTES - size_bytes - too_much, "a limit", 50 << 20)
    monkeypatch.setattr(available, "memory_bounds", lambda *_: [bound])
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)
    given = [kept_by.given(), {}]
    monkeypatch.setattr(inheritance, "take_stored", lambda: given.pop(0))

    take_over = inheritance.take_over_timed

    def fail(*_: object, **__: object) -> None:
        monkeypatch.setattr(daemon, "take_over_timed", take_over)
        raise ValueError("what is in the ledger")

    with engine_that_maps(host) as engine:
        if cause != "no ledger":
            LedgerFile(tmp_path / LEDGER_NAME).write(ledger_of(host, identity_of(engine.pid)))
        if cause == "a ledger that fails":
            monkeypatch.setattr(daemon, "take_over_timed", fail)
        with caplog.at_level("WARNING"):
            assert asyncio.run(is_started(configuration(tmp_path, text))) == (not too_much)
    assert (f"its {size_bytes} bytes are free when each process" in caplog.text) == (not too_much)
    assert (f"(pid {engine.pid})" in caplog.text) == (not too_much)


def test_dropped_memory_is_free_when_nobody_maps_it(host: HostMemory) -> None:
    """It is counted once however often it was kept, its processes are named while they live, and nothing keeps it."""
    dropped = DroppedMemory()
    os.pwrite(host.descriptor, bytes(SLAB_BYTES), 0)
    for _ in range(2):
        dropped.hold(os.dup(host.descriptor))
    with engine_that_maps(host) as engine:
        assert (dropped.size_bytes, dropped.mapped_by()) == (SLAB_BYTES, [engine.pid])
    assert dropped.mapped_by() == []
    descriptors = [Path(entry) for entry in Path("/proc/self/fd").iterdir()]
    dropped.close()
    dropped.close()
    left = [entry for entry in descriptors if entry.exists() and MemoryIdentity(*_file_of(entry)) == host.identity]
    assert [entry.name for entry in left] == [str(host.descriptor)]


def _file_of(entry: Path) -> tuple[int, int]:
    status = entry.stat()
    return status.st_dev, status.st_ino


@pytest.mark.parametrize("name", ["tokens-", "tokens-x", "tokens-0", "tokens-4"])
def test_memory_that_is_no_table_of_tokens_fails_no_start(
    tmp_path: Path, kept_by: Manager, host: HostMemory, name: str
) -> None:
    """Whatever the manager keeps under the name of a table, the start goes on without, and has it forgotten."""
    kept_by.store(HOST_MEMORY_NAME, host.descriptor)
    kept_by.store(name, host.descriptor)

    assert is_kept(tmp_path, OFFLOAD, ledger_of(host, identity_of(os.getpid())))
    assert name not in kept_by.kept


@pytest.mark.parametrize("tables", [1, 2])
def test_newest_table_of_tokens_is_kept(tmp_path: Path, kept_by: Manager, host: HostMemory, tables: int) -> None:
    """Where a start that failed has left two tables of tokens, the next one has the newer, and so has the manager."""
    for number in range(tables):
        table = TokenTable.create(4)
        table.put(bytes(16), bytes(15) + bytes([number]), bytes(16))
        kept_by.store(f"{TABLE_PREFIX}4", table.descriptor)
        table.close()
    LedgerFile(tmp_path / LEDGER_NAME).write(ledger_of(host, None))
    config = configuration(tmp_path, OFFLOAD)

    async def start() -> bytes:
        with ExitStack() as parts:
            found = await inherit(
                tmp_path, config.host, config.replica, EnginePools(0), DroppedMemory(), parts, has_offload=True
            )
            return found.tokens[4].take_over().keys

    assert asyncio.run(start()) == bytes(15) + bytes([tables - 1])
    assert len(kept_by.kept[f"{TABLE_PREFIX}4"]) == 1
