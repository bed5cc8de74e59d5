"""An engine of before a restart says what it holds, and goes on with it."""

from __future__ import annotations

from array import array

import pytest

from kvcached.core.cache import Cache
from kvcached.core.messages import MembersDied, Ticked
from kvcached.core.restart.rejoin import Rejoin
from kvcached.core.restart.restore import RestoredCache
from kvcached.core.slots.ranges import Ranges
from kvcached.core.slots.states import SessionState
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId, SessionId
from tests.core.engine import BLOCK_SIZE, EPOCH, TTL_MS, Engine, keys_of, make_cache, refused, snapshot, states
from tests.core.line_count import count_lines


class Returned:
    """A session of before the restart, on a pool of 16 slots."""

    def __init__(self, cache: Cache, fence: int = 0) -> None:
        self.cache = cache
        self.core = Rejoin(cache)
        self.session: SessionId = RestoredCache(cache).pool_session("a")
        self.core.resume(self.session, 0, FenceSequence(fence))

    def declare(
        self,
        text: str,
        held: list[int],
        own: list[int],
        *,
        request: str = "",
        hit: int | None = None,
        tokens: int = 0,
    ) -> LeaseId:
        """A lease on the blocks of `text`, in these slots, with others of its own."""
        return self.core.declare(
            self.session,
            EPOCH,
            request or text,
            tokens or len(text) * BLOCK_SIZE,
            len(text) if hit is None else hit,
            keys_of(text),
            ranges(held),
            ranges(own),
        )

    def over(self) -> int:
        return self.core.over(self.session, EPOCH)

    def hit(self, text: str) -> int:
        keys = keys_of(text)
        return self.cache.managed.match(self.session, EPOCH, keys, len(text) * BLOCK_SIZE, full=True)[0]

    def release(self, lease: LeaseId) -> None:
        self.cache.managed.release(self.session, EPOCH, lease, FenceSequence(0))


def ranges(slots: list[int]) -> Ranges[int]:
    return array("i", [number for slot in slots for number in (slot, 1)])


@pytest.fixture
def returned(cache: Cache) -> Returned:
    return Returned(cache)


def test_declared_leases_go_on(cache: Cache, returned: Returned) -> None:
    """A declared lease commits, allocates and releases as before; its blocks are found, nothing is left set aside."""
    lease = returned.declare("abc", [5, 2, 9], [7, 8])
    assert states(cache) == (0, 2, 3, 0, 11)
    assert returned.over() == 11

    keys = keys_of("abcd")[48:]
    done = cache.managed.commit(returned.session, EPOCH, lease, 3, keys, ranges([7]), FenceSequence(0))
    assert (done.depth, returned.hit("abcd")) == (4, 4)
    assert array("i", cache.managed.allocate(returned.session, EPOCH, lease, 2))[1] == 2
    returned.release(lease)
    assert states(cache) == (12, 0, 4, 0, 0)


def test_leases_share_what_they_shared(cache: Cache, returned: Returned) -> None:
    """Two leases on one prefix declare the same slots for it; both pin it."""
    one = returned.declare("abc", [1, 2, 3], [4])
    other = returned.declare("abx", [1, 2, 6], [])
    returned.over()

    assert [returned.hit(text) for text in ("abc", "abx")] == [3, 3]
    assert states(cache) == (11, 1, 4, 0, 0)
    returned.release(one)
    returned.release(other)
    assert states(cache) == (12, 0, 4, 0, 0)


def test_lease_keeps_its_own_copy_of_a_block(cache: Cache, returned: Returned) -> None:
    """Where two leases have computed one block each keeps its slot; the first that is declared is found."""
    returned.declare("ab", [1, 2], [], request="first")
    second = returned.declare("ab", [1, 5], [6], request="second")
    returned.over()

    assert states(cache) == (12, 2, 2, 0, 0)
    returned.release(second)
    assert states(cache) == (14, 0, 2, 0, 0)


@pytest.mark.parametrize("slots", [([1, 2, 3], [4, 2, 5]), ([4, 2, 5], [1, 2, 3])], ids=["found first", "found last"])
def test_leases_share_behind_a_copy_of_their_own(
    cache: Cache, returned: Returned, slots: tuple[list[int], list[int]]
) -> None:
    """A lease that keeps its own copy of a block may share the next one with another lease."""
    one = returned.declare("abc", slots[0], [])
    other = returned.declare("abx", slots[1], [6])
    returned.over()

    assert [returned.hit(text) for text in ("abc", "abx")] == [3, 3]
    assert states(cache) == (10, 2, 4, 0, 0)
    returned.release(one)
    returned.release(other)
    assert states(cache) == (12, 0, 4, 0, 0)


