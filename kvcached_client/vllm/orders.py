"""What the scheduler's side tells the workers with each step, and what they report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.blocks.transfers import BlockJob, JobSpan
from kvcached_client.types import KEY_SIZE_BYTES

#: Which store of which session a worker reports on: transfer ids are used again by a daemon that was started anew.
StoreId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class SessionNote:
    """The session that workers are to join, if they have not.

    Attributes:
        number: counts the sessions of this engine; jobs name theirs by it.
        grant: `SessionGrant.to_bytes()`, a secret.
    """

    number: int
    grant: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class LoadOrder:
    """A load, for one request.

    Attributes:
        session: number of the session that the job is of.
        request: vLLM's id.
        job: what to copy.
    """

    session: int
    request: str
    job: BlockJob


@dataclass(frozen=True, slots=True)
class StoreOrder:
    """A store. Its blocks are held by the scheduler until every worker has reported it."""

    session: int
    job: BlockJob

    @property
    def id(self) -> StoreId:
        """What workers report it by."""
        return self.session, self.job.transfer


@dataclass(frozen=True, slots=True)
class StepOrders:
    """What goes to every worker with a step."""

    session: SessionNote | None = None
    loads: tuple[LoadOrder, ...] = ()
    stores: tuple[StoreOrder, ...] = ()


_FEW: Final = 16


def pack_keys(hashes: Sequence[bytes], start: int, stop: int) -> bytes:
    """The first 16 bytes of each hash, back to back."""
    if stop - start <= _FEW:  # most offers: an array costs more than it saves
        return b"".join([block_hash[:KEY_SIZE_BYTES] for block_hash in hashes[start:stop]])
    joined = b"".join(hashes[start:stop])
    size = len(hashes[0])
    return np.frombuffer(joined, np.uint8).reshape(-1, size)[:, :KEY_SIZE_BYTES].tobytes()


def job_span(hashes: Sequence[bytes], start: int, block_ids: Sequence[int], slots: npt.NDArray[np.int32]) -> JobSpan:
    """The blocks of a request from depth `start` on, as many as there are `block_ids`, and one slot for each."""
    has_parent = min(start, 1)
    keys = pack_keys(hashes, start - has_parent, start + len(block_ids))
    cut = has_parent * KEY_SIZE_BYTES
    return JobSpan(depth=start, parent=keys[:cut], keys=keys[cut:], blocks=np.array(block_ids, np.int32), slots=slots)
