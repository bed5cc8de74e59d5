"""The engine pool of this vLLM: KV memory that belongs to the daemon, claimed, locked and mapped by each process.

A worker claims the memory of its rank when vLLM allocates its KV cache; the scheduler claims the table. The blocks in
the memory count only if all ranks have memory of the pool whose table the scheduler has locked. Otherwise vLLM works on
the memory as on any other, and the workers drop the table's rows before they write a block.

On a CUDA device, vLLM has scratch memory at the addresses of its KV cache until it has warmed up.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from kvcached_client.blocks.engine_table import EngineTable, table_bytes
from kvcached_client.blocks.mapping import Buffer, map_sealed
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.copy_process.engine_memory import EngineMemory
from kvcached_client.copy_process.messages import PoolClaim
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import PoolDescriptors, claim_pool, close_all
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.vllm.settings import KvCacheConfig, Settings, VllmConfig, parallel_label, shards_of

if TYPE_CHECKING:
    from kvcached_client.cuda.engine_pool import EnginePoolMemory
    from kvcached_client.cuda.mapping import CudaArray

#: How long a process waits for the daemon, also while it makes memory on a device, and for the death of the process
#: that has its memory.
CLAIM_MS_MAX: Final = 5000
CLAIM_ON_DEVICE_MS_MAX: Final = 90_000
LOCK_S_MAX: Final = 10.0
_TEXT_MAX: Final = 128

log = logging.getLogger("vllm.kvcached")


def own_device(kind: str, current_device: Callable[[], int]) -> str:
    """UUID of the CUDA device that this worker computes on; empty on a CPU.

    Args:
        kind: of the device, "cpu" or "cuda".
        current_device: its number, if it is a CUDA device.

    Raises:
        DeviceError: this process cannot use it.
    """
    if kind == "cpu":
        return ""
    from kvcached_client.cuda.device import uuid_of  # noqa: PLC0415 - only workers on a device need the driver

    return uuid_of(current_device())


def pool_question(config: VllmConfig, cache: KvCacheConfig, rank: int | None = None, device: str = "") -> ClaimPool:
    """What a process of this vLLM asks the daemon for: a rank on a CPU, or on the CUDA device with a UUID."""
    model = Path(config.model_config.model).name
    ranks = shards_of(config)
    return ClaimPool(
        name=f"{model} {parallel_label(config)}"[-_TEXT_MAX:],
        claim=config.kv_transfer_config.engine_id[-_TEXT_MAX:],
        ranks=ranks,
        rank=rank,
        rank_bytes=cache.kv_cache_tensors[0].size,
        blocks=cache.num_blocks,
        device=device,
    )


class MappedTable:
    """A table of an engine pool, mapped.

    Attributes:
        pool_id: of the pool.
        table: the table.
    """

    def __init__(self, found: PoolDescriptors) -> None:
        """Map it.

        Raises:
            KvcachedError: it cannot be mapped.
        """
        self.pool_id = found.claimed.pool
        blocks = found.claimed.blocks
        mapped = map_sealed(found.table, table_bytes(blocks), mmap.PROT_READ | mmap.PROT_WRITE)
        self.table = EngineTable(memoryview(mapped), blocks)


def claim_table(question: ClaimPool, settings: Settings) -> MappedTable | None:
    """The table of this vLLM's pool, locked for this process; None, with a warning, if there is none."""
    found = _claim(question, settings)
    if found is None:
        return None
    try:
        return MappedTable(found) if _lock(found.table) else None
    except (KvcachedError, OSError) as error:
        log.warning("kvcached: the table of the device memory cannot be used: %s", error)
        return None
    finally:
        _close(found)


