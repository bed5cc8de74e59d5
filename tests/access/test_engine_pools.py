"""Device memory that outlives engines, and engines of several users."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcached.recovery.engine_pools import EnginePools
from kvcached_client.errors import RequestError
from kvcached_client.protocol.attach import ClaimPool


def claim(name: str = "model tp1", claim: str = "one") -> ClaimPool:
    return ClaimPool(name=name, claim=claim, ranks=1, rank=0, rank_bytes=1 << 16, blocks=4)


@pytest.fixture
def pools() -> Iterator[EnginePools]:
    made = EnginePools(1 << 24)
    yield made
    made.close()


def test_nobody_gets_the_memory_that_another_users_engine_has_left(pools: EnginePools) -> None:
    """An engine finds the memory of its own user's last engine, and no other user's, whatever name it says."""
    first = pools.claim(claim(claim="a"), "user 7")[0].pool

    assert pools.claim(claim(claim="b"), "user 7")[0].pool == first
    assert pools.claim(claim(claim="c"), "user 8")[0].pool != first
    assert pools.claim(claim("model tp1 (user 7)", claim="d"), "user 8")[0].pool != first
    assert pools.claim(claim(claim="e"))[0].pool != first


def test_another_users_start_is_not_joined(pools: EnginePools) -> None:
    """Who knows the claim of another user's engine is refused its memory."""
    pools.claim(claim(claim="a"), "user 7")

    with pytest.raises(RequestError, match="another process of this engine"):
        pools.claim(claim(claim="a"), "user 8")
