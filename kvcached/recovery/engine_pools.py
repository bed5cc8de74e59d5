"""The engine pools of a daemon: made for engines that ask, kept for those that come back, given back for others.

An engine that starts gets the pool that an engine of its name and sizes has left. While an engine lives, nobody else
gets its pool, and the pool stays. What no engine uses stays until another one needs the room: then pools go that are of
the same name and other sizes, then those that were asked for longest ago.

The service manager keeps the descriptors, so pools outlive the daemon, too. A pool of which it has not kept all, or
some more than once, is dropped.

Memory of a CUDA device is made when its rank asks for it, on the rank's device. It goes to another engine only if
every process that was given some of the pool is dead. A device that has no room gets it from pools that no engine uses.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from itertools import chain
from typing import Final, TypeAlias

import msgspec

from kvcached.memory.available import NotEnoughMemory, check_available
from kvcached.memory.engine_pool import EnginePool
from kvcached.memory.engine_record import NAME_BYTES_MAX
from kvcached.recovery.engine_writers import EngineWriters, UnknownWriter, WriterProcess
from kvcached.recovery.fd_store import KEPT_MAX, remove, store, taken_in
from kvcached_client.blocks.engine_table import table_bytes
from kvcached_client.errors import DeviceError, ErrorCode, RequestError, request_error
from kvcached_client.protocol.attach import ClaimedPool, ClaimPool
from kvcached_client.protocol.reports import EnginePoolStats

#: Under which name the service manager keeps a part of a pool: this prefix, the pool's id, and the part's number.
ENGINE_POOL_PREFIX: Final = "engine-"
#: Other descriptors need room at the service manager, too.
_DESCRIPTORS_MAX: Final = KEPT_MAX // 2
#: How many bytes of a namespace's root reports show.
_SHOWN_BYTES: Final = 8

_log: Final = logging.getLogger(__name__)

#: What an engine's process gets, and the descriptors that go with it.
Claimed: TypeAlias = tuple[ClaimedPool, tuple[int, ...]]
#: Makes memory of the CUDA device with a UUID; returns its descriptor. Raises `NotEnoughMemory` where the device has
#: too little room, and `DeviceError` where more room would not help.
MakeOnDevice: TypeAlias = Callable[[str, int], Awaitable[int]]


async def no_devices(device: str, size_bytes: int) -> int:
    """`MakeOnDevice` of who has none."""
    raise DeviceError(f"no {size_bytes} bytes on device {device}: nobody here makes memory of CUDA devices")


class EnginePools:
    """All engine pools.

    Args:
        limit_bytes: of all of them; 0 = there are none.
        now_s: the clock, in seconds since the machine's start, which all daemons count alike.
        make_on_device: makes memory of CUDA devices.
    """

    def __init__(
        self,
        limit_bytes: int,
        now_s: Callable[[], float] = time.monotonic,
        make_on_device: MakeOnDevice = no_devices,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._now_s = now_s
        self._make_on_device = make_on_device
        self._pools: list[EnginePool] = []
        self._writers = EngineWriters()
        self._making: set[tuple[bytes, int]] = set()  #: pools and ranks whose memory is being made

    # --- from one daemon to the next --------------------------------------------------------------------------------

    def take_over(self, found: dict[str, list[int]]) -> None:
        """Take over the pools whose descriptors the service manager has kept, and remove these from `found`."""
        for pool_id, kept in _kept_parts(found).items():
            pool = EnginePool.adopt(kept)
            if pool is None:
                _log.warning("engine pool %s was not kept whole and once, or is damaged: it is dropped", pool_id)
                _drop([_part_name(pool_id, part) for part in kept], chain.from_iterable(kept.values()))
                continue
            self._pools.append(pool)
            try:
                self._writers.find(pool)
            except UnknownWriter:
                self._give_back(pool, "nobody can see from here whether the engine that had it is dead")
                continue
            if self._is_used(pool):  # further processes of the same start may ask
                pool.claim = pool.record.claim
            _log.info("engine pool %s of %s is kept: %d bytes", pool_id, pool.head.name, pool.size_bytes)
        self._make_room("", 0)

    def close(self) -> None:
        """Close all descriptors; the service manager goes on keeping them."""
        for pool in self._pools:
            self._writers.forget(pool)
            pool.close()
        self._pools = []

    # --- requests ---------------------------------------------------------------------------------------------------

    def claim(self, request: ClaimPool, user: str = "") -> Claimed:
        """The pool of an engine on the CPU, or only its table; its descriptors stay this object's.

        Args:
            request: of the engine.
            user: whose engine it is, the same at each start; "" for the daemon's own user. Part of the name of the
                pool, so that nobody gets the memory that another user's engine has left.

        Raises:
            RequestError: this daemon keeps no such memory, or there is no room for it.
        """
        return self._answer(self._pool_for(request, user), request)

    async def claim_on_device(
        self, request: ClaimPool, process: WriterProcess, owner: Callable[[], str] = lambda: ""
    ) -> Claimed:
        """As `claim`, for memory of a CUDA device, which is made if it is not there.

        Args:
            request: of the engine, for a rank; or of a process that copies for the engine.
            process: whoever asks; it is taken over.
            owner: says whose engine it is, as in `claim`, or raises RequestError.

        Raises:
            RequestError: as `claim`; or another process that was given the memory lives; or the device refused. For a
                process that copies: no living engine has such memory in this pool, or another process copies already.
        """
        rank = request.rank or 0
        try:
            user = owner()
            pool = self._pool_for(request, user) if request.pool is None else self._pool_in_use(request, user)
        except BaseException:
            process.close()
            raise
        if request.pool is not None:
            self._writers.admit_copies(pool, rank, process)
            return self._answer(pool, request)
        self._writers.admit(pool, rank, process)
        try:
            if request.renew or pool.head.devices[rank] != request.device:
                await self._make_memory(pool, rank, request.device)
        except RequestError:
            self._drop_empty(pool)
            raise
        return self._answer(pool, request)

    def _pool_for(self, request: ClaimPool, user: str) -> EnginePool:
        if not self.limit_bytes:
            raise request_error(
                ErrorCode.LIMIT,
                "this daemon keeps no device memory of engines",
                "set device_memory_bytes in its table [offload]",
            )
        if request.pool is not None:
            raise request_error(ErrorCode.BAD_VALUE, "a pool is named, and no device", "name both, or neither")
        if request.rank is not None and request.rank >= request.ranks:
            raise request_error(ErrorCode.BAD_VALUE, f"rank {request.rank} of {request.ranks}", "count ranks from 0")
        request = _owned(request, user)
        if len(request.name.encode()) > NAME_BYTES_MAX:
            raise request_error(
                ErrorCode.BAD_VALUE,
                f"the name of the engine and of its user take more than {NAME_BYTES_MAX} bytes",
                "choose a shorter name",
            )
        pool = self._claimed(request) or self._left(request) or self._make(request)
        pool.note_claim(request.claim, int(self._now_s()))
        return pool

    def _pool_in_use(self, request: ClaimPool, user: str) -> EnginePool:
        """The pool that an engine has, for a process that copies for it."""
        request, rank = _owned(request, user), request.rank or 0
        for pool in self._pools:
            is_meant = pool.head.pool_id == request.pool and _fits(pool, request) and rank < pool.head.ranks
            is_claimed = not pool.claim or pool.is_claimed_by(request.claim)  # or an earlier daemon was asked
            if is_meant and is_claimed and pool.head.devices[rank] == request.device:
                return pool
        raise request_error(
            ErrorCode.BAD_VALUE,
            f"no engine {request.name} has such memory of rank {rank} in the pool that is named",
            "ask as the engine's process did that has got the memory, and name its pool",
        )

    def _answer(self, pool: EnginePool, request: ClaimPool) -> Claimed:
        claimed = ClaimedPool(pool=pool.head.pool_id, rank_bytes=pool.head.rank_bytes, blocks=pool.head.blocks)
        return claimed, pool.descriptors(request.rank)

    def cleared(self, is_cleared: Callable[[bytes], bool]) -> None:
        """Drop what the pools hold of namespaces that are cleared; pools that no engine uses are given back."""
        for pool in self._pools[:]:
            if (namespace := pool.table.namespace) and is_cleared(namespace):
                pool.table.new_epoch()
                if not self._is_used(pool):
                    self._give_back(pool, "its namespace was cleared")

    def namespaces(self) -> set[bytes]:
        """The roots of the namespaces of which the pools hold blocks, as their engines say."""
        return {pool.table.namespace for pool in self._pools} - {b""}

    def stats(self) -> tuple[EnginePoolStats, ...]:
        """Every pool."""
        return tuple(
            EnginePoolStats(
                pool=pool.shown,
                name=pool.head.name,
                namespace=pool.table.namespace[:_SHOWN_BYTES].hex(),
                ranks=pool.head.ranks,
                size_bytes=pool.size_bytes,
                blocks=pool.head.blocks,
                named=pool.table.named,
                used=self._is_used(pool),
            )
            for pool in self._pools
        )

    def _claimed(self, request: ClaimPool) -> EnginePool | None:
        """The pool that another process of the same start has asked for."""
        for pool in self._pools:
            if pool.is_claimed_by(request.claim):
                if _fits(pool, request):
                    return pool
                raise request_error(
                    ErrorCode.WRONG_LAYOUT,
                    f"another process of this engine has asked for {pool.head.ranks} x "
                    f"{pool.head.rank_bytes} bytes of {pool.head.blocks} blocks "
                    f"{'on CUDA devices' if pool.is_on_cuda else 'on the CPU'}",
                    "ask for memory of the same size and kind on all ranks",
                )
        if request.rank is None:
            raise request_error(
                ErrorCode.BAD_VALUE,
                "the table alone is asked for, and no process of this engine has asked this daemon for memory",
                "ask for the memory of the ranks first",
            )
        return None

    def _left(self, request: ClaimPool) -> EnginePool | None:
        """The pool that an engine of this name has left, on the same device; the one used last, of several."""
        left = [
            pool for pool in self._pools
            if _fits(pool, request) and _device_of(pool, request) == request.device and not self._is_used(pool)
        ]  # fmt: skip
        return max(left, key=lambda pool: pool.record.used_s, default=None)

    def _is_used(self, pool: EnginePool) -> bool:
        """Whether a process of an engine has it; then it must stay."""
        return pool.is_locked or self._writers.has(pool)

    def _make(self, request: ClaimPool) -> EnginePool:
        size_bytes = table_bytes(request.blocks) + request.ranks * request.rank_bytes
        left_bytes = self._make_room(request.name, size_bytes)
        parts = 2 + request.ranks + sum(2 + pool.head.ranks for pool in self._pools)
        if left_bytes < size_bytes or parts > _DESCRIPTORS_MAX:
            raise request_error(
                ErrorCode.LIMIT,
                f"device memory for {request.name} takes {size_bytes} bytes, and {max(left_bytes, 0)} of "
                f"{self.limit_bytes} are left by the pools of other engines that live",
                "raise device_memory_bytes in the daemon's table [offload], or end another engine",
            )
        make, here_bytes = EnginePool.make, size_bytes
        if request.device:
            make, here_bytes = EnginePool.make_on_devices, table_bytes(request.blocks)
        try:
            check_available(here_bytes, f"device memory for {request.name}")
            pool = make(request.name, request.ranks, request.rank_bytes, request.blocks)
        except (NotEnoughMemory, OSError) as error:
            raise request_error(ErrorCode.LIMIT, str(error), "give the daemon more memory") from error
        for part, descriptor in pool.parts.items():
            store(_part_name(pool.shown, part), descriptor)
        self._pools.append(pool)
        _log.info("engine pool %s is made for %s: %d bytes", pool.shown, request.name, size_bytes)
        return pool

    async def _make_memory(self, pool: EnginePool, rank: int, device: str) -> None:
        """Make a rank's memory, in place of memory on another device, or that its device does not know.

        Raises:
            RequestError: it is being made already; or the device refused.
        """
        place = pool.head.pool_id, rank
        if place in self._making:
            raise request_error(ErrorCode.LIMIT, f"the memory of rank {rank} is being made", "wait for the answer")
        self._making.add(place)
        try:
            pool.drop(rank)
            remove(_part_name(pool.shown, 1 + rank))
            descriptor = await self._made(device, pool.head.rank_bytes, pool.head.name)
        finally:
            self._making.remove(place)
        if pool not in self._pools:
            os.close(descriptor)
            raise request_error(ErrorCode.LIMIT, "the pool was given back while its memory was made", "ask again")
        store(_part_name(pool.shown, 1 + rank), descriptor)
        pool.put(rank, descriptor, device)
        _log.info("engine pool %s has memory of rank %d on device %s", pool.shown, rank, device)

    async def _made(self, device: str, size_bytes: int, name: str) -> int:
        """New memory of a device, for which pools that no engine uses make room there."""
        while True:
            try:
                return await self._make_on_device(device, size_bytes)
            except NotEnoughMemory as error:
                idle = [pool for pool in self._idle(name) if device in pool.head.devices]
                if not idle:
                    raise _refused(error) from error
                self._give_back(idle[0], f"its room on device {device} is needed")
                await taken_in()
            except (DeviceError, OSError) as error:
                raise _refused(error) from error

    def _drop_empty(self, pool: EnginePool) -> None:
        """Give back a pool for which no memory could be made."""
        is_being_made = any(pool_id == pool.head.pool_id for pool_id, _ in self._making)
        if pool in self._pools and not any(pool.head.devices) and not is_being_made:
            self._give_back(pool, "there is no memory for it")

    def _idle(self, name: str) -> list[EnginePool]:
        """Pools that no engine uses, in the order in which they go: those of this name first, then the oldest."""
        idle = [pool for pool in self._pools if not self._is_used(pool)]
        return sorted(idle, key=lambda pool: (pool.head.name != name, pool.record.used_s))

    def _make_room(self, name: str, size_bytes: int) -> int:
        """Give back pools that no engine uses, as far as that is needed; the room that there is then."""
        idle = self._idle(name)
        left_bytes = self.limit_bytes - sum(pool.size_bytes for pool in self._pools)
        if size_bytes and left_bytes + sum(pool.size_bytes for pool in idle) < size_bytes:
            return left_bytes
        for pool in idle:
            if left_bytes >= size_bytes:
                break
            left_bytes += pool.size_bytes
            self._give_back(pool, "its room is needed")
        return left_bytes

    def _give_back(self, pool: EnginePool, why: str) -> None:
        _log.info("engine pool %s of %s is given back: %s", pool.shown, pool.head.name, why)
        self._pools.remove(pool)
        self._writers.forget(pool)
        names = [_part_name(pool.shown, part) for part in pool.parts]
        pool.close()
        _drop(names, ())


def _owned(request: ClaimPool, user: str) -> ClaimPool:
    """With the name of a user's engine; see `EnginePools.claim`."""
    return msgspec.structs.replace(request, name=f"{request.name} ({user})") if user else request


