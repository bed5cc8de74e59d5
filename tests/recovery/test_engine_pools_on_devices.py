"""Device memory that the daemon keeps for engines on CUDA devices: who gets which, and whose death is waited for."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import pytest

from kvcached.memory.available import NotEnoughMemory
from kvcached.memory.engine_record import Writer
from kvcached.memory.sealed import sealed_memfd
from kvcached.process.access import NO_GRANTS
from kvcached.process.identity import ProcessIdentity, identity_of
from kvcached.process.peer import PeerProcess
from kvcached.process.seqpacket import Credentials
from kvcached.recovery import engine_pools
from kvcached.recovery.engine_pools import Claimed, EnginePools
from kvcached.recovery.engine_writers import WriterProcess
from kvcached_client.blocks.engine_table import NO_PARENT, Row
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.errors import DeviceError, ErrorCode, RequestError
from kvcached_client.protocol.attach import ClaimPool
from tests.recovery.test_engine_pools import BLOCKS, Clock, Manager, manager

__all__ = ["manager"]

RANK_BYTES = 1 << 16
DEVICES = tuple(f"GPU-0000000{number}-0000-4000-8000-000000000000" for number in range(1, 4))


class Process:
    """A process of an engine."""

    def __init__(self, pid: int = 0, *, is_visible: bool = True) -> None:
        self.pid = pid or os.getpid()
        self.identity: ProcessIdentity | None = identity_of(self.pid) if is_visible else None
        self.has_ended = False
        self.is_closed = False

    def is_dead(self) -> bool:
        assert not self.is_closed
        return self.has_ended

    def is_same_process(self, other: object) -> bool:
        return other is self

    def close(self) -> None:
        self.is_closed = True


class Devices:
    """Makes memory on devices with room for so many pieces each; a lost device makes none."""

    def __init__(self, room: int = 2) -> None:
        self.room = room
        self.made: dict[str, list[int]] = {device: [] for device in DEVICES}
        self.lost: set[str] = set()
        self.may_make = asyncio.Event()
        self.may_make.set()
        self.wanted: asyncio.Queue[str] = asyncio.Queue()

    async def make(self, device: str, size_bytes: int) -> int:
        self.wanted.put_nowait(device)
        await self.may_make.wait()
        if device in self.lost:
            raise DeviceError(f"device {device} is lost")
        if len(self.living(device)) >= self.room:
            raise NotEnoughMemory(f"no {size_bytes} bytes are left")
        descriptor = sealed_memfd("device", size_bytes)
        self.made[device].append(os.fstat(descriptor).st_ino)
        return descriptor

    def living(self, device: str) -> set[int]:
        """What of the device's memory a descriptor keeps."""
        held = set()
        for path in Path("/proc/self/fd").iterdir():
            with suppress(OSError):
                held.add(path.stat().st_ino)
        return held & set(self.made[device])


@pytest.fixture
def devices() -> Devices:
    return Devices()


@pytest.fixture
def pools(manager: Manager, devices: Devices) -> Iterator[EnginePools]:
    """Room for many pools; `manager` keeps their descriptors."""
    pools = EnginePools(1 << 24, Clock(), devices.make)
    yield pools
    pools.close()


def question(claim: str, rank: int = 0, *, ranks: int = 1, device: int | None = None, renew: bool = False) -> ClaimPool:
    return ClaimPool(
        name="model", claim=claim, ranks=ranks, rank=rank, rank_bytes=RANK_BYTES, blocks=BLOCKS, renew=renew,
        device=DEVICES[rank if device is None else device],
    )  # fmt: skip


def claim(pools: EnginePools, wanted: ClaimPool, process: WriterProcess | None = None) -> Claimed:
    return asyncio.run(pools.claim_on_device(wanted, process or Process()))


def refusal(action: Callable[[], object]) -> RequestError:
    with pytest.raises(RequestError) as refused:
        action()
    return refused.value


def name_a_block(pools: EnginePools) -> None:
    (pool,) = pools._pools
    pool.table.identify(bytes(32), bytes(32))
    pool.table.write(Row(3, 1, pool.table.epoch, NO_PARENT, 0, b"hash"))


def named(pools: EnginePools) -> list[int]:
    return [pool.named for pool in pools.stats()]


