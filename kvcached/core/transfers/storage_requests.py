"""What engines ask of the storage tier."""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.checks import check_alive, hit_limit
from kvcached.core.index.run import KEY_SIZE
from kvcached.core.transfers.storage_state import Prefetch
from kvcached_client.types import SessionId


def prefetch(
    cache: Cache, session_id: SessionId, epoch: int, keys: bytes, tokens: int, rate: float, *, full: bool
) -> Prefetch:
    """Begin to bring a prompt's blocks from storage into the host pool.

    Args:
        cache: where.
        session_id: of the engine.
        epoch: of its pool; says nothing in offload mode.
        keys: of the prompt's full blocks.
        tokens: of the prompt.
        rate: tokens per second that the engine computes in its prefill; 0 = not known, and storage is used always.
        full: as in `acquire`.

    Raises:
        Refusal: stale, or keys and tokens contradict each other.
    """
    offload = cache.offload.sessions.get(session_id)
    if offload is not None:
        check_alive(session_id, offload.state, cache.session_ttl_ms)
        tree, block_tokens = offload.namespace.tree, offload.namespace.spec.block_size
        limit = hit_limit(len(keys) // KEY_SIZE, block_tokens, tokens, full=full)
        run, depth = tree.root, 0
    else:
        session = cache.checks.session_at(session_id, epoch)
        tree, block_tokens = session.tree, cache.checks.block_sizes[session.pool.name]
        limit = cache.checks.hit_limit(session, keys, tokens, full=full)
        run, depth = tree.match(keys, limit, session.pool.index)
    depth = tree.match_host(run, depth, keys, limit)[1]
    return cache.storage.prefetch(session_id, tree, keys, depth, limit, block_tokens, rate)


def stop(cache: Cache, under_way: Prefetch) -> None:
    """Nobody waits for the rest of a prefetch: what has been begun comes, and nothing else."""
    cache.storage.prefetches.stop(under_way)
