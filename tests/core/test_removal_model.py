"""Random removals of prefixes among everything that uses blocks, against a naive model of what may go."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcached.core.index.host_tree import HOST
from kvcached.core.index.run import Run
from kvcached.core.index.tree import PrefixTree
from kvcached.core.lease import OffloadLease
from kvcached.core.messages import Grant, QueryStorage, StartFetch, StorageReady
from kvcached.core.refusals import Refusal
from kvcached.core.removal import Removal
from kvcached.core.slots.slots import DevicePool
from tests.core.engine import Engine, keys_of
from tests.core.history import Choose, Operation, play, play_drawn
from tests.core.offload_engine import OffloadEngine
from tests.core.storage_world import Named
from tests.core.test_storage_model import STEPS, StorageHistory
from tests.core.tier_world import keys_in, solid_slots

#: A tree and a pool of it, by its place there.
Where = tuple[PrefixTree, int]


class RemovalHistory(StorageHistory):
    """The same with requests that go on for a while, with pins, and with an operator who removes prompts.

    Attributes:
        deleting: what storage is to delete, by removal. Until it has, nothing of that is fetched.
    """

    def __init__(self, choose: Choose) -> None:
        super().__init__(choose)
        self.managed_leases: list[tuple[Engine, Grant]] = []
        self.offload_leases: list[tuple[OffloadEngine, OffloadLease]] = []
        self.deletions: list[tuple[Removal, str, int]] = []
        self.deleting: list[tuple[Removal, set[Named]]] = []
        self.weighted += [(self.hold, 4), (self.let_go, 3), (self.pin, 2), (self.remove, 6), (self.end_deletion, 3)]
        self.weighted.append((self.want_again, 4))

    def do(self, operation: Operation) -> None:
        super().do(operation)
        asked = [each for each in self.world.under_way if isinstance(each, StartFetch)]
        coming = {(each.namespace, each.generation, key) for each in asked for key in keys_in(each.span.keys)}
        assert not any(coming & gone for _, gone in self.deleting)
        sessions = self.cache.managed.sessions.keys() | self.cache.offload.sessions.keys()
        self.managed_leases = [each for each in self.managed_leases if each[0].session in sessions]
        self.offload_leases = [each for each in self.offload_leases if each[0].session in sessions]

    def end(self) -> None:
        while self.managed_leases or self.offload_leases:
            self.let_go()
        while self.deletions:
            self.end_deletion()
        for tree in self.cache.trees:
            self.cache.pins.drop(tree)
        super().end()

    # --- steps ------------------------------------------------------------------------------------------------------

    def hold(self) -> None:
        if self.choose(2):
            engine = self.one(self.engines)
            try:
                self.managed_leases.append((engine, engine.acquire(self.text())))
            except Refusal:
                self.done["no room"] += 1
        else:
            offload = self.one(self.offload)
            self.offload_leases.append((offload, offload.acquire(self.text())))

    def let_go(self) -> None:
        if self.managed_leases and (not self.offload_leases or self.choose(2)):
            engine, grant = self.managed_leases.pop(self.choose(len(self.managed_leases)))
            engine.release(grant)
        elif self.offload_leases:
            offload, lease = self.offload_leases.pop(self.choose(len(self.offload_leases)))
            offload.release(lease)

    def pin(self) -> None:
        tree, pool = self.place()
        try:
            self.cache.pins.pin(tree, pool, keys_of(self.text()), self.now_ms + 2000)
        except Refusal:
            self.done["over quota"] += 1

    def remove(self) -> None:
        """Remove a prompt. What goes is what the model says, and storage deletes it now or later."""
        tree, _ = self.place()
        text = self.text()
        start = self.choose(len(text))
        keys = keys_of(text)
        before, held, behind = self.places(), self.held(), behind_in(tree, keys, start)
        removal = self.cache.removals.remove(tree, keys, start)
        after, left = self.places(), behind_in(tree, keys, start)
        for where, blocks in before.items():
            stays = held[where] if where[0] is tree else blocks.keys()
            assert after[where] == {key: at for key, at in blocks.items() if key in stays or key not in behind}
        assert removal.device + removal.host == sum(map(len, before.values())) - sum(map(len, after.values()))
        stays = left | self.coming(tree, keys, start)
        assert removal.in_use == len(stays)
        assert set(keys_in(removal.keys)) == (behind | set(keys_in(keys)[start:])) - stays
        self.done["removed"] += bool(behind - left)
        self.done["in use"] += bool(stays)
        self.deletions.append((removal, text, start))
        names = {(each.namespace, self.world._generation(each) or 0) for each in removal.trees}
        self.deleting.append((removal, {(*name, key) for name in names for key in keys_in(removal.keys)}))
        if self.choose(2):
            self.end_deletion()

    def want_again(self) -> None:
        """A request comes for a prompt that storage is to delete, all of which it still has, and it answers at once."""
        removal, text, _ = self.pick(self.deletions) or (None, "", 0)
        if removal is None:
            return
        self.cache.resume()
        self.cache.handle(StorageReady())
        spaces = self.cache.offload.namespaces
        for engine in self.offload:
            tree = spaces.by_root[engine.spec.root].tree
            if tree in removal.trees:
                name = tree.namespace, spaces.generation_of(tree) or 0
                self.world.held |= {(*name, key) for key in keys_in(keys_of(text))}
                self.world.prefetch(engine.session, text)
                self.world.take()
                while questions := [each for each in self.world.under_way if isinstance(each, QueryStorage)]:
                    self.world.answer(self.world.under_way.index(questions[0]))
                    self.world.take()

    def end_deletion(self) -> None:
        if self.deletions:
            removal, text, start = self.deletions.pop(self.choose(len(self.deletions)))
            gone = set(keys_in(removal.keys))
            roots = {tree.namespace for tree in removal.trees}
            self.world.held -= {each for each in self.world.held if each[0] in roots and each[2] in gone}
            self.cache.removals.deleted(removal, keys_of(text), start)
            self.deleting = [each for each in self.deleting if each[0] is not removal]

    # --- the model --------------------------------------------------------------------------------------------------

    def place(self) -> tuple[PrefixTree, DevicePool | None]:
        """Where: a replica or a namespace in offload mode."""
        engines: list[Engine | OffloadEngine] = [*self.engines, *self.offload]
        engine = self.one(engines)
        if isinstance(engine, Engine):
            return self.cache.tree_of(engine.replica), self.cache.pools[engine.replica]
        return self.cache.offload.namespaces.by_root[engine.spec.root].tree, None

    def places(self) -> dict[Where, dict[bytes, int]]:
        """Which blocks lie where."""
        found: dict[Where, dict[bytes, int]] = {}
        for tree in self.cache.trees:
            for index in [*(pool.index for pool in tree.pools), HOST]:
                blocks = found[tree, index] = {}
                for run in tree.runs():
                    blocks.update(solid_slots(run, index))
        return found

    def held(self) -> dict[Where, set[bytes]]:
        """Which blocks of a pool somebody counts on, holes of the host pool included."""
        cache = self.cache
        ends: list[tuple[PrefixTree, int, Run, int]] = []
        for session in cache.managed.sessions.values():
            place = session.tree, session.pool.index
            ends += [(*place, lease.run, lease.depth) for lease in session.leases.values()]
            ends += [(*place, hold.run, hold.depth) for hold in session.holds]
        for offload in cache.offload.sessions.values():
            ends += [(lease.tree, HOST, lease.run, lease.depth) for lease in offload.leases.values()]
        for tree in cache.trees:
            ends += [(tree, HOST, each.run, each.depth) for each in cache.pins.held(tree, None)]
            ends += [(tree, HOST, each.run, each.depth) for each in cache.storage.locks.held(tree)]
            for pool in tree.pools:
                ends += [(tree, pool.index, each.run, each.depth) for each in cache.pins.held(tree, pool)]
        backups = [each for each in cache.storage.backups_under_way if not each.is_cleared]
        for copy in [*cache.transfers.values(), *cache.offload.transfers, *backups]:
            ends.append((copy.tree, HOST, copy.run, copy.end))
        for transfer in cache.transfers.values():
            if not transfer.orphaned:
                ends.append((transfer.tree, transfer.pool.index, transfer.run, transfer.end))
        held = defaultdict[Where, set[bytes]](set)
        for tree, index, run, depth in ends:
            held[tree, index].update(keys_in(tree.path_keys(run, 0, depth)))
        return held

    def coming(self, tree: PrefixTree, keys: bytes, start: int) -> set[bytes]:
        """The blocks that prefetches of the same prompts have not brought yet."""
        found: set[bytes] = set()
        for prefetch in self.cache.storage.prefetches.under_way.values():
            wanted = keys_in(prefetch.chain.keys)
            if prefetch.chain.tree is tree and keys[start * 16 : start * 16 + 16] in wanted:
                found.update(wanted[max(prefetch.inserted, start) :])
        return found


def behind_in(tree: PrefixTree, keys: bytes, start: int) -> set[bytes]:
    """The block of a prompt at a depth, and what continues it: all that the index names."""
    wanted, found = keys[start * 16 : start * 16 + 16], set[bytes]()
    for run in tree.runs():
        path = keys_in(tree.path_keys(run, 0, run.end))
        if wanted in path:
            found.update(path[start:])
    return found


@pytest.mark.full
def test_what_is_removed_is_what_nobody_uses() -> None:
    """Whoever uses which blocks of a prompt: exactly these stay, in every pool, and every other block of it goes."""
    seen = play(RemovalHistory, range(6), STEPS)

    assert {name for name, count in seen.items() if count} >= {"forgotten_blocks", "removed", "in use"}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_removed_is_what_nobody_uses_over_long_histories() -> None:
    """The same for sixty histories."""
    play(RemovalHistory, range(100, 160), STEPS)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_what_is_removed_is_what_nobody_uses_in_any_short_history(data: st.DataObject) -> None:
    """No short history removes what is used, or leaves what is not; a failing one is shrunk to its shortest form."""
    play_drawn(RemovalHistory, data, 30)
