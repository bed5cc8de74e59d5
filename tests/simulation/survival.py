"""What a daemon's death leaves in the pools is found by the next one, under every write policy."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile
from typing import TYPE_CHECKING, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.slots.states import SlotState
from tests.core.tier_world import keys_in, solid_slots
from tests.simulation.memory import Shape, suspects_of
from tests.simulation.scheduler import Broken

if TYPE_CHECKING:
    from tests.simulation.daemon import Daemon
    from tests.simulation.world import World


class _Kept(NamedTuple):
    """A path whose blocks are all in the host pool, by key and slot."""

    namespace: bytes
    generation: int
    blocks: list[tuple[bytes, int]]


class _KeptOnDevice(NamedTuple):
    """A block of a device pool that nobody may be writing, nor one before it."""

    namespace: bytes
    key: bytes
    slot: int
    is_held: bool


class Survival:
    """Compares what a dead daemon had with what the next one has."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._kept: list[_Kept] = []
        self._on_devices: dict[str, list[_KeptOnDevice]] = {}

    def note(self, daemon: Daemon) -> None:
        """A daemon is about to die."""
        self._kept = [each for tree, generation in _trees(self._world, daemon) for each in _paths(tree, generation)]
        self._on_devices = {name: list(_on_device(daemon.cache, name)) for name in daemon.cache.pools}

    def forget(self) -> None:
        """The machine was restarted: nothing is left of it."""
        self._kept, self._on_devices = [], {}

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
        for name, on_device in self._on_devices.items():
            self._look_at_device(daemon, name, on_device)
        self._on_devices = {}

    def _look_at_device(self, daemon: Daemon, name: str, blocks: list[_KeptOnDevice]) -> None:
        tree, pool = daemon.cache.tree_of(name), daemon.cache.pools[name]
        found = {key: slot for run in tree.runs() for key, slot in solid_slots(run, pool.index).items()}
        for namespace, key, slot, is_held in blocks if daemon.workers[name].is_kept else ():
            if namespace != tree.namespace:
                continue
            if found.get(key) != slot or pool.state_of(slot) is not SlotState.CACHED:
                raise Broken(f"slot {slot} of {name} was cached before the daemon died, and is not found by the next")
            self._world.seen["device block that survived its daemon, held by no lease"] += not is_held

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


def _on_device(cache: Cache, name: str) -> Iterator[_KeptOnDevice]:
    """Blocks whose bytes are all there, and those of all blocks before them."""
    tree, pool = cache.tree_of(name), cache.pools[name]
    suspects = suspects_of(cache, tree, pool)
    broken: set[int] = set()  # runs below which nothing counts
    for run in tree.runs():
        segment = run.segments[pool.index]
        if segment is None or id(run.parent) in broken:
            broken.add(id(run))
            continue
        for place, (key, slot) in enumerate(solid_slots(run, pool.index).items()):
            if slot in suspects or pool.state_of(slot) is not SlotState.CACHED:
                broken.add(id(run))
                break
            yield _KeptOnDevice(tree.namespace, key, slot, place < segment.protected)


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