def test_ranks_get_memory_of_their_devices(pools: EnginePools, devices: Devices) -> None:
    """Each rank's memory is made on its device when it asks; the table alone is there for whoever asks afterwards."""
    first, one = claim(pools, question("start", 0, ranks=2))
    second, other = claim(pools, question("start", 1, ranks=2))
    third, table = pools.claim(ClaimPool(name="model", claim="start", ranks=2, rank_bytes=RANK_BYTES, blocks=BLOCKS))

    assert first == second == third
    assert (one[0], len(one), len(other), table) == (other[0], 2, 2, (one[0],))
    assert [len(devices.made[device]) for device in DEVICES] == [1, 1, 0]


def test_table_without_memory_is_refused(pools: EnginePools) -> None:
    """A scheduler whose ranks have asked an earlier daemon gets no new pool."""
    found = refusal(lambda: pools.claim(ClaimPool(name="m", claim="c", ranks=1, rank_bytes=1, blocks=1)))
    assert (found.code, pools.stats()) == (ErrorCode.BAD_VALUE, ())


def test_memory_waits_for_the_death_of_its_process(pools: EnginePools) -> None:
    """Though nothing is locked, nobody gets the memory of a process that lives; when it is dead, the next one does."""
    living = Process()
    first, _ = claim(pools, question("first"), living)
    assert claim(pools, question("second"), Process(os.getppid()))[0].pool != first.pool
    living.has_ended = True
    assert claim(pools, question("third"))[0] == first
    assert living.is_closed


def test_start_that_has_the_claim_of_a_living_one_is_refused(pools: EnginePools) -> None:
    """Two engines with one engine_id do not write one memory; the same process may ask again."""
    first = claim(pools, question("one"))
    assert claim(pools, question("one")) == first
    other = Process(os.getppid())
    found = refusal(lambda: claim(pools, question("one"), other))
    assert "another living process has the memory of rank 0" in found.message
    assert other.is_closed


def unseen(pid: int) -> PeerProcess:
    """A process of another pid namespace, as the daemon has it: by its pidfd alone."""
    return PeerProcess(Credentials(0, 0, 0), os.pidfd_open(pid), NO_GRANTS)


def test_process_that_cannot_be_seen_renews_its_memory(pools: EnginePools, devices: Devices) -> None:
    """In a container the kernel tells by pidfds that it is the same one; another one with its claim is refused."""
    first = unseen(os.getpid())
    if not first.is_same_process(again := unseen(os.getpid())):
        first.close()
        again.close()
        pytest.skip("before Linux 6.9 pidfds of two processes look the same")
    given = claim(pools, question("one"), first)
    name_a_block(pools)
    assert claim(pools, question("one", renew=True), again)[0] == given[0]
    assert (named(pools), len(devices.made[DEVICES[0]]), len(devices.living(DEVICES[0]))) == ([0], 2, 1)
    other = unseen(os.getppid())
    found = refusal(lambda: claim(pools, question("one", renew=True), other))
    assert "another living process has the memory of rank 0" in found.message
    assert other.fileno() == -1


def test_locked_place_of_a_rank_keeps_the_pool(pools: EnginePools) -> None:
    """A lock that outlives the process, as in a forked child, keeps the memory from others."""
    process = Process()
    first, descriptors = claim(pools, question("first"), process)
    lock = lock_memory(descriptors[0], 0, 0)
    assert lock is not None
    assert lock_memory(descriptors[0], 0, 0) is None
    others = lock_memory(descriptors[0], 0, 1), lock_memory(descriptors[0], 0)
    assert None not in others
    for each in others:
        os.close(each or 0)
    process.has_ended = True
    assert claim(pools, question("second"), Process(os.getppid()))[0].pool != first.pool
    os.close(lock)
    assert claim(pools, question("third"))[0].pool == first.pool


def test_new_memory_of_a_rank_drops_all_rows(pools: EnginePools, devices: Devices) -> None:
    """Memory that a device does not know is made anew, in the same pool, and no block counts."""
    first, _ = claim(pools, question("one"))
    name_a_block(pools)
    assert claim(pools, question("one"))[0] == first
    assert named(pools) == [1]
    assert claim(pools, question("one", renew=True))[0] == first
    assert named(pools) == [0]
    assert len(devices.living(DEVICES[0])) == 1


