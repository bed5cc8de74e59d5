"""The scheduler's side of this vLLM's engine pool: whose blocks are adopted, and what names the table from then on."""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final, NamedTuple

from kvcached_client.blocks.engine_table import EngineTable
from kvcached_client.engines.weights import ReadingStopped
from kvcached_client.offload import OffloadLayout
from kvcached_client.protocol.attach import ClaimPool
from kvcached_client.protocol.offload import offload_root
from kvcached_client.vllm.computed_steps import NEVER
from kvcached_client.vllm.device_memory import claim_table
from kvcached_client.vllm.identity import Identity
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks
from kvcached_client.vllm.scheduling.request_state import CacheManager, Step
from kvcached_client.vllm.settings import Settings

_PERSON: Final = b"kvcached device1"

log = logging.getLogger("vllm.kvcached")


class KnownIdentity:
    """The identity of this engine. It is made once, by whoever asks first; others wait.

    Attributes:
        known: the identity, once it is made.
    """

    def __init__(self, identify: Callable[[], Identity]) -> None:
        self.known: Identity | None = None
        self._identify = identify
        self._lock = threading.Lock()

    def __call__(self) -> Identity:
        """The identity. Raises as `EngineDescription.identify`."""
        with self._lock:
            if self.known is None:
                self.known = self._identify()
            return self.known


class Engine(NamedTuple):
    """What this vLLM computes with.

    Attributes:
        layout: of its namespace.
        identify: its identity.
        version: of vLLM and of torch: what lies in device memory is theirs.
        block_sizes: tokens of a block, of each group of layers.
    """

    layout: OffloadLayout
    identify: KnownIdentity
    version: str
    block_sizes: Sequence[int]


class DeviceTable:
    """The table of this vLLM's engine pool, while vLLM runs.

    Args:
        table: locked for this process.
        blocks: names blocks in it.
        engine: what it computes with.
        ranks: how many workers there are.
    """

    def __init__(self, table: EngineTable, blocks: DeviceBlocks, engine: Engine, ranks: int) -> None:
        self._table = table
        self._blocks = blocks
        self._engine = engine
        self._ranks = ranks
        self._computed: dict[int, int] = {}  #: the last step that each rank has computed
        self._is_identified = False

    def adopt(self) -> int:
        """Have vLLM find what an earlier vLLM has left, if it computed the same; returns the number of blocks.

        Waits for the engine's identity if there is anything: at worst until all weight files are read.
        """
        earlier = self._table.identity
        if earlier and self._table.named and self._is_same(earlier):
            self._is_identified = True
            return self._blocks.adopt()
        self._table.forget()
        return 0

    def step(self, step: Step) -> int:
        """Note a step; returns its number."""
        if not self._is_identified and (known := self._engine.identify.known) is not None:
            self._table.identify(*self._names(known))
            self._is_identified = True
        return self._blocks.step(step)

    def arrived(self, request_id: str) -> None:
        """See `DeviceBlocks.arrived`."""
        self._blocks.arrived(request_id)

    def allocated(self, request_id: str, *, is_loading: bool) -> None:
        """See `DeviceBlocks.allocated`."""
        self._blocks.allocated(request_id, is_loading=is_loading)

    def computed(self, steps: Mapping[int, int]) -> None:
        """Note the last step that ranks have computed. Ranks that are not named have computed no more than before."""
        self._computed.update(steps)
        if NEVER in self._computed.values():
            self._blocks.stop()
        elif len(self._computed) == self._ranks:
            self._blocks.computed(min(self._computed.values()))

    def step_over(self) -> None:
        """See `DeviceBlocks.step_over`."""
        self._blocks.step_over()

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are named once further steps have been reported."""
        return self._blocks.is_waiting

    def finished(self, request_id: str) -> None:
        """See `DeviceBlocks.finished`."""
        self._blocks.finished(request_id)

    def forget(self, blocks: Collection[int]) -> None:
        """See `DeviceBlocks.forget`."""
        self._blocks.forget(blocks)

    def _is_same(self, earlier: bytes) -> bool:
        try:
            identity, _ = self._names(self._engine.identify())
        except ReadingStopped:
            return False
        if identity != earlier:
            log.info("kvcached: the device memory holds blocks of other weights or settings: they are dropped")
        return identity == earlier

    def _names(self, known: Identity) -> tuple[bytes, bytes]:
        """Digest of everything that blocks in device memory depend on, and the root of their namespace."""
        layout = self._engine.layout
        root = offload_root(
            known.keyspace,
            layout.fingerprint,
            layout.block_size,
            layout.shards,
            layout.block_bytes,
            replicated=layout.replicated,
            canonical=layout.canonical,
        )
        digest = hashlib.blake2b(root + self._engine.version.encode(), digest_size=32, person=_PERSON).digest()
        return digest, root


def open_table(
    question: ClaimPool,
    settings: Settings,
    pool_ids: Collection[bytes],
    manager: CacheManager,
    engine: Engine,
) -> DeviceTable | None:
    """The table of this vLLM's engine pool, with what is adopted; None if a rank has other memory than this pool's.

    Args:
        question: for the daemon.
        settings: of the connector.
        pool_ids: the engine pool that each rank has its memory of; empty for other memory.
        manager: of vLLM's blocks.
        engine: what it computes with.
    """
    if not any(pool_ids):
        return None  # as the workers have warned
    mapped = claim_table(question, settings)
    if mapped is None or set(pool_ids) != {mapped.pool_id}:
        log.warning("kvcached: not all ranks have their KV cache in the daemon's memory: it is cold after a restart")
        return None
    blocks = DeviceBlocks(
        mapped.table, manager.block_pool, engine.block_sizes, lambda request_id: manager.get_blocks(request_id).blocks
    )
    table = DeviceTable(mapped.table, blocks, engine, len(pool_ids))
    adopted = table.adopt()
    log.info("kvcached: %d of %d blocks of device memory are warm", adopted, question.blocks)
    return table