def _fits(pool: EnginePool, request: ClaimPool) -> bool:
    """Whether it has the sizes of a request, and, where that is for memory, is of the same kind."""
    is_same_kind = request.rank is None or pool.is_on_cuda == bool(request.device)
    return is_same_kind and pool.fits(request.name, request.ranks, request.rank_bytes, request.blocks)


def _device_of(pool: EnginePool, request: ClaimPool) -> str:
    """UUID of the CUDA device that has the memory of the rank which asks; empty on a CPU."""
    return pool.head.devices[request.rank or 0] if pool.is_on_cuda else ""


def _refused(error: Exception) -> RequestError:
    return request_error(
        ErrorCode.LIMIT,
        f"no memory of the CUDA device: {error}",
        "leave the device room beside what vLLM and other programs have there; the daemon's log says more"
        if isinstance(error, NotEnoughMemory)
        else "correct what is named, then start the engine again",
    )


def _part_name(pool_id: str, part: int) -> str:
    return f"{ENGINE_POOL_PREFIX}{pool_id}-{part}"


def _kept_parts(found: dict[str, list[int]]) -> Mapping[str, dict[int, list[int]]]:
    """The kept descriptors by pool and part, removed from `found`."""
    pools: dict[str, dict[int, list[int]]] = {}
    for name in [name for name in found if name.startswith(ENGINE_POOL_PREFIX)]:
        pool_id, _, part = name.removeprefix(ENGINE_POOL_PREFIX).rpartition("-")
        if not part.isdecimal():
            continue
        pools.setdefault(pool_id, {})[int(part)] = found.pop(name)
    return pools


def _drop(names: Iterable[str], descriptors: Iterable[int]) -> None:
    for name in names:
        remove(name)
    for descriptor in descriptors:
        os.close(descriptor)