def test_rank_that_has_moved_gets_memory_on_its_device(pools: EnginePools, devices: Devices) -> None:
    """The memory on the device where it was is given back, and no block counts."""
    processes = [Process(), Process()]
    for rank, process in enumerate(processes):
        claim(pools, question("first", rank, ranks=2), process)
        process.has_ended = True
    name_a_block(pools)
    claim(pools, question("second", 0, ranks=2))
    claim(pools, question("second", 1, ranks=2, device=2))
    assert named(pools) == [0]
    assert [len(devices.living(device)) for device in DEVICES] == [1, 0, 1]


def test_device_gets_room_from_pools_without_an_engine(pools: EnginePools, devices: Devices, manager: Manager) -> None:
    """The oldest goes, those on other devices stay; where all are used, the engine is refused and nothing is left."""
    devices.room = 1
    old, elsewhere = Process(), Process()
    claim(pools, question("old"), old)
    claim(pools, question("elsewhere", device=1), elsewhere)
    found = refusal(lambda: claim(pools, question("young"), Process(os.getppid())))
    assert found.code is ErrorCode.LIMIT
    assert len(pools.stats()) == 2
    old.has_ended = elsewhere.has_ended = True

    other = ClaimPool(
        name="other", claim="young", ranks=1, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS, device=DEVICES[0]
    )
    claim(pools, other)
    assert [pool.name for pool in pools.stats()] == ["model", "other"]
    assert [len(devices.living(device)) for device in DEVICES] == [1, 1, 0]
    assert len(manager.kept) == 6  # of each pool a table, a record and one rank


def test_lost_device_costs_no_pool(pools: EnginePools, devices: Devices) -> None:
    """A device that is lost is not helped by room: pools stay, the error says what the device said."""
    first = Process()
    claim(pools, question("first"), first)
    first.has_ended = True
    devices.lost.add(DEVICES[1])
    found = refusal(lambda: claim(pools, question("second", device=1)))
    assert "is lost" in found.message
    assert len(pools.stats()) == 1


def test_memory_is_made_once_for_a_rank(pools: EnginePools, devices: Devices) -> None:
    """Who asks again while its memory is being made is refused; the first one gets it."""

    async def main() -> None:
        devices.may_make.clear()
        first = asyncio.create_task(pools.claim_on_device(question("one"), Process()))
        await devices.wanted.get()
        with pytest.raises(RequestError, match="is being made"):
            await pools.claim_on_device(question("one"), Process())
        devices.may_make.set()
        await first

    asyncio.run(main())
    assert len(devices.made[DEVICES[0]]) == 1


def test_pool_that_is_given_back_while_its_memory_is_made(pools: EnginePools, devices: Devices) -> None:
    """If the process dies meanwhile, and its room is needed, the new memory is not left to anybody."""

    async def main() -> None:
        devices.may_make.clear()
        process = Process()
        asking = asyncio.create_task(pools.claim_on_device(question("one"), process))
        await devices.wanted.get()
        process.has_ended = True
        pools._make_room("", 1 << 24)
        devices.may_make.set()
        with pytest.raises(RequestError, match="was given back"):
            await asking

    asyncio.run(main())
    assert (pools.stats(), devices.living(DEVICES[0])) == ((), set())


def later(manager: Manager, devices: Devices) -> EnginePools:
    """The next daemon's."""
    found = EnginePools(1 << 24, Clock(), devices.make)
    found.take_over(manager.given())
    return found


def test_next_daemon_waits_for_the_same_death(pools: EnginePools, devices: Devices, manager: Manager) -> None:
    """It knows whom the last one has given the memory, and that one alone may ask for it again."""
    first, _ = claim(pools, question("first", 0, ranks=2))
    claim(pools, question("first", 1, ranks=2))
    name_a_block(pools)
    pools.close()
    next_pools = later(manager, devices)
    assert [pool.used for pool in next_pools.stats()] == [True]
    assert claim(next_pools, question("second", 0, ranks=2), Process(os.getppid()))[0].pool != first.pool
    (pool,) = [each for each in next_pools._pools if each.head.pool_id == first.pool]
    for rank in range(2):
        pool.record.note_writer(rank, Writer(pid=os.getpid(), started=1, namespace=pool.record.writer(rank).namespace))
    next_pools.close()

    last = later(manager, devices)  # the process of that id is another one now
    assert claim(last, question("third", 0, ranks=2))[0] == first
    last.close()


