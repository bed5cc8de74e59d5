"""Nothing that a namespace holds is matched again: its sessions expire, its copies end, then all of it goes at once.

Between the first step and the last one nobody gets a session on these pools, so that nothing of before is mixed with
what comes after. What an engine of before may still write is set aside until it says hello anew or is dead, as always.
So is what storage still reads or writes, until its process is through with it or is dead: a device may hang for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvcached.core.index import announcements
from kvcached.core.index.tree import PrefixTree
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import ClearingEnded
from kvcached.core.refusals import Why
from kvcached.core.slots.states import SessionState, SlotState
from kvcached.core.transfers.prefix_locks import PrefixLocks
from kvcached.core.transfers.storage import StorageTier
from kvcached.core.transfers.worker_copies import WorkerCopies
from kvcached_client.types import MissReason, SessionId

_CAUSE = "namespace cleared"


@dataclass(frozen=True, slots=True, eq=False)
class _Clearing:
    tree: PrefixTree
    namespace: bytes
    generation: int


class Clearings:
    """Namespaces of replicas that are being cleared.

    Args:
        sessions: on device pools.
        worker_copies: their copies.
        storage: its copies are not waited for.
        expire: ends a session as if it had gone silent.
        locks: of prefixes, which end with what they lock.

    Attributes:
        under_way: those whose copies have not ended.
        version: grows with every namespace that has been cleared.
    """

    def __init__(
        self,
        sessions: dict[SessionId, ManagedSession],
        worker_copies: WorkerCopies,
        storage: StorageTier,
        expire: Callable[[ManagedSession, Why], None],
        locks: PrefixLocks,
    ) -> None:
        self.version = 0
        self._sessions = sessions
        self._worker_copies = worker_copies
        self._storage = storage
        self._effects = worker_copies.table.effects
        self._counters = worker_copies.table.counters
        self._expire = expire
        self._locks = locks
        self.under_way: list[_Clearing] = []

    def begin(self, tree: PrefixTree, namespace: bytes, generation: int = 0) -> None:
        """Clear the namespace of a tree; `ClearingEnded` follows when no worker copies any more.

        Args:
            tree: of replicas, and not being cleared.
            namespace: root of the keys from then on.
            generation: that begins then.
        """
        for pool in tree.pools:
            pool.begin_clear()
        for session in list(self._sessions.values()):
            if session.tree is tree:
                session.void()
                if session.state is SessionState.ACTIVE:
                    self._expire(session, Why.SESSION_CLEARED)
                session.forget_unstored()
        for pool in tree.pools:
            self._worker_copies.fail_queued(pool, f"the namespace of {pool.name} is being cleared")
        self.under_way.append(_Clearing(tree, namespace, generation))

    def rename(self, tree: PrefixTree, namespace: bytes, generation: int) -> None:
        """Another namespace and generation are to begin when the clear of a tree, which is under way, has ended."""
        self.under_way = [
            _Clearing(tree, namespace, generation) if each.tree is tree else each for each in self.under_way
        ]

    def advance(self) -> None:
        """Finish what nothing is under way for any more."""
        for clearing in self.under_way[:]:
            is_copied = any(each.tree is clearing.tree for each in self._worker_copies.table.worker.values())
            if not is_copied:
                self.under_way.remove(clearing)
                self._finish(clearing.tree, clearing.namespace, clearing.generation)

    def _finish(self, tree: PrefixTree, namespace: bytes, generation: int) -> None:
        blocks = sum(run.length for run in tree.runs())
        if tree.listener is not None:
            tree.listener.cleared(tree.namespace, 0)
        self._worker_copies.pins.drop(tree)
        self._locks.drop(tree)
        announcements.renew(tree, namespace, generation)
        if tree.reuse is not None:
            tree.reuse.forget()
        before = tree.namespace
        tree.rename(namespace)  # first, so that who asks for what went now is told why it did
        for pool in tree.pools:
            pool.forget_unstored()
            dropped = tree.drop(tree.root, 0, pool.index, MissReason.CLEARED)
            pool.move(dropped, SlotState.CACHED, SlotState.FREE, _CAUSE)
            pool.end_clear()
        if tree.host is not None:
            tree.shed_host(_CAUSE, reason=MissReason.CLEARED)
            self._storage.backups.let_go(tree, before, _CAUSE)
            tree.shed_host(_CAUSE, reason=MissReason.CLEARED)  # what those locked
        self._counters["cleared_blocks"] += blocks
        self.version += 1
        self._effects.append(ClearingEnded(tuple(pool.name for pool in tree.pools), namespace, blocks))
