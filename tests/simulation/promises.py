"""What people were told by the daemon's answers, and what has to be true since."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kvcached.core.cache import Cache
from kvcached.service.replica import Replica
from kvcached_client.protocol import engine as wire
from tests.simulation.scheduler import Broken

#: Beside the names of replicas, what stands for engines in offload mode and storage.
_OFFLOAD = ""


@dataclass(frozen=True)
class Renewed:
    """What a replica's namespace was said to be."""

    generation: int
    namespace: bytes
    weights_version: str


class Promises:
    """Of one daemon.

    Args:
        renewed: by replica; those of all daemons.
        editions: by replica, all that it ever was.
    """

    def __init__(self, cache: Cache, renewed: dict[str, Renewed], editions: dict[str, set[Renewed]]) -> None:
        self._cache = cache
        self._renewed = renewed
        self._editions = editions
        self._paused: set[str] = set()
        self._work: tuple[int, int] | None = None  #: sessions and leases so far when it was drained

    def found(self, replicas: Iterable[Replica]) -> None:
        """A daemon starts: nothing that was renewed is as it was before.

        Raises:
            Broken: something is.
        """
        for replica in replicas:
            told = self._renewed.get(replica.name)
            found = Renewed(replica.generation, replica.namespace, replica.weights_version)
            if told is not None and told.generation >= found.generation and told != found:
                raise Broken(f"{replica.name} was told to be {told}, after a restart it is {found}")
            if told is not None and found not in self._editions.get(replica.name, ()):
                raise Broken(f"{replica.name} was told to be {told}, and begins anew as {found}")

    def note(self, replicas: Iterable[Replica]) -> None:
        """What replicas are now."""
        for replica in replicas:
            now = Renewed(replica.generation, replica.namespace, replica.weights_version)
            self._editions.setdefault(replica.name, set()).add(now)

    def asked(self, request: wire.Request) -> None:
        """A request is about to be served: some end what was promised."""
        if isinstance(request, wire.Resume):
            self._paused -= {request.replica} if request.replica else {*self._cache.pools, _OFFLOAD}
            if not request.replica:
                self._work = None

    def answered(self, request: wire.Request, header: wire.Header) -> None:
        """An answer goes out."""
        if isinstance(header, wire.Paused) and header.holds and not header.under_way:
            replica = request.replica if isinstance(request, wire.Pause) else ""
            self._paused |= {replica} if replica else {*self._cache.pools, _OFFLOAD}
        elif isinstance(header, wire.Drained) and header.holds:
            if not (header.leases or header.copies or header.requests):
                self._work = self._work_so_far()
                self._look_at_leases()
        elif isinstance(header, wire.NamespaceCleared):
            told = Renewed(header.generation, header.namespace, header.weights_version)
            for name in header.replicas:
                before = self._renewed.get(name)
                if before is None or before.generation < told.generation:
                    self._renewed[name] = told

    def look(self) -> None:
        """No copies where they are paused, no new work where that was drained.

        Drained copies may start again: of what was committed under a fence that signals later, and at the next tick of
        what found no room or failed.

        Raises:
            Broken: there are some.
        """
        cache = self._cache
        for name in self._paused:
            others = len(cache.offload.transfers) + len(cache.storage.copies)
            under_way = cache.copies_under_way(name) if name else others
            if under_way:
                raise Broken(f"{under_way} copies are under way, though {name or 'engines'} are paused")
        if self._work is not None and self._work != self._work_so_far():
            raise Broken(f"sessions and leases: {self._work_so_far()}, {self._work} when the daemon was drained")

    def _look_at_leases(self) -> None:
        """Later there may be some again: an engine of before a restart comes back to those that it has."""
        for sessions in (self._cache.managed.sessions, self._cache.offload.sessions):
            for session in sessions.values():
                if session.leases:
                    raise Broken(f"session {session.id} has {len(session.leases)} leases, and the daemon is drained")

    def _work_so_far(self) -> tuple[int, int]:
        return self._cache.counters["sessions_opened"], self._cache.counters["acquires"]
