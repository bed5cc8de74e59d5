"""Mistakes about quotas of tenants."""

from __future__ import annotations

import pytest

from kvcached.core.eviction.by_tenant import ByTenant
from kvcached.core.index.host_tree import HostTree
from kvcached.core.index.run_tree import RunTree
from kvcached.core.managed import Managed
from kvcached.core.transfers.prefetch import Prefetches
from kvcached.core.transfers.storage_state import Prefetch
from tests.mutants.mutant import caught_by, rewrite


@caught_by("tests/core/test_tenants.py::test_tenant_at_its_cap_loses_its_own_oldest_blocks")
def cap_of_a_tenant_evicts_others(patch: pytest.MonkeyPatch) -> None:
    """A tenant at its cap makes room for itself among the blocks of all tenants."""
    rewrite(patch, HostTree.reserve_host, "only=True", "only=False")


@caught_by("tests/core/test_tenants.py::test_floor_is_kept_from_others_and_not_from_its_tenant")
def floor_of_a_tenant_is_overshot(patch: pytest.MonkeyPatch) -> None:
    """A tenant above its floor loses a whole tail, though the floor keeps some of its blocks."""
    rewrite(patch, ByTenant.most, "self._may_give(tenant)", "self._host.slots")


@caught_by("tests/core/test_tenants.py::test_a_clear_forgets_whose_blocks_they_were")
def floor_of_a_tenant_outlives_a_clear(patch: pytest.MonkeyPatch) -> None:
    """What a floor keeps stays in a namespace that is cleared."""
    rewrite(patch, HostTree._evict_for, "self.tenants.make_room_for(None)", "pass")


@caught_by("tests/core/test_tenants.py::test_without_a_floor_the_least_recently_used_go_whosever_they_are")
def tenants_give_in_the_order_of_their_first_use(patch: pytest.MonkeyPatch) -> None:
    """A tenant whose tails were used since they were filed gives before others."""
    rewrite(patch, ByTenant._next_of, "actual > age and ", "False and ")


@caught_by("tests/core/test_tenants.py::test_bounds_hold_after_any_history")
def split_forgets_the_tenant(patch: pytest.MonkeyPatch) -> None:
    """The beginning of a prompt that is cut in two is nobody's."""
    rewrite(patch, RunTree._split, "head.belong_to(run.tenant)", "pass")


@caught_by("tests/core/test_tenants.py::test_blocks_of_device_pools_count_where_they_are_stored")
def hit_in_the_host_pool_is_nobodys(patch: pytest.MonkeyPatch) -> None:
    """A request that hits blocks in the host pool does not say whose they are."""
    rewrite(patch, Managed._acquire_from_host, "session.tree.belong(lease.run, lease.tenant)", "pass")


@caught_by("tests/core/test_tenants.py::test_cap_holds_for_blocks_from_storage")
def prefetch_is_for_nobody(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a prompt that is not known are fetched for nobody, so that no cap bounds them."""
    rewrite(patch, Prefetch.continue_for, "tenant or self.chain.tenant", "tenant")


@caught_by("tests/core/test_tenants.py::test_cap_holds_for_fetches_under_way_together")
def fetches_under_way_do_not_count(patch: pytest.MonkeyPatch) -> None:
    """A tenant's cap counts only blocks that have come."""
    rewrite(patch, Prefetches._fetch, "coming=coming", "coming=0")
