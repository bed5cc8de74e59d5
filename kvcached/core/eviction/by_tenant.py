"""Tenants of one namespace share its host slots within floors and caps.

A tenant is whoever a request says it is for. The first block of a prompt belongs to the tenant that first stored or
used it, and with it all that continues it. Tenants that no rule names have no bounds, and count as one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from heapq import heappop, heappush

from kvcached.core.eviction.lru import EvictionPolicy
from kvcached.core.index.run import Run, Segment
from kvcached.core.slots.host_slots import HostPool, QuotaRule
from kvcached.core.slots.ranges import slot_count, without_holes

#: Tenants that are reported.
SHARES_MAX = 100
#: Tenants whose rule is remembered. Clients choose the names, so there may be any number of them.
RULES_KNOWN_MAX = 4096
#: How a tenant's next victim compares with those of others: priority, last use.
_Age = tuple[int, int]


class ByTenant:
    """The eviction policy of a host pool with quotas of tenants: one order for each, and who has to give next.

    Within one tenant, `make`'s policy decides. Between tenants, the one goes first whose next victim has the lowest
    priority and, among these, was used longest ago; but no tenant gives to others what its floor keeps for it. One that
    has no more than that is parked outside the order until it may give again. An operation is O(log n) in the number of
    tenants, beside what the tenant's policy takes, and spread over those that have parked a tenant.

    Args:
        make: the policy of one tenant.
        rules: bounds; for each tenant the first rule that matches holds.
        host: the pool.

    Attributes:
        blocks: that the pool has of each tenant.
        taker: the tenant that room is made for; None where it is made for nobody, so that no floor counts.
        is_taker_only: whether only that tenant's blocks may go.
    """

    __slots__ = (
        "_ages",
        "_host",
        "_known_rules",
        "_make",
        "_order",
        "_parked",
        "_parked_of",
        "_policies",
        "_rules",
        "blocks",
        "is_taker_only",
        "taker",
    )

    def __init__(self, make: Callable[[], EvictionPolicy], rules: tuple[QuotaRule, ...], host: HostPool) -> None:
        self._make = make
        self._rules = rules
        self._host = host
        self._policies: dict[str, EvictionPolicy] = {}
        self._ages: dict[str, _Age] = {}  #: of each tenant's next victim; it may be younger
        self._order: list[tuple[_Age, str]] = []  #: a heap; entries that `_ages` does not have are outdated
        self._parked: set[str] = set()  #: tenants that have an age and no entry, for they were at their floors
        self._parked_of = 0  #: floors were those of so many reachable slots then
        self._known_rules: dict[str, QuotaRule | None] = {}
        self.blocks: Counter[str] = Counter()
        self.taker: str | None = None
        self.is_taker_only = False

    # --- bounds -----------------------------------------------------------------------------------------------------

    def is_bounded(self, tenant: str) -> bool:
        """Whether a rule names a tenant."""
        return self._rule(tenant) is not None

    def bounds(self, tenant: str) -> tuple[int, int]:
        """Floor and cap of a tenant, in blocks: parts of what the namespace has, or could have at once."""
        reachable = self._host.reachable
        rule = self._rule(tenant)
        if rule is None:
            return 0, reachable
        return reachable * rule.floor_percent // 100, max(reachable * rule.cap_percent // 100, 1)

    def _rule(self, tenant: str) -> QuotaRule | None:
        """The first rule that names a tenant; none names nobody."""
        known = self._known_rules
        if tenant not in known:
            if len(known) >= RULES_KNOWN_MAX:
                known.clear()
            known[tenant] = next((rule for rule in self._rules if tenant and rule.matches([tenant])), None)
        return known[tenant]

    def room(self, tenant: str) -> int:
        """How many blocks more a tenant may have; below 0 where it has too many."""
        return self.bounds(tenant)[1] - self.blocks[tenant]

    def shares(self) -> list[tuple[str, int, int, int]]:
        """Tenants with their blocks, floor and cap; those that have the most blocks, at most `SHARES_MAX`."""
        return [(tenant, blocks, *self.bounds(tenant)) for tenant, blocks in self.blocks.most_common(SHARES_MAX)]

    def count(self, tenant: str, change: int) -> None:
        """The pool has so many blocks more of a tenant."""
        self.blocks[tenant] += change
        if change > 0 and tenant in self._parked:
            self._unpark([tenant])
        if not self.blocks[tenant]:
            del self.blocks[tenant]

    def take(self, top: Run, tenant: str, member: int) -> None:
        """What begins with a run belongs to a tenant from now on, and to nobody before.

        `member` is the pool's place in the segments of each run.
        """
        waiting = [top]
        while waiting:
            run = waiting.pop()
            segment = run.segments[member]
            is_tail = segment is not None and segment.queued
            if segment is not None:
                self.remove(segment)
                self.count(tenant, slot_count(without_holes(segment.ranges)))
            run.belong_to(tenant)
            if segment is not None and is_tail:
                self.add(segment)
            waiting.extend((run.children or {}).values())

    def make_room_for(self, taker: str | None, *, only: bool = False) -> None:
        """The next victims go for a tenant: any, or `only` its own; None: for nobody any more."""
        self.taker, self.is_taker_only = taker, only
        if taker in self._parked:
            self._unpark([taker])

    # --- as `EvictionPolicy` ----------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        """File a tail with its tenant's."""
        tenant = segment.run.tenant
        policy = self._policies.get(tenant)
        if policy is None:
            policy = self._policies[tenant] = self._make()
        policy.add(segment)
        age = _age(segment)
        known = self._ages.get(tenant)
        if known is None or age < known:
            self._file(tenant, age)

    def pop(self) -> Segment | None:
        """The next victim that the taker may have."""
        if self.is_taker_only:
            policy = self._policies.get(self.taker or "")
            return None if policy is None else policy.pop()
        if self._parked and (self.taker is None or self._host.reachable != self._parked_of):
            self._unpark(list(self._parked))
        victim = None
        while victim is None and self._order:
            age, tenant = heappop(self._order)
            if self._ages.get(tenant) != age:
                continue  # outdated
            if self._may_give(tenant) <= 0:
                self._parked.add(tenant)
                self._parked_of = self._host.reachable
                continue
            victim = self._next_of(tenant, age)
        return victim

    def most(self, segment: Segment) -> int:
        """As the tenant's policy says, and no more than is above its floor."""
        tenant = segment.run.tenant
        return max(min(self._policies[tenant].most(segment), self._may_give(tenant)), 1)

    def touch(self, segment: Segment) -> None:
        """Tell the tenant's policy."""
        policy = self._policies.get(segment.run.tenant)
        if policy is not None:
            policy.touch(segment)

    def remove(self, segment: Segment) -> None:
        """Forget its place, if it has one."""
        if segment.queued:
            self._policies[segment.run.tenant].remove(segment)

    def clear(self) -> None:
        """Forget every place, and that anybody has blocks."""
        for policy in self._policies.values():
            policy.clear()
        self._policies.clear()
        self._ages.clear()
        self._order.clear()
        self._parked.clear()
        self.blocks.clear()

    # --- steps ------------------------------------------------------------------------------------------------------

    def _may_give(self, tenant: str) -> int:
        """How many blocks a tenant may lose to the taker at most: all, or those above its floor."""
        floor = 0 if self.taker is None or tenant == self.taker else self.bounds(tenant)[0]
        return self.blocks[tenant] - floor if floor else self._host.slots

    def _next_of(self, tenant: str, age: _Age) -> Segment | None:
        """A tenant's next victim, if it is as old as was thought, or still older than those of others."""
        policy = self._policies[tenant]
        segment = policy.pop()
        if segment is None:
            del self._ages[tenant], self._policies[tenant]
            return None
        actual = _age(segment)
        if actual > age and self._order and self._order[0][0] < actual:
            policy.add(segment)
            self._file(tenant, actual)
            return None
        self._file(tenant, actual)
        return segment

    def _unpark(self, tenants: list[str]) -> None:
        for tenant in tenants:
            self._file(tenant, self._ages[tenant])

    def _file(self, tenant: str, age: _Age) -> None:
        self._parked.discard(tenant)
        self._ages[tenant] = age
        heappush(self._order, (age, tenant))


def _age(segment: Segment) -> _Age:
    return segment.priority or 0, segment.last_used
