"""Namespaces of engines in attached mode: declared by engines, cleared on request, forgotten when memory is short."""

from __future__ import annotations

from collections import Counter

from kvcached.core.attached_state import AttachedSession, Space, SpaceSpec
from kvcached.core.eviction import make_policy
from kvcached.core.forgotten import ForgottenKeys
from kvcached.core.host_pool import HostPool, SlabStock
from kvcached.core.pinned import Pins
from kvcached.core.states import SlotState
from kvcached.core.tree import Listener, PrefixTree
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.types import MissReason, SessionId, WritePolicy


class Spaces:
    """The namespaces, and trees of earlier generations.

    Args:
        stock: slabs of the host pool.
        most: how many namespaces there may be.
        sessions: of engines in attached mode.
        forgotten: where trees note what leaves them.

    Attributes:
        by_root: the namespaces; the one where a session began or ended last comes last.
        retired: trees of earlier generations that something still holds.
        version: grows whenever a namespace is made, cleared or forgotten.
        write_policy: of new namespaces.
        first_generation: of new namespaces; above those of forgotten ones, whose headers lie around.
        listener: of every tree.
        pins: what people keep cached; those of a namespace that nobody uses end when others need its memory.
    """

    def __init__(
        self,
        stock: SlabStock,
        most: int,
        sessions: dict[SessionId, AttachedSession],
        counters: Counter[str],
        forgotten: ForgottenKeys,
    ) -> None:
        self.by_root: dict[bytes, Space] = {}
        self.retired: list[PrefixTree] = []
        self.version = 0
        self._stock = stock
        self.most = most
        self.first_generation = 0
        self.write_policy = WritePolicy.WRITE_THROUGH
        self.listener: Listener | None = None
        self.pins: Pins | None = None
        self._sessions = sessions
        self._counters = counters
        self._forgotten = forgotten
        stock.make_room = self._make_room

    @property
    def trees(self) -> list[PrefixTree]:
        """Every tree once, those of earlier generations last."""
        return [*(space.tree for space in self.by_root.values()), *self.retired]

    def declare(self, spec: SpaceSpec) -> Space:
        """The namespace of an engine, made if nobody has declared it yet.

        Raises:
            RequestError: there are too many namespaces, a block does not fit a slab, or another shape was declared.
        """
        space = self.by_root.pop(spec.root, None)
        if space is None:
            space = self._make(spec)
        self.by_root[spec.root] = space
        if _shape(space.spec) != _shape(spec):
            raise request_error(
                ErrorCode.WRONG_LAYOUT,
                f"namespace {space.spec.label!r} has blocks of another shape",
                "let what a namespace is made from tell its layout, too",
            )
        return space

    def leave(self, space: Space) -> None:
        """A session has ended in a namespace."""
        self.by_root[space.spec.root] = self.by_root.pop(space.spec.root)
        self.bury()

    def clear(self, space: Space) -> int:
        """Begin a new generation: nothing stored before is matched again. Returns how many blocks that is."""
        self._let_go(space.tree)
        blocks = space.host.counts[SlotState.CACHED]
        if self.listener is not None:
            self.listener.cleared(space.spec.root, space.generation)
        self.retired.append(space.tree)
        space.generation += 1
        space.host, space.tree = self._plant(space.spec, space.tree.write_policy)
        self._counters["cleared_blocks"] += blocks
        self.bury()
        self.version += 1
        return blocks

    def _let_go(self, tree: PrefixTree) -> None:
        if self.pins is not None:
            self.pins.drop(tree)

    def bury(self) -> None:
        """Drop of retired trees what nothing holds any more."""
        for tree in self.retired[:]:
            tree.shed_host("namespace cleared", reason=MissReason.CLEARED)
            if tree.host is None or self._stock.retire(tree.host):
                self.retired.remove(tree)

    def _make(self, spec: SpaceSpec) -> Space:
        if not spec.host_slots_per_slab:
            raise request_error(
                ErrorCode.WRONG_LAYOUT, "a slab of the host pool holds none of these blocks", "configure larger slabs"
            )
        if len(self.by_root) >= self.most:
            self._forget_idle()
        host, tree = self._plant(spec, self.write_policy)
        self.version += 1
        return Space(spec, host, tree, self.first_generation)

    def restore(self, spec: SpaceSpec, generation: int, write_policy: WritePolicy = WritePolicy.WRITE_THROUGH) -> Space:
        """A namespace of before a restart, at the generation that it had, without slabs; it may be above `most`."""
        host, tree = self._plant(spec, write_policy)
        space = self.by_root[spec.root] = Space(spec, host, tree, generation)
        return space

    def _plant(self, spec: SpaceSpec, write_policy: WritePolicy) -> tuple[HostPool, PrefixTree]:
        host = HostPool(self._stock, spec.host_slots_per_slab, spec.root)
        policies = [make_policy(self._stock.eviction_policy, host.slots)]
        tree = PrefixTree([], policies, host, self._counters, namespace=spec.root, forgotten=self._forgotten)
        tree.listener = self.listener
        tree.write_policy = write_policy
        return host, tree

    def generation_of(self, tree: PrefixTree) -> int | None:
        """The generation that a tree is of; None for one that was cleared or forgotten."""
        return next((space.generation for space in self.by_root.values() if space.tree is tree), None)

    def _forget_idle(self) -> None:
        """Make room for one namespace more.

        Raises:
            RequestError: there is a session in each of them.
        """
        idle = self._idle()
        if not idle:
            raise request_error(
                ErrorCode.LIMIT,
                f"{len(self.by_root)} namespaces are in use",
                "end the engines of other models, or configure more namespaces",
            )
        self._forget(idle[0])

    def _forget(self, space: Space) -> None:
        self._let_go(space.tree)
        self.version += 1
        del self.by_root[space.spec.root]
        space.tree.shed_host(f"namespace {space.spec.label!r} forgotten")
        self.first_generation = max(self.first_generation, space.generation + 1)
        self.retired.append(space.tree)
        self.bury()

    def _idle(self) -> list[Space]:
        """Namespaces without a session; the one that has been without for longest comes first."""
        used = {session.space.spec.root for session in self._sessions.values()}
        return [space for root, space in self.by_root.items() if root not in used]

    def _make_room(self) -> bool:
        """Take a slab from a namespace that nobody uses, or forget one that has no other; whether there was any."""
        idle = self._idle()
        if not idle:
            return False
        space, host = idle[0], idle[0].host
        self._let_go(space.tree)
        for _ in range(len(host.slabs)):  # nothing of it is held, so as many rounds leave nothing
            if host.empty:
                break
            space.tree.shed_host(f"room for another namespace than {space.spec.label!r}", host.slots_per_slab)
        if host.empty == host.slabs:
            self._forget(space)  # no slab is held back for it, either
            return True
        return self._stock.take_back(host)


def _shape(spec: SpaceSpec) -> tuple[int, int, int]:
    return spec.block_size, spec.shards, spec.host_slots_per_slab
