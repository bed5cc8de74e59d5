"""From vLLM's block hashes and block ids to what workers copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from kvcached_client.block_job import JobSpan
from kvcached_client.types import KEY_SIZE_BYTES

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