@pytest.mark.parametrize("last", [0, 1, 2])
def test_leases_share_a_copy_that_is_not_found(cache: Cache, returned: Returned, last: int) -> None:
    """Leases that hit one block go on sharing its slot where another lease's copy of the block was declared first.

    The slot is free once the last of them is released.
    """
    returned.declare("ab", [1, 5], [], request="own copy")
    leases = [
        returned.declare("ab", [1, 2], [], request="one"),
        returned.declare("abc", [1, 2, 3], [], request="two"),
        returned.declare("abd", [1, 2, 4], [], request="three"),
    ]
    returned.over()
    assert states(cache) == (11, 1, 4, 0, 0)

    leases.append(leases.pop(last))
    for lease in leases[:-1]:
        returned.release(lease)
        assert states(cache) == (11, 1, 4, 0, 0)
    returned.release(leases[-1])
    assert states(cache) == (12, 0, 4, 0, 0)


def test_shared_copy_waits_for_every_fence(cache: Cache) -> None:
    """A slot that two leases shared is free when the fences of both releases have signalled, in whichever order."""
    returned = Returned(cache)
    returned.declare("ab", [1, 5], [], request="own copy")
    one = returned.declare("ab", [1, 2], [], request="one")
    other = returned.declare("ab", [1, 2], [], request="other")
    returned.over()

    cache.managed.release(returned.session, EPOCH, one, FenceSequence(7))
    cache.managed.release(returned.session, EPOCH, other, FenceSequence(0))
    assert states(cache) == (13, 0, 2, 1, 0)
    cache.managed.heartbeat(returned.session, FenceSequence(7), 0)
    assert states(cache) == (14, 0, 2, 0, 0)


@pytest.mark.parametrize("released", [0, 1, 2])
def test_shared_copies_end_with_their_session(cache: Cache, returned: Returned, released: int) -> None:
    """Slots that leases share are set aside when the session expires, and free when its processes are dead."""
    returned.declare("ab", [1, 5], [], request="own copy")
    leases = [returned.declare("ab", [1, 2], [], request=name) for name in ("one", "other")]
    returned.over()
    for lease in leases[:released]:
        returned.release(lease)

    cache.handle(Ticked(TTL_MS + 1))
    assert states(cache) == (14, 0, 2, 0, 0) if released == 2 else (13, 0, 2, 0, 1)
    cache.handle(MembersDied(returned.session))
    assert states(cache) == (14, 0, 2, 0, 0)


def test_hit_that_was_loading_is_shorter(cache: Cache, returned: Returned) -> None:
    """Blocks that were on their way when the daemon died get slots of the lease's own when their end is asked for."""
    lease = returned.declare("ab", [1, 2], [9], hit=4, tokens=20)
    returned.over()
    loaded = cache.managed.load(returned.session, EPOCH, lease)

    assert loaded is not None
    assert loaded.hit == 2
    assert sum(array("i", loaded.ranges)[1::2]) == 2
    assert states(cache) == (11, 3, 2, 0, 0)


def test_nothing_counts_before_the_fence_of_before_has_signalled(cache: Cache) -> None:
    """Until the last fence from before the restart signals, declared blocks stay, and no other slot is granted."""
    returned = Returned(cache, fence=5)
    lease = returned.declare("ab", [1, 2], [])
    assert returned.over() == 0
    returned.release(lease)
    assert states(cache) == (0, 0, 2, 14, 0)
    assert cache.pools["a"].evictable == 0
    with refused("no_capacity"):
        cache.managed.acquire(returned.session, EPOCH, "r", keys_of("x"), 4, 0, full=True)

    cache.managed.heartbeat(returned.session, FenceSequence(5), 0)
    assert states(cache) == (14, 0, 2, 0, 0)
    assert cache.pools["a"].evictable == 2


@pytest.mark.parametrize("order", [("abc", "ab"), ("ab", "abc")], ids=["writer first", "reader first"])
def test_hit_on_blocks_that_are_still_written_is_not_believed(cache: Cache, order: tuple[str, str]) -> None:
    """An engine dies before the fence of its last life under another daemon signals: none of its blocks is found."""
    returned = Returned(cache, fence=5)
    for text in order:
        returned.declare(text, [1, 2, 3][: len(text)], [])
    returned.over()
    assert returned.hit("abc") == 3
    cache.handle(MembersDied(returned.session))

    assert states(cache) == (16, 0, 0, 0, 0)
    assert Engine(cache).hit("abc") == 0


@pytest.mark.parametrize(
    ("text", "held", "own"),
    [
        ("cd", [1, 3], []),  # 1 is another lease's
        ("cd", [3, 3], []),
        ("cd", [3, 4], [4]),
        ("c", [16], []),
        ("c", [3], [-1]),
        ("abx", [1, 4, 2], []),  # 2 is another block's
    ],
)
def test_slots_are_declared_once(cache: Cache, returned: Returned, text: str, held: list[int], own: list[int]) -> None:
    """A slot that is another lease's, named twice, or not there is refused, and nothing has changed."""
    returned.declare("ab", [1, 2], [])
    before = snapshot(cache)

    with refused("unknown_slot"):
        returned.declare(text, held, own)
    assert snapshot(cache) == before


def test_contradictions_are_refused(returned: Returned) -> None:
    """A name twice, keys and slots that do not pair, a hit below what is there: refused."""
    returned.declare("ab", [1, 2], [])
    with refused("request_conflict"):
        returned.declare("ab", [3, 4], [])
    with refused("bad_value"):
        returned.declare("cd", [3], [])
    with refused("bad_value"):
        returned.declare("cd", [3, 4], [], hit=1)


