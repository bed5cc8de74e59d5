"""The longest branch of a chain that the host pool holds: where a hit may end that needs states.

The daemon knows chains only, and finds the longest prefix of one. Behind a hit on a chain, each boundary is a branch of
its own, so the branches are asked for one by one, from the end of the hit, some at a time. As vLLM keeps states where a
later prompt may continue, the first answer mostly is the one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kvcached_client.offload import Hold
from kvcached_client.types import KEY_SIZE_BYTES
from kvcached_client.vllm.daemon.client import Client
from kvcached_client.vllm.daemon.commands import Branches, Seek

#: Questions that are sent before the first answer is awaited.
BRANCHES_TOGETHER: Final = 8
#: How many branches are asked for behind one hit. Tokens behind the last of them are computed.
BRANCHES_MAX: Final = 64


def acquire_branch(seek: Seek, branches: Branches, hold: Hold, client: Client) -> Hold | None:
    """Exchange a lease on a chain for one on the chain's longest branch within the hit, with a load of all of it.

    Returns:
        The new lease; None if there is no such branch, or it cannot be loaded: then the old one is kept.
    """
    keys = _longest(seek.keys, branches, hold.hit, client)
    if keys is None:
        return None
    tokens = branches.tokens_of(keys)
    found = client.begin_acquire(
        branches.name, keys, tokens, full=True, priority=seek.priority, tenant=seek.tenant, load_from=0
    ).result()
    if found.load is None or found.hit * KEY_SIZE_BYTES != len(keys):  # it was evicted meanwhile, or copies are paused
        if found.load is not None:
            client.cancel_load(found.load.transfer)
        client.post_release(found.lease)
        return None
    client.post_release(hold.lease)
    return found


def _longest(chain: bytes, branches: Branches, hit: int, client: Client) -> bytes | None:
    for ends in _groups(branches.units_of(hit)):
        candidates = [branches.behind(units, chain) for units in ends]
        asked = [client.begin_match(keys, branches.tokens_of(keys), full=True) for keys in candidates]
        counts = [each.result() for each in asked]
        for keys, count in zip(candidates, counts, strict=True):
            if count * KEY_SIZE_BYTES == len(keys):
                return keys
    return None


def _groups(last: int) -> Iterator[range]:
    """Numbers of units, from the last one down."""
    for top in range(last, max(last - BRANCHES_MAX, 0), -BRANCHES_TOGETHER):
        yield range(top, max(top - BRANCHES_TOGETHER, 0), -1)
