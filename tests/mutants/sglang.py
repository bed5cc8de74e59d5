"""Mistakes of SGLang's storage."""

from __future__ import annotations

import pytest

from kvcached_client.engines.one_process import OneProcessEngine
from kvcached_client.sglang import hooks, identity
from kvcached_client.sglang.identity import ModelDescription
from kvcached_client.sglang.page_store import PageStore
from tests.mutants.mutant import caught_by, rewrite

_TESTS = "tests/sglang/test_storage.py"
_SIDE_POOLS = "tests/sglang/test_side_pools.py"


@caught_by(f"{_TESTS}::test_sglang_asks_with_whole_prefixes")
def sglang_asks_with_a_gap(patch: pytest.MonkeyPatch) -> None:
    """Of prompts that begin alike, SGLang finds only the first after a restart."""
    rewrite(patch, hooks.prefix_of, ", *tree.get_hash_values(node)]", "]")


@caught_by(f"{_TESTS}::test_ranks_share_nothing_unless_they_hold_the_same")
def sglang_ranks_share_pages(patch: pytest.MonkeyPatch) -> None:
    """A rank loads the heads of another rank."""
    rewrite(patch, ModelDescription.keyspace, '"part": part,', "")


@caught_by(f"{_TESTS}::test_damaged_page_ends_what_is_loaded")
def sglang_uses_damaged_pages(patch: pytest.MonkeyPatch) -> None:
    """SGLang computes with pages whose bytes have changed."""
    rewrite(patch, PageStore.load, "return min(bad, default=count)", "return count")


@caught_by(f"{_SIDE_POOLS}::test_windows_come_back_whole_or_not")
def sglang_uses_parts_of_windows(patch: pytest.MonkeyPatch) -> None:
    """SGLang computes with a window of which only the last page was stored."""
    rewrite(patch, PageStore.ends, "range(max(end - window, 0), end)", "range(end - 1, end)")


@caught_by(f"{_SIDE_POOLS}::test_states_are_each_ranks_own")
def sglang_ranks_share_states(patch: pytest.MonkeyPatch) -> None:
    """A rank loads the state of another rank."""
    rewrite(patch, identity.pool_keyspace, "name, rank]", "name]")


@caught_by(f"{_TESTS}::test_refused_request_keeps_the_session")
def refused_request_ends_the_session(patch: pytest.MonkeyPatch) -> None:
    """After each refusal, which says nothing of the daemon's health, nothing is stored for five seconds."""
    rewrite(
        patch,
        OneProcessEngine.guarded,
        "isinstance(error, RequestError) and not isinstance(error, (Stale, DaemonFailure))",
        "False",
    )