def test_nothing_is_granted_before_all_is_declared(cache: Cache, returned: Returned) -> None:
    """Until the engine has said that this was all, no slot of the pool is anybody's."""
    returned.declare("ab", [1, 2], [])
    with refused("no_capacity"):
        cache.managed.acquire(returned.session, EPOCH, "r", keys_of("x"), 4, 0, full=True)
    returned.over()
    assert cache.managed.acquire(returned.session, EPOCH, "r", keys_of("x"), 4, 0, full=True).hit == 0


def test_declaring_ends_once(returned: Returned) -> None:
    """After the end nothing more is declared, and a session that is active is not resumed again."""
    returned.over()
    with refused("out_of_order"):
        returned.declare("ab", [1, 2], [])
    with refused("out_of_order"):
        returned.over()
    with refused("no_session"):
        returned.core.resume(returned.session, 0, NO_FENCE)


def test_sessions_of_now_declare_nothing(cache: Cache) -> None:
    """An engine of this daemon's own, active or expired, has nothing to declare."""
    engine = Engine(cache)
    core = Rejoin(cache)
    with refused("out_of_order"):
        core.over(engine.session, EPOCH)
    for now_ms in (1, 500, 1000, TTL_MS + 1):
        cache.handle(Ticked(now_ms))
    assert cache.managed.sessions[engine.session].state is SessionState.EXPIRED
    with refused("no_session"):
        core.resume(engine.session, 0, NO_FENCE)


@pytest.mark.parametrize("said", ["a part", "all", "more"])
def test_engine_that_goes_silent_again(cache: Cache, returned: Returned, said: str) -> None:
    """A session that was resumed expires like any other; all is set aside if its engine may come back, and it ends."""
    returned.declare("ab", [1, 2], [3])
    if said != "a part":
        returned.over()
    if said == "more":
        assert returned.hit("ab") == 2
    for now_ms in (1, 500, 1000, TTL_MS + 1):
        cache.handle(Ticked(now_ms))

    assert states(cache) == ((13, 0, 2, 0, 1) if said == "more" else (0, 0, 2, 0, 14))
    assert cache.managed.sessions[returned.session].may_return == (said != "more")
    cache.handle(MembersDied(returned.session))
    assert states(cache) == (14, 0, 2, 0, 0)


@pytest.mark.parametrize("fence", [0, 7])
@pytest.mark.parametrize("said", ["nothing", "a part", "all", "all, and is silent"])
def test_engine_comes_back_again(cache: Cache, said: str, fence: int) -> None:
    """An engine that may not have heard how far its return got declares the same again, and has it once."""
    returned = Returned(cache, fence)
    if said != "nothing":
        returned.declare("ab", [1, 2], [3])
    if said.startswith("all"):
        returned.declare("abc", [1, 2, 4], [5])
        returned.over()
    if said == "all, and is silent":
        for now_ms in (1, 500, 1000, TTL_MS + 1):
            cache.handle(Ticked(now_ms))

    returned.core.resume(returned.session, 0, FenceSequence(fence))
    assert cache.managed.sessions[returned.session].leases == {}
    with refused("no_capacity"):
        cache.managed.acquire(returned.session, EPOCH, "r", keys_of("x"), 4, 0, full=True)
    leases = [returned.declare("abc", [1, 2, 4], [5]), returned.declare("ab", [1, 2], [3])]
    returned.over()
    cache.managed.heartbeat(returned.session, FenceSequence(fence), 0)
    assert states(cache) == (11, 2, 3, 0, 0)
    assert returned.hit("abc") == 3
    for lease in leases:
        returned.release(lease)
    assert states(cache) == (13, 0, 3, 0, 0)
    with refused("no_session"):  # it has heard that it is back
        returned.core.resume(returned.session, 0, NO_FENCE)


def test_cleared_session_does_not_come_back_again(cache: Cache, returned: Returned) -> None:
    """A clear voids what an engine holds that may not have heard of its return."""
    returned.declare("ab", [1, 2], [3])
    returned.over()
    cache.clearings.begin(cache.tree_of("a"), bytes(32), 1)
    with refused("no_session"):
        returned.core.resume(returned.session, 0, NO_FENCE)


def test_many_slots_with_blocks_cost_some_steps_each() -> None:
    """A lease whose own slots hold blocks of a thousand prompts is declared in one look through all of them."""
    prompts = 999
    cache = make_cache(slots=2 * prompts)
    engine = Engine(cache)
    for number in range(prompts):
        engine.store(chr(number) + "x")
    cache.close_session(engine.session)
    returned = Returned(cache)
    own = [slot for slot in range(2 * prompts) if slot % 3]  # of three prompts the last block, the first one, and both
    count_lines(lambda: returned.declare("", [], own), most=100 * 2 * prompts)

    assert returned.over() == 333  # last blocks, which went with the first ones
    assert states(cache) == (333, len(own), 333, 0, 0)
