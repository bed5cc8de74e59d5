"""What became of a request to the workers, on each shard and as a whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import ShardIndex


class ShardResult(NamedTuple):
    """What became of a request on one shard. Nothing of it goes on there any more."""

    shard: ShardIndex
    error: str = ""  #: why it failed; empty where it was carried out
    corrupt: tuple[int, ...] = ()  #: of a load: blocks, counted through its spans, that are not what was stored
    is_lost: bool = False  #: the worker died before it reported


def failure(what: str, results: Sequence[ShardResult]) -> RequestError | None:
    """The error of a request that failed on some shard; None where it failed on none."""
    failures = [result for result in results if result.error]
    if not failures:
        return None
    reasons = "; ".join(f"shard {each.shard}: {each.error}" for each in failures)
    code = ErrorCode.WORKER_LOST if failures[0].is_lost else ErrorCode.INTERNAL
    return request_error(code, f"{what}: {reasons}", "see the worker's log")
