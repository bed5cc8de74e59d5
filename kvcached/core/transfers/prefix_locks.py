"""Prefixes locked in the host pool for a prefetch, from its question until its requester has acquired them.

A prefetch takes seconds, and the prefix that it continues is often the least recently used one of the pool. A lock
keeps that prefix, and what the prefetch adds to it, from eviction. It ends when every session that asked for the
prefetch has acquired or ended, or some time after the prefetch, whichever comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import KEY_SIZE, Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.host_slots import HostPool
from kvcached_client.types import SessionId

#: Of the slots that a namespace can have now. Beyond it nothing more is locked: stores and fetches need room, too.
LOCKED_PERCENT_MAX = 50
#: Engines acquire within milliseconds of the answer. One that does not within this time lets others have the room.
HANDOVER_MS = 5_000
#: Locks whose prefetch is over. Beyond that the oldest ends: an engine that never acquires cannot pile them up.
HANDED_OVER_MAX = 512


@dataclass(slots=True, eq=False)
class PrefixLock:
    """The path ``[0, depth)`` to `run` is locked in the host pool of `tree`.

    Attributes:
        last_key: of the last block that the prefetch is to bring: an acquire up to it ends its session's wait.
        sessions: those that asked for the prefetch and have not acquired yet.
        until_ms: when the lock ends; None while the prefetch is under way.
    """

    tree: PrefixTree
    last_key: bytes
    run: Run
    depth: int = 0
    sessions: set[SessionId] = field(default_factory=set)
    until_ms: int | None = None


class PrefixLocks:
    """All locks of a daemon.

    Attributes:
        now_ms: time of the last tick.
        waiting: prefetch by who waits for it and the key of its last block.
    """

    def __init__(self) -> None:
        self.now_ms = 0
        self._locks: dict[int, PrefixLock] = {}  #: by prefetch; those handed over stand in the order of their time
        self._asked: dict[int, set[SessionId]] = {}  #: who has asked for a prefetch that is under way, and is there
        self.waiting: dict[tuple[SessionId, bytes], int] = {}

    def __len__(self) -> int:
        return len(self._locks)

    def held(self, tree: PrefixTree) -> list[PrefixLock]:
        """Those of a tree."""
        return [lock for lock in self._locks.values() if lock.tree is tree]

    def all(self) -> Iterable[tuple[int, PrefixLock]]:
        """Every lock, with the prefetch that it is for."""
        return self._locks.items()

    # --- a prefetch -------------------------------------------------------------------------------------------------

    def begin(self, prefetch: int, tree: PrefixTree, keys: bytes, known: tuple[Run, int]) -> None:
        """A prefetch of the blocks of `keys` is under way; the index knows the path `known` of them."""
        self._asked[prefetch] = set()
        self._locks[prefetch] = PrefixLock(tree, keys[-KEY_SIZE:], tree.root)
        self.extend(prefetch, known)

    def join(self, prefetch: int, session: SessionId) -> None:
        """A session waits for a prefetch. Of two with the same last block the later one counts."""
        if prefetch in self._asked:
            self._asked[prefetch].add(session)
        lock = self._locks.get(prefetch)
        if lock is not None:
            self._forget(session, lock.last_key)
            lock.sessions.add(session)
            self.waiting[session, lock.last_key] = prefetch

    def extend(self, prefetch: int, known: tuple[Run, int]) -> None:
        """The index knows more of the chain now: lock that, too, if there is room for it."""
        lock = self._locks.get(prefetch)
        if lock is None:
            return
        tree = lock.tree
        run, depth = tree.host_end(*known)
        if depth <= lock.depth or not _has_room(tree, _unprotected(run, depth)):
            return
        before_run, before = lock.run, lock.depth
        tree.lock(run, depth, HOST)
        lock.run, lock.depth = run, depth
        tree.unlock(tree.resolve(before_run, before), before, HOST)

    def hand_over(self, prefetch: int) -> None:
        """A prefetch is over: the lock stays for those who have not acquired yet."""
        self._asked.pop(prefetch, None)
        lock = self._locks.pop(prefetch, None)
        if lock is None:
            return
        self._locks[prefetch] = lock  # the newest of those handed over
        lock.until_ms = self.now_ms + HANDOVER_MS
        if not lock.sessions:
            self._end(prefetch)
        elif len(self._locks) > HANDED_OVER_MAX:
            over = [number for number, each in self._locks.items() if each.until_ms is not None]
            for number in over[: max(len(over) - HANDED_OVER_MAX, 0)]:
                self._end(number)

    # --- who waits for it -------------------------------------------------------------------------------------------

    def acquired(self, session: SessionId, keys: bytes, limit: int) -> None:
        """A session has a lease on what is cached of the first `limit` blocks of `keys`: the lease keeps it now."""
        self._forget(session, keys[: limit * KEY_SIZE][-KEY_SIZE:])

    def leave(self, session: SessionId) -> None:
        """A session is over: it will not acquire."""
        for sessions in self._asked.values():
            sessions.discard(session)
        for waiting, last_key in [each for each in self.waiting if each[0] == session]:
            self._forget(waiting, last_key)

    def is_wanted(self, prefetch: int) -> bool:
        """Whether a session that has asked for a prefetch under way is still there."""
        return bool(self._asked.get(prefetch))

    def tick(self, now_ms: int) -> None:
        """End those whose time has come."""
        self.now_ms = now_ms
        due = [number for number, lock in self._locks.items() if lock.until_ms is not None and lock.until_ms <= now_ms]
        for number in due:
            self._end(number)

    def drop(self, tree: PrefixTree) -> None:
        """Nothing of a tree is locked any more: it is cleared, or its memory is needed."""
        for number in [number for number, lock in self._locks.items() if lock.tree is tree]:
            self._end(number)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _forget(self, session: SessionId, last_key: bytes) -> None:
        prefetch = self.waiting.pop((session, last_key), None)
        if prefetch is None:
            return
        lock = self._locks[prefetch]
        lock.sessions.discard(session)
        if not lock.sessions and lock.until_ms is not None:
            self._end(prefetch)

    def _end(self, prefetch: int) -> None:
        lock = self._locks.pop(prefetch)
        for session in lock.sessions:
            del self.waiting[session, lock.last_key]
        lock.tree.unlock_host(lock.run, lock.depth)
        lock.tree.drop_lost(lock.run)


def _unprotected(run: Run, depth: int) -> int:
    """How many blocks of the host pool's path ``[0, depth)`` no lock protects yet."""
    count = 0
    while run.parent is not None:
        segment = run.segments[HOST]
        if segment is not None:
            count += max(min(depth - run.start, segment.length) - segment.protected, 0)
            if segment.protected:  # then everything above is, too
                break
        run, depth = run.parent, run.start
    return count


def _has_room(tree: PrefixTree, more: int) -> bool:
    """Whether `more` blocks may be locked beside what is protected in a host pool already."""
    host = tree.host
    return isinstance(host, HostPool) and (host.protected + more) * 100 <= host.reachable * LOCKED_PERCENT_MAX
