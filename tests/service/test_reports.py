"""What the daemon tells about its index: the tree, one block, and the host pool."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.core.insight.snapshot import Depths, depths_of, find, survey
from kvcached.core.messages import TransferKind
from kvcached.service import report_verbs
from kvcached.service.report_verbs import ShownKeys
from kvcached_client.errors import ErrorCode
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, TWO, FakePeer, Office, key_chain

NAMESPACE = b"n" * 32


def branch(stem: bytes, blocks: int, seed: int) -> bytes:
    """A chain that goes on from another one."""
    return stem + key_chain(blocks, seed)


@pytest.fixture
def office() -> Office:
    """Replica a holds three blocks, after which two prompts go on with four and two; all are stored for replica b."""
    office = Office("a", "b", host_slabs=2)
    office.enter(FakePeer(1))
    office.enter(FakePeer(2), "b", peer=TWO)
    stem = key_chain(3)
    office.store(branch(stem, 2, seed=1))
    office.store(branch(stem, 4, seed=2))
    office.workers["a"].end_all()
    return office


def tree(office: Office, replica: str = "", levels: int = 8, children: int = 8) -> list[wire.TreeNode]:
    """The nodes of the answer; the report counts them."""
    request = wire.Tree(id=office.next_id(), replica=replica, levels=levels, children=children)
    report, (frame,) = office.ask(request, peer=b"cli")
    assert isinstance(report, wire.TreeReport)
    nodes = wire.unpack_tree_nodes(frame)
    assert (report.runs, report.blocks, report.shown) == (3, 9, len(nodes))
    return nodes


def inspect(office: Office, key: bytes) -> wire.InspectReport:
    return office.expect(wire.InspectReport, wire.Inspect(id=office.next_id(), key=key), peer=b"cli")


def test_tree_shows_runs_in_preorder_longest_first(office: Office) -> None:
    """A root for the namespace, then each run with its depth and its copies, the longer continuation before."""
    nodes = tree(office)

    assert [(node.level, node.start, node.blocks, node.children, node.hidden) for node in nodes] == [
        (0, 0, 0, 1, 0),
        (1, 0, 3, 2, 0),
        (2, 3, 4, 0, 0),
        (2, 3, 2, 0, 0),
    ]
    assert [node.tiers for node in nodes] == [
        {"a": 0, "b": 0, "host": 0},
        {"a": 3, "host": 3},
        {"a": 4, "host": 4},
        {"a": 2, "host": 2},
    ]
    assert nodes[0].key == NAMESPACE
    assert inspect(office, nodes[1].key).places == inspect(office, key_chain(1)).places
    assert [(node.pins, node.loading) for node in nodes] == [(0, 0)] * 4


def test_tree_is_bounded_in_depth_and_width(office: Office) -> None:
    """What is left out is counted at the run that it continues."""
    assert [(node.level, node.children, node.hidden) for node in tree(office, levels=1)] == [(0, 1, 0), (1, 2, 2)]
    nodes = tree(office, children=1)
    assert [(node.blocks, node.hidden) for node in nodes] == [(0, 0), (3, 1), (4, 0)]


@pytest.mark.parametrize(("nodes_max", "lengths"), [(1, [0]), (2, [0, 3]), (3, [0, 3, 4]), (4, [0, 3, 4, 2])])
def test_survey_prefers_upper_levels_where_it_is_cut(office: Office, nodes_max: int, lengths: list[int]) -> None:
    """A picture has at most as many runs as allowed, and each run in it counts what is missing."""
    views = survey(office.cache, "", 8, 8, nodes_max)

    assert [view.blocks for view in views] == lengths
    assert sum(view.hidden for view in views) <= 4 - len(views)
    assert all(view.children - view.hidden >= 0 for view in views)


def test_tree_says_how_deep_the_index_is(office: Office) -> None:
    """The longest chain, and how far the first half and nine tenths of the blocks reach, of all runs; none in nothing.

    A run of 3 blocks is continued by one of 4 and one of 2, so that there are 3, 2, 2, 1 and 1 blocks further down.
    """
    report = office.expect(wire.TreeReport, wire.Tree(id=1, levels=1, children=1), peer=b"cli")
    assert (report.blocks, report.deepest, report.half_depth, report.nine_tenths_depth) == (9, 7, 4, 7)
    assert depths_of([]) == depths_of([Office("a").cache.tree_of("a")]) == Depths(0, 0, 0, 0)


@given(st.lists(st.integers(0, 11), max_size=40))
def test_depths_are_those_of_the_blocks_one_by_one(places: list[int]) -> None:
    """Whatever the shape of the tree: as many blocks as are told lie within each depth, and fewer within less."""
    office = Office("a", host_slabs=4)
    office.enter(FakePeer(1))
    chains = [key_chain(1)]
    for number, place in enumerate(places[:12]):
        before = chains[place % len(chains)]
        chains.append(before + key_chain(1, seed=number + 1))
        if len(chains[-1]) // 16 <= 4:
            office.store(chains[-1])
    tree = office.cache.tree_of("a")
    blocks = sorted(depth for run in tree.runs() for depth in range(run.start + 1, run.end + 1))
    found = depths_of([tree])

    assert (found.blocks, found.deepest) == (len(blocks), max(blocks, default=0))
    for depth, percent in ((found.half, 50), (found.nine_tenths, 90)):
        assert depth == (blocks[-(-len(blocks) * percent // 100) - 1] if blocks else 0)


def test_tree_of_one_replica() -> None:
    """The tree of a replica is that of its namespace only; an unknown replica is refused."""
    office = Office("a", "b")

    assert [view.level for view in survey(office.cache, "b", 8, 8, 16)] == [0]
    assert office.error(wire.Tree(id=1, replica="c"), peer=b"cli") is ErrorCode.UNKNOWN_REPLICA


def test_tree_marks_leases_and_loads(office: Office) -> None:
    """A lease pins the run that its hit ends in; blocks on their way are counted where they lie."""
    keys = branch(key_chain(3), 4, seed=2)
    office.expect(wire.Acquired, office.acquire(keys[: 5 * 16]), keys[: 5 * 16], peer=TWO)

    nodes = tree(office, "b")
    # the lease and its load both end behind block 5, in the run of four
    assert [(node.start, node.blocks, node.loading, node.pins) for node in nodes] == [
        (0, 0, 0, 0),
        (0, 3, 3, 0),
        (3, 4, 2, 2),
        (3, 2, 0, 0),
    ]
    office.workers["b"].end_all()
    assert [(node.loading, node.pins) for node in tree(office)] == [(0, 0), (0, 0), (0, 1), (0, 0)]


def test_tree_counts_holes_of_the_host_pool_as_missing() -> None:
    """Blocks whose copy failed are not held, though blocks behind them are; inspect names no copy there."""
    office = Office(host_slabs=2)
    office.enter(FakePeer(1))
    keys = branch(key_chain(3), 2, seed=1)
    office.store(keys[:48])
    office.store(keys)
    first, second = office.workers["a"].under_way(TransferKind.STORE)
    office.workers["a"].end(first, "failed")
    office.workers["a"].end(second)

    (_, run) = survey(office.cache, "a", 8, 8, 16)
    assert (run.blocks, run.tiers) == (5, {"a": 5, "host": 2})
    tiers = [[place.tier for place in inspect(office, keys[at : at + 16]).places] for at in (32, 48)]
    assert tiers == [["a"], ["a", "host"]]


def test_inspect_says_where_a_block_is(office: Office) -> None:
    """Depth, run, the block before, and every copy with its slot and state."""
    keys = branch(key_chain(3), 4, seed=2)
    report = inspect(office, keys[4 * 16 : 5 * 16])

    assert (report.found, report.depth, report.run_start, report.run_blocks, report.children) == (True, 4, 3, 4, 0)
    assert (inspect(office, report.parent).depth, report.namespace) == (3, NAMESPACE[:8].hex())
    assert [(place.tier, place.state) for place in report.places] == [("a", "cached"), ("host", "cached")]
    assert (report.leases, report.transfers) == ((), ())


def test_inspect_names_the_slots_that_hits_name(office: Office) -> None:
    """The slot of a device copy is the one that an acquire of the same prompt reads."""
    keys = key_chain(3)
    _, (hit, _) = office.ask(office.acquire(keys), keys)
    first, count = array("i", hit)

    slots = [inspect(office, keys[at : at + 16]).places[0].slot for at in range(0, 48, 16)]
    assert slots == list(range(first, first + count))


def test_inspect_finds_the_block_before_over_the_end_of_a_run(office: Office) -> None:
    """The parent of a run's first block is the last block of the run before; the first block of a chain has none."""
    keys = branch(key_chain(3), 4, seed=2)

    before = inspect(office, keys[48:64]).parent
    assert (inspect(office, before).depth, inspect(office, keys[32:48]).depth) == (2, 2)
    first = inspect(office, keys[:16])
    assert (first.parent, first.depth, first.children) == (b"", 0, 2)