class RankMemory:
    """The KV memory of one worker.

    Args:
        question: what to ask the daemon for.
        settings: of the connector.
    """

    def __init__(self, question: ClaimPool, settings: Settings) -> None:
        self._question = question
        self._settings = settings
        self._asked = 0
        self._mapped: MappedTable | None = None
        self._on_device: EnginePoolMemory | None = None  #: as long as vLLM has scratch memory there
        self._place = range(0)
        self._is_tracked = True

    def allocate(self, size_bytes: int) -> Buffer | CudaArray | None:
        """Memory for vLLM's KV cache; None, with a warning, where vLLM must allocate it itself."""
        self._asked += 1
        if size_bytes != self._question.rank_bytes or self._asked > 1:
            log.warning("kvcached: vLLM allocates its KV cache in another way than expected; it has its own memory")
            return None
        found = _claim(self._question, self._settings)
        if found is None or found.memory is None:
            return None
        try:
            memory = self._take_on_device(found) if self._question.device else self._take(found)
        except (KvcachedError, OSError) as error:
            log.warning("kvcached: the daemon's device memory cannot be used, vLLM has its own: %s", error)
            return None
        if memory is not None:
            log.info("kvcached: the KV cache is in memory of the daemon: %d bytes", size_bytes)
        return memory

    def pool_id(self, addresses: list[int]) -> bytes:
        """The pool of the memory; empty if vLLM's tensors, which begin at these addresses, are not all in it.

        vLLM has warmed up when it asks for this.
        """
        self._end_warm_up()
        mapped = self._mapped_at(addresses)
        return b"" if mapped is None else mapped.pool_id

    def of_copies(self, addresses: list[int]) -> EngineMemory | None:
        """The memory for a process that copies; None if it is on the CPU, or the tensors are not in it.

        Args:
            addresses: where vLLM's tensors begin.
        """
        mapped = self._mapped_at(addresses)
        if mapped is None or not self._question.device:
            return None
        question = msgspec.structs.replace(self._question, pool=mapped.pool_id)
        return EngineMemory(-1, self._place.start, len(self._place), PoolClaim(str(_run_dir(self._settings)), question))

    def begin_step(self, *, is_tracked: bool) -> None:
        """Drop all rows of the table before a step that writes blocks without a scheduler that clears their rows."""
        self._end_warm_up()
        if is_tracked or not self._is_tracked or self._mapped is None:
            return
        self._is_tracked = False
        self._mapped.table.new_epoch()

    def _mapped_at(self, addresses: list[int]) -> MappedTable | None:
        """The table of the memory; None if not all tensors begin there."""
        is_here = self._asked == 1 and all(address in self._place for address in addresses)
        return self._mapped if is_here else None

    def _take(self, found: PoolDescriptors) -> Buffer | None:
        """Memory on the CPU, locked and mapped; None if another process has it. The descriptors are closed."""
        try:
            if found.memory is None or not _lock(found.memory):
                return None
            mapped = MappedTable(found)
            memory = map_sealed(found.memory, self._question.rank_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        finally:
            _close(found)
        self._mapped, self._place = mapped, _place(memory)
        return memory

    def _take_on_device(self, found: PoolDescriptors) -> CudaArray | None:
        """Memory on a CUDA device, locked, and not mapped yet; as `_take`."""
        from kvcached_client.cuda.engine_pool import MemoryUnknown  # noqa: PLC0415 - only memory on a device needs it

        try:
            if not _lock(found.table, self._question.rank):
                return None
            return self._use(found)
        except MemoryUnknown as error:
            log.warning("kvcached: the device does not know the memory that the daemon has kept: %s", error)
        finally:
            _close(found)
        renewed = _claim(msgspec.structs.replace(self._question, renew=True), self._settings)
        if renewed is None:
            return None
        try:
            return self._use(renewed)
        finally:
            _close(renewed)

    def _use(self, found: PoolDescriptors) -> CudaArray | None:
        """Have scratch memory where the pool's will be."""
        from kvcached_client.cuda.engine_pool import EnginePoolMemory  # noqa: PLC0415 - as above
        from kvcached_client.cuda.mapping import CudaArray  # noqa: PLC0415 - as above

        if found.memory is None:
            return None
        size_bytes, mapped = self._question.rank_bytes, MappedTable(found)
        memory = EnginePoolMemory(found.memory, size_bytes, self._question.device)
        self._mapped, self._on_device = mapped, memory
        self._place = range(memory.address, memory.address + size_bytes)
        return CudaArray(memory, "|i1", (size_bytes,), 0, (1,))

    def _end_warm_up(self) -> None:
        """Let vLLM have the pool's memory from now on. New memory is zeroed, as vLLM expects of its own.

        Raises:
            CudaFailure: the driver refused: vLLM has no KV cache now.
        """
        memory, self._on_device = self._on_device, None
        if memory is not None and self._mapped is not None:
            memory.open(is_new=not self._mapped.table.named)


def _place(memory: Buffer) -> range:
    address = ctypes.addressof(memory)
    return range(address, address + len(memory))


def _run_dir(settings: Settings) -> Path:
    return Path(settings.run_dir or default_run_dir()).absolute()


def _claim(question: ClaimPool, settings: Settings) -> PoolDescriptors | None:
    try:
        deadline_ms = CLAIM_ON_DEVICE_MS_MAX if question.device else CLAIM_MS_MAX
        found = claim_pool(_run_dir(settings), question, deadline_ms=deadline_ms)
    except (KvcachedError, OSError) as error:
        log.warning("kvcached: no device memory from the daemon, vLLM has its own, cold after a restart: %s", error)
        return None
    if (found.claimed.rank_bytes, found.claimed.blocks) == (question.rank_bytes, question.blocks):
        return found
    log.warning("kvcached: the daemon's device memory has another size than was asked for; vLLM has its own")
    _close(found)
    return None


def _lock(descriptor: int, rank: int | None = None) -> bool:
    """Lock memory, or the place of a rank in the table, until this process is dead."""
    if lock_memory(descriptor, LOCK_S_MAX, rank) is not None:
        return True
    log.warning(
        "kvcached: another living process has the device memory that the daemon keeps for this engine: vLLM has its own"
    )
    return False


def _close(found: PoolDescriptors) -> None:
    close_all([each for each in (found.table, found.memory) if each is not None])
