"""What a daemon's death leaves in the host pool is found by the next one, under every write policy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from kvcached.core.index.run import Run
from kvcached.core.index.tree import HOST, PrefixTree
from kvcached.core.slots.states import SlotState
from tests.core.tier_world import _solid_slots as solid_slots
from tests.core.tier_world import keys_in
from tests.simulation.memory import Shape
from tests.simulation.scheduler import Broken

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World


class _Kept(NamedTuple):
    """A path whose blocks are all in the host pool, by key and slot."""

    namespace: bytes
    generation: int
    blocks: list[tuple[bytes, int]]


class Survival:
    """Compares what a dead daemon had with what the next one has."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[_Kept] = []

    def note(self, daemon: Daemon) -> None:
        """A daemon is about to die."""
        self._kept = [each for tree, generation in _trees(self._world, daemon) for each in _paths(tree, generation)]

    def forget(self) -> None:
        """The machine was restarted: nothing is left of it."""
        self._kept = []

    def look_at(self, daemon: Daemon) -> None:
        """The next one has taken over what there is.

        Raises:
            Broken: a block is not found that nothing has happened to.
        """
        found = {
            (tree.namespace, generation): {key for run in tree.runs() for key in solid_slots(run, HOST)}
            for tree, generation in _trees(self._world, daemon)
        }
        for namespace, generation, blocks in self._kept:
            there = found.get((namespace, generation))
            if there is None:
                raise Broken(f"namespace {namespace.hex()[:8]} of generation {generation} did not survive the daemon")
            shape = self._world.shapes[namespace]
            for key, slot in blocks:
                if self._is_damaged(shape, slot):
                    break
                if key not in there:
                    raise Broken(
                        f"host slot {slot} was cached before the daemon died, and is not found by the next one"
                    )
                self._world.seen["host block that survived its daemon"] += 1
        self._kept = []

    def _is_damaged(self, shape: Shape, slot: int) -> bool:
        host = self._world.host
        return any(host.is_rotten(shape.header(slot, shard)) for shard in range(shape.geometry.shards))


def _trees(world: World, daemon: Daemon) -> list[tuple[PrefixTree, int]]:
    cache = daemon.cache
    replicas = {id(tree): (tree, world.roots[tree.namespace]) for tree in map(cache.tree_of, cache.pools)}
    return [
        *replicas.values(),
        *((space.tree, space.generation) for space in cache.offload.namespaces.by_root.values()),
    ]


def _paths(tree: PrefixTree, generation: int) -> list[_Kept]:
    """From the root to the end of each run, as far as every block is in the host pool."""
    found = []
    for end in tree.runs():
        run, path = end, []
        while run.parent is not None:
            path.append(run)
            run = run.parent
        named = [each for part in reversed(path) for each in _blocks(tree, part)]
        whole = list(takewhile(lambda each: each[1] is not None, named))
        if whole:
            found.append(_Kept(tree.namespace, generation, [(key, slot) for key, slot in whole if slot is not None]))
    return found


def _blocks(tree: PrefixTree, run: Run) -> Iterator[tuple[bytes, int | None]]:
    """The keys of a run, each with its slot where that is complete."""
    slots = solid_slots(run, HOST)
    for key in keys_in(run.keys):
        slot = slots.get(key)
        is_there = slot is not None and tree.host is not None and tree.host.state_of(slot) is SlotState.CACHED
        yield key, slot if is_there else None
