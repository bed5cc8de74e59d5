"""The engine pool of this vLLM: KV memory that belongs to the daemon, claimed, locked and mapped by each process.

A worker claims the memory of its rank when vLLM allocates its KV cache; the scheduler claims the table. The blocks in
the memory count only if all ranks have memory of the pool whose table the scheduler has locked. Otherwise vLLM works on
the memory as on any other, and the workers drop the table's rows before they write a block.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
from pathlib import Path
from typing import Final

from kvcached_client.blocks.engine_table import EngineTable, table_bytes
from kvcached_client.blocks.mapping import Buffer, map_sealed
from kvcached_client.blocks.memory_locks import lock_memory
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.transport.attach import PoolDescriptors, claim_pool, close_all
from kvcached_client.transport.run_dir import default_run_dir
from kvcached_client.vllm.settings import KvCacheConfig, Settings, VllmConfig

#: How long a process waits for the daemon, and for the death of the process that has its memory.
CLAIM_MS_MAX: Final = 5000
LOCK_S_MAX: Final = 10.0
_TEXT_MAX: Final = 128

log = logging.getLogger("vllm.kvcached")


def pool_question(config: VllmConfig, cache: KvCacheConfig, rank: int | None = None) -> ClaimPool:
    """What a process of this vLLM asks the daemon for."""
    model = Path(config.model_config.model).name
    ranks: int = config.parallel_config.tensor_parallel_size
    return ClaimPool(
        name=f"{model} tp{ranks}"[-_TEXT_MAX:],
        claim=config.kv_transfer_config.engine_id[-_TEXT_MAX:],
        ranks=ranks,
        rank=rank,
        rank_bytes=cache.kv_cache_tensors[0].size,
        blocks=cache.num_blocks,
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
        self._place = range(0)
        self._is_tracked = True

    def allocate(self, size_bytes: int) -> Buffer | None:
        """Memory for vLLM's KV cache; None, with a warning, where vLLM must allocate it itself."""
        self._asked += 1
        if size_bytes != self._question.rank_bytes or self._asked > 1:
            log.warning("kvcached: vLLM allocates its KV cache in another way than expected; it has its own memory")
            self._mapped = None
            return None
        found = _claim(self._question, self._settings)
        if found is None or found.memory is None:
            return None
        try:
            if not _lock(found.memory):
                return None
            mapped = MappedTable(found)
            memory = map_sealed(found.memory, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
        except (KvcachedError, OSError) as error:
            log.warning("kvcached: the daemon's device memory cannot be used, vLLM has its own: %s", error)
            return None
        finally:
            _close(found)
        self._mapped, self._place = mapped, _place(memory)
        log.info("kvcached: the KV cache is in memory of the daemon: %d bytes", size_bytes)
        return memory

    def pool_id(self, addresses: list[int]) -> bytes:
        """The pool of the memory; empty if vLLM's tensors, which begin at these addresses, are not all in it."""
        if self._mapped is None or not all(address in self._place for address in addresses):
            return b""
        return self._mapped.pool_id

    def begin_step(self, *, is_tracked: bool) -> None:
        """Drop all rows of the table before a step that writes blocks without a scheduler that clears their rows."""
        if is_tracked or not self._is_tracked or self._mapped is None:
            return
        self._is_tracked = False
        self._mapped.table.new_epoch()


def _place(memory: Buffer) -> range:
    address = ctypes.addressof(memory)
    return range(address, address + len(memory))


def _claim(question: ClaimPool, settings: Settings) -> PoolDescriptors | None:
    run_dir = Path(settings.run_dir or default_run_dir()).absolute()
    try:
        found = claim_pool(run_dir, question, deadline_ms=CLAIM_MS_MAX)
    except (KvcachedError, OSError) as error:
        log.warning("kvcached: no device memory from the daemon, vLLM has its own, cold after a restart: %s", error)
        return None
    if (found.claimed.rank_bytes, found.claimed.blocks) == (question.rank_bytes, question.blocks):
        return found
    log.warning("kvcached: the daemon's device memory has another size than was asked for; vLLM has its own")
    _close(found)
    return None


def _lock(descriptor: int) -> bool:
    """Lock memory until this process is dead."""
    if lock_memory(descriptor, LOCK_S_MAX) is not None:
        return True
    log.warning(
        "kvcached: another living process has the device memory that the daemon keeps for this engine: vLLM has its own"
    )
    return False


def _close(found: PoolDescriptors) -> None:
    close_all([each for each in (found.table, found.memory) if each is not None])