def test_what_reports_show_is_no_key(office: Office) -> None:
    """Nobody acquires a block by what `tree` and `inspect` tell of it, though `inspect` finds the block by that."""
    keys = branch(key_chain(3), 4, seed=2)
    shown = [node.key for node in tree(office)[1:]] + [inspect(office, keys[48:64]).parent]

    assert not {keys[at : at + 16] for at in range(0, len(keys), 16)} & set(shown)
    assert all(inspect(office, name).found for name in shown)
    for name in shown:
        taken = office.expect(wire.Acquired, office.acquire(name, name.hex()), name)
        assert taken.hit == 0


def test_names_that_can_be_asked_about_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The latest names are known, however many were shown."""
    monkeypatch.setattr(report_verbs, "NAMES_MAX", 2)
    names = ShownKeys()
    shown = [names.name_of(bytes([at]) * 16) for at in range(3)]

    assert [names.key_of(name) for name in shown] == [shown[0], b"\1" * 16, b"\2" * 16]
    assert names.name_of(b"") == b""


def test_inspect_names_holders_and_copies(office: Office) -> None:
    """Requests whose lease covers the block and transfers that copy it are named, others are not."""
    keys = branch(key_chain(3), 4, seed=2)
    acquired = office.expect(wire.Acquired, office.acquire(keys[: 5 * 16], "short"), keys[: 5 * 16], peer=TWO)
    (ticket,) = acquired.loads
    office.expect(wire.Acquired, office.acquire(keys[: 4 * 16], "other"), keys[: 4 * 16])

    held = inspect(office, keys[3 * 16 : 4 * 16])
    assert sorted(held.leases) == ["other", "short"]
    assert held.transfers == (f"load {ticket.transfer} of replica b, running",)
    assert ("b", "filling") in [(place.tier, place.state) for place in held.places]
    assert inspect(office, keys[4 * 16 : 5 * 16]).leases == ("short",)
    sibling = branch(key_chain(3), 2, seed=1)
    for key in (keys[5 * 16 : 6 * 16], sibling[3 * 16 : 4 * 16]):
        free = inspect(office, key)
        assert (free.leases, free.transfers) == ((), ())


def test_inspect_of_an_unknown_key_finds_nothing(office: Office) -> None:
    """Neither a key that nobody stored nor the end of one key and the start of the next is a block."""
    keys = branch(key_chain(3), 4, seed=2)

    assert not inspect(office, b"?" * 16).found
    assert find(office.cache, keys[4 * 16 + 8 : 5 * 16 + 8]) is None


def test_stats_tell_host_pool_and_transfers(office: Office) -> None:
    """The states of the host slots add up, slabs are counted, and copies under way are told by state and kind."""
    office.store(key_chain(1, seed=9))
    report = office.expect(wire.StatsReport, wire.Stats(id=77), peer=b"cli")

    (host,) = report.hosts
    assert (host.namespace, host.replicas, host.slabs, host.slots) == (NAMESPACE[:8].hex(), ("a", "b"), 2, 16)
    assert host.states == {"free": 6, "cached": 9, "filling": 1, "quarantined": 0, "absent": 0}
    assert sum(host.states.values()) == host.slots
    assert report.transfers == {"queued_stores": 0, "queued_loads": 0, "running_stores": 1, "running_loads": 0}
    assert report.counters["stored_blocks"] == 9


def test_reports_change_nothing(office: Office) -> None:
    """Looking at the index orders nothing and touches nothing."""
    before = [pool.clock for pool in office.cache.pools.values()]
    tree(office)
    inspect(office, key_chain(1))

    assert [pool.clock for pool in office.cache.pools.values()] == before
    assert office.workers["a"].transfers == office.workers["b"].transfers == {}
    match = wire.Match(id=office.next_id(), epoch=EPOCH, tokens=12, full=True)
    assert office.expect(wire.Matched, match, key_chain(3)).device == 3