@pytest.mark.parametrize("is_visible", [True, False])
def test_memory_of_a_process_that_cannot_be_seen_is_dropped(
    pools: EnginePools, devices: Devices, manager: Manager, *, is_visible: bool
) -> None:
    """Of another pid namespace, or without an id: its death would not be seen, so nobody gets the memory."""
    claim(pools, question("first"), Process(is_visible=is_visible))
    if is_visible:
        record = pools._pools[0].record
        record.note_writer(0, record.writer(0)._replace(namespace=1))
    pools.close()
    next_pools = later(manager, devices)
    assert (next_pools.stats(), manager.kept) == ((), {})


@pytest.mark.parametrize("missing", ["-0", "-1"])
def test_pool_that_is_not_whole_is_dropped(
    pools: EnginePools, devices: Devices, manager: Manager, missing: str
) -> None:
    """Without its table, or without memory that the table names, a pool is none."""
    claim(pools, question("first"))
    pools.close()
    for name in [name for name in manager.kept if name.endswith(missing)]:
        manager.remove(name)
    next_pools = later(manager, devices)
    assert (next_pools.stats(), manager.kept) == ((), {})


def test_pool_of_which_a_part_was_kept_twice_is_dropped(
    pools: EnginePools, devices: Devices, manager: Manager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manager was not reached to remove memory that new memory has replaced: rows could be about either of them."""
    for rank in range(2):
        process = Process()
        claim(pools, question("first", rank, ranks=2), process)
        process.has_ended = True
    claim(pools, question("second", 0, ranks=2))
    monkeypatch.setattr(engine_pools, "remove", lambda _: False)
    claim(pools, question("second", 1, ranks=2, device=2))
    monkeypatch.setattr(engine_pools, "remove", manager.remove)
    name_a_block(pools)
    pools.close()
    next_pools = later(manager, devices)
    assert (next_pools.stats(), manager.kept) == ((), {})
    assert [devices.living(device) for device in DEVICES] == [set(), set(), set()]


def test_pool_of_which_a_rank_has_not_asked_is_kept(pools: EnginePools, devices: Devices, manager: Manager) -> None:
    """What was not made is made by the next daemon, in the same pool while the rank lives that asked before."""
    first, _ = claim(pools, question("first", 0, ranks=2))
    pools.close()
    next_pools = later(manager, devices)
    assert claim(next_pools, question("first", 1, ranks=2))[0].pool == first.pool
    assert claim(next_pools, question("second", 1, ranks=2))[0].pool != first.pool
    next_pools.close()


def test_engine_on_the_cpu_gets_no_memory_of_a_device(pools: EnginePools) -> None:
    """The kind of the memory is part of what an engine asks for."""
    process = Process()
    first, _ = claim(pools, question("first"), process)
    process.has_ended = True
    on_cpu = ClaimPool(name="model", claim="second", ranks=1, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS)
    assert pools.claim(on_cpu)[0].pool != first.pool
    assert claim(pools, question("third"))[0].pool == first.pool
    mixed = ClaimPool(name="model", claim="third", ranks=1, rank=0, rank_bytes=RANK_BYTES, blocks=BLOCKS)
    assert refusal(lambda: pools.claim(mixed)).code is ErrorCode.WRONG_LAYOUT


def copies(
    pools: EnginePools, pool: bytes, process: Process, rank: int = 0, *, ranks: int = 1, device: int | None = None
) -> Claimed:
    """The memory for a process that copies."""
    wanted = msgspec.structs.replace(question("first", rank, ranks=ranks, device=device), pool=pool)
    return claim(pools, wanted, process)


def test_memory_waits_for_the_death_of_the_process_that_copies(pools: EnginePools) -> None:
    """It gets the engine's memory beside the engine; when the engine is dead, the next one waits for it as well."""
    engine, first_copies = Process(), Process(os.getppid())
    first, given = claim(pools, question("first"), engine)
    assert copies(pools, first.pool, first_copies) == (first, given)
    engine.has_ended = True
    assert claim(pools, question("second"), Process(os.getppid()))[0].pool != first.pool
    found = refusal(lambda: claim(pools, question("first")))
    assert "another living process has the memory of rank 0" in found.message
    first_copies.has_ended = True
    assert claim(pools, question("third"))[0] == first
    assert engine.is_closed


def test_process_that_copies_is_followed_by_another_once_it_is_dead(pools: EnginePools) -> None:
    """One at a time, for each rank; a dead one is forgotten."""
    first, _ = claim(pools, question("first", 0, ranks=2))
    claim(pools, question("first", 1, ranks=2))
    one, other, of_rank_1 = Process(os.getppid()), Process(os.getppid()), Process(os.getppid())
    copies(pools, first.pool, one, ranks=2)
    copies(pools, first.pool, of_rank_1, 1, ranks=2)
    found = refusal(lambda: copies(pools, first.pool, other, ranks=2))
    assert (found.code, "another living process copies for rank 0" in found.message) == (ErrorCode.LIMIT, True)
    assert other.is_closed
    one.has_ended = True
    copies(pools, first.pool, Process(os.getppid()), ranks=2)
    assert (one.is_closed, of_rank_1.is_closed) == (True, False)


def test_nobody_copies_for_an_engine_that_has_not_the_memory(pools: EnginePools) -> None:
    """The pool, its sizes, the rank, the device and the user have to be the engine's, which has to live."""
    engine = Process()
    first, _ = claim(pools, question("first", 0, ranks=2), engine)
    wanted = msgspec.structs.replace(question("first", 0, ranks=2), pool=first.pool)
    wrong = (
        {"pool": bytes(16)}, {"name": "other"}, {"blocks": BLOCKS - 1}, {"rank": 1, "device": DEVICES[1]},
        {"device": DEVICES[1]}, {"ranks": 1}, {"claim": "second"},
    )  # fmt: skip
    for change in wrong:
        asking = Process(os.getppid())
        found = refusal(lambda: claim(pools, msgspec.structs.replace(wanted, **change), asking))  # noqa: B023
        assert (found.code, asking.is_closed) == (ErrorCode.BAD_VALUE, True), change
    asking = Process(os.getppid())
    found = refusal(lambda: asyncio.run(pools.claim_on_device(wanted, asking, lambda: "bob")))
    assert (found.code, asking.is_closed) == (ErrorCode.BAD_VALUE, True)
    assert refusal(lambda: pools.claim(msgspec.structs.replace(wanted, device=""))).code is ErrorCode.BAD_VALUE
    assert len(pools.stats()) == 1
    engine.has_ended = True
    found = refusal(lambda: claim(pools, wanted, Process(os.getppid())))
    assert "no living process has the memory of rank 0" in found.message


def test_engine_of_many_ranks_has_no_processes_that_copy(pools: EnginePools) -> None:
    """The table has places for 32 ranks with such a process each."""
    for ranks, rank in ((32, 31), (33, 0)):
        first, _ = claim(pools, question("first", rank, ranks=ranks, device=0))
        asked = functools.partial(copies, pools, first.pool, Process(os.getppid()), rank, ranks=ranks, device=0)
        if ranks == 32:
            assert asked()[0] == first
            pools._pools[0].claim = b"another"
        else:
            found = refusal(asked)
            assert (found.code, "33 ranks" in found.message) == (ErrorCode.BAD_VALUE, True)


def test_next_daemon_waits_for_the_death_of_the_process_that_copies(
    pools: EnginePools, devices: Devices, manager: Manager
) -> None:
    """It is written down like the engine's own process."""
    first, _ = claim(pools, question("first"))
    copies(pools, first.pool, Process(os.getppid()))
    record = pools._pools[0].record
    record.note_writer(0, Writer(pid=os.getpid(), started=1, namespace=record.writer(0).namespace))  # it is dead
    pools.close()
    next_pools = later(manager, devices)
    assert [pool.used for pool in next_pools.stats()] == [True]
    (pool,) = next_pools._pools
    pool.record.note_writer(1, Writer(pid=os.getppid(), started=1, namespace=pool.record.writer(1).namespace))
    next_pools.close()
    last = later(manager, devices)
    assert [pool.used for pool in last.stats()] == [False]
    assert claim(last, question("second"))[0] == first
    last.close()
