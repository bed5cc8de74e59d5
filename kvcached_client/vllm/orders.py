"""Orders that the scheduler's side sends to the workers with each step, and what comes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.jobs import BlockJob, JobSpan
from kvcached_client.types import KEY_SIZE_BYTES

#: (session number, transfer id) of a store: a daemon that was restarted uses transfer ids again.
StoreId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SessionNote:
    """The session that workers join, if they have not joined it yet.

    Attributes:
        number: counts the sessions of this engine; each order contains the number of its session.
        grant: `SessionGrant.to_bytes()`, a secret.
    """

    number: int
    grant: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """An order to load blocks for one request.

    Attributes:
        session: number of the job's session.
        request: vLLM's id of the request.
        job: blocks to copy.
    """

    session: int
    request: str
    job: BlockJob


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """An order to store blocks. The scheduler's side holds the blocks until every worker has reported the store."""

    session: int
    job: BlockJob

    @property
    def id(self) -> StoreId:
        """Id of the store in the workers' reports."""
        return self.session, self.job.transfer


@dataclass(frozen=True, slots=True)
class StepOrders:
    """All orders of a step, the same for every worker."""

    session: SessionNote | None = None
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()


@dataclass(slots=True)
class StoreReport:
    """Stores that workers have ended.

    Attributes:
        done: how many workers have ended each store.
        failed: stores among them that failed on a worker.
    """

    done: dict[StoreId, int]
    failed: set[StoreId]


@dataclass(slots=True)
class CopyCounts:
    """Numbers of copied and failed blocks, and the time of the copies. vLLM computes blocks whose load failed."""

    loaded_blocks: int = 0
    load_failed_blocks: int = 0
    load_seconds: float = 0.0
    stored_blocks: int = 0
    store_failed_blocks: int = 0
    store_seconds: float = 0.0


_FEW: Final = 16
#: So much of a hash is in the key of a block of several groups.
GROUP_HASH_BYTES: Final = KEY_SIZE_BYTES - 1


def group_key(block_hash: bytes, group: int) -> bytes:
    """The key of a group's block, by the hash of the last tokens in it."""
    return block_hash[:GROUP_HASH_BYTES] + bytes([group])


def pack_keys(hashes: Sequence[bytes], start: int, stop: int) -> bytes:
    """The first 16 bytes of each hash, back to back."""
    if stop - start <= _FEW:  # most offers: for few keys, numpy is slower
        return b"".join([block_hash[:KEY_SIZE_BYTES] for block_hash in hashes[start:stop]])
    joined = b"".join(hashes[start:stop])
    size = len(hashes[0])
    return np.frombuffer(joined, np.uint8).reshape(-1, size)[:, :KEY_SIZE_BYTES].tobytes()


def job_span(hashes: Sequence[bytes], start: int, block_ids: Sequence[int], slots: npt.NDArray[np.int32]) -> JobSpan:
    """The span of a request's blocks from depth `start` on, one block for each of `block_ids`, with their slots."""
    has_parent = min(start, 1)
    keys = pack_keys(hashes, start - has_parent, start + len(block_ids))
    cut = has_parent * KEY_SIZE_BYTES
    return JobSpan(depth=start, parent=keys[:cut], keys=keys[cut:], blocks=np.array(block_ids, np.int32), slots=slots)
