"""What vLLM transports between the connector's processes: pages at the start, orders with each step, and reports."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from kvcached_client.blocks.host_layout import CanonicalLayout
from kvcached_client.vllm.orders import StepOrders, StoreId


@dataclass
class KvcachedPages(KVConnectorHandshakeMetadata):  # type: ignore[misc]
    """A worker's description of its tensors, its first message to the scheduler.

    Attributes:
        blocks: number of blocks.
        block_bytes: bytes of one block, all layers.
        page_bytes: bytes of one block, by layer.
        fingerprint: fingerprint of the order of bytes in a block.
        pool_id: the engine pool that the tensors are in; empty if they are in memory of the worker.
        canonical: the layout in which storage may hold the blocks; None if they have none.
    """

    blocks: int
    block_bytes: int
    page_bytes: tuple[int, ...]
    fingerprint: bytes
    pool_id: bytes = b""
    canonical: CanonicalLayout | None = None


@dataclass
class KvcachedOrders(KVConnectorMetadata):  # type: ignore[misc]
    """The orders of a step, from the scheduler to the workers.

    Attributes:
        orders: what to load and to store.
        number: of the step, which workers report when they have computed it; 0 if the scheduler keeps no table of
            blocks in memory of the daemon.
    """

    orders: StepOrders
    number: int = 0


@dataclass
class KvcachedReport(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """The workers' report of a step.

    Attributes:
        stored: how many workers have ended each store.
        failed: stores that failed.
        computed: the last step that each rank has computed, if workers are to report it; `NEVER` of a rank that will
            not know any more.
    """

    stored: dict[StoreId, int]
    failed: set[StoreId]
    computed: dict[int, int] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Combine two workers' reports."""
        stored = dict(Counter(self.stored) + Counter(other.stored))
        return KvcachedReport(stored, self.failed | other.failed, {**self.computed, **other.computed})
