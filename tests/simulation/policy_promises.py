"""What people were told of write policies, and what has to be true since."""

from __future__ import annotations

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId, WritePolicy
from tests.simulation.scheduler import Broken


class PolicyPromises:
    """Of one daemon.

    Args:
        told: policies by replica, or by label of engines in offload mode; those of all daemons.
        of_spaces: what namespaces of engines in offload mode begin with.
    """

    def __init__(self, cache: Cache, told: dict[str, WritePolicy], of_spaces: WritePolicy) -> None:
        self._cache = cache
        self._told = told
        self._of_spaces = of_spaces

    def answered(self, header: wire.Header) -> None:
        """An answer goes out."""
        if isinstance(header, wire.PolicySet):
            self._told.update(dict.fromkeys(header.replicas or (header.label,), header.policy))

    def look(self) -> None:
        """Each namespace has the policy that was set last, after a restart, too.

        Raises:
            Broken: one has not.
        """
        trees = self._trees()
        for name, policy in list(self._told.items()):
            if name not in trees:  # forgotten for others that needed its memory: it begins anew
                del self._told[name]
            elif trees[name].write_policy is not policy:
                raise Broken(f"the policy of {name} is {trees[name].write_policy}, {policy} was set")

    def look_at_store(self, replica: str) -> None:
        """Workers are told to copy to the host pool.

        Raises:
            Broken: the policy is never to do that.
        """
        if self._told.get(replica) is WritePolicy.NEVER:
            raise Broken(f"blocks of {replica} are copied to the host pool, which they never should")

    def look_at_offer(self, session: int, transfer: int) -> None:
        """An engine in offload mode is told what to copy.

        Raises:
            Broken: something, where the policy is never to do that.
        """
        space = self._cache.offload.sessions[SessionId(session)].namespace
        if transfer and self._told.get(space.spec.label, self._of_spaces) is WritePolicy.NEVER:
            raise Broken(f"session {session} is told to copy, and {space.spec.label} never should")

    def _trees(self) -> dict[str, PrefixTree]:
        replicas = {name: self._cache.tree_of(name) for name in self._cache.pools}
        return replicas | {space.spec.label: space.tree for space in self._cache.offload.namespaces.by_root.values()}
