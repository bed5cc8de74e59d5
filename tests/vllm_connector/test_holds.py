"""What is asked of the daemon for a request's hit, and what vLLM is answered."""

from __future__ import annotations

import pytest

from kvcached_client.protocol.fields import REQUEST_NAME_LENGTH_MAX
from kvcached_client.vllm.daemon.commands import DropLoad, Release, Seek
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig


def test_hit_is_asked_for_when_request_arrives() -> None:
    """A request's arrival asks the daemon for its prompt by the first 16 bytes of its block hashes."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    (seek,) = rig.link.taken(Seek)
    assert (seek.keys, seek.tokens, seek.load) == (request.keys(0, 3), 3 * BLOCK + 1, True)


def test_undecided_until_answer_is_in() -> None:
    """VLLM is told to ask again while the answer is out, and the hit then; a load is always asynchronous."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    assert rig.matched(request) == rig.matched(request) == (None, False)
    rig.found(3)
    assert rig.matched(request) == (3 * BLOCK, True)


def test_asking_again_has_no_effect() -> None:
    """VLLM may ask for the same request as often as it likes: nothing is sent, and the answer stays."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(2)
    answers = {rig.matched(request) for _ in range(5)}
    assert (answers, rig.link.commands) == ({(2 * BLOCK, True)}, [])


def test_one_token_is_left_to_compute() -> None:
    """Of a prompt that is cached to its last block vLLM is told one block less: the next token comes out of it."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK)
    rig.found(3)
    assert rig.matched(request) == (2 * BLOCK, True)


def test_prompt_without_usable_block_is_not_asked_for() -> None:
    """A prompt that is no longer than a block costs the daemon no question, and vLLM no wait."""
    rig = Rig()
    assert rig.matched(rig.arrive("r", BLOCK)) == (0, False)
    assert rig.link.commands == []


def test_local_hit_as_long_needs_no_answer() -> None:
    """Where vLLM itself has all that may be loaded it does not wait for the daemon."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    assert rig.matched(request, 3 * BLOCK) == (0, False)


def test_hit_is_counted_beyond_local_hit() -> None:
    """Of a hit only what lies beyond vLLM's own counts."""
    rig = Rig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.found(4)
    assert rig.matched(request, BLOCK) == (3 * BLOCK, True)
    assert rig.matched(request, 4 * BLOCK) == (0, False)


def test_local_hit_inside_block_takes_no_load() -> None:
    """A local hit that ends inside a block is not continued: loads are whole blocks."""
    rig = Rig()
    request = rig.arrive("r", 5 * BLOCK + 1)
    rig.found(4)
    assert rig.matched(request, BLOCK + 1) == (0, False)


def test_late_answer_is_not_waited_for() -> None:
    """A request is computed if no answer came within the deadline; one that comes later gives its load back."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.now += 0.99
    assert rig.matched(request) == (None, False)
    rig.now += 0.01
    assert rig.matched(request) == (0, False)
    rig.start(request, 0, 3 * BLOCK + 1)
    found = rig.found(3)
    rig.idle()
    assert found.load is not None
    assert rig.link.taken(DropLoad) == [DropLoad(1, found.load.transfer)]
    assert rig.link.taken(Release) == []  # the lease is of use for storing


def test_answer_after_deadline_counts_if_still_in_time() -> None:
    """A request that was given up for, but could not be admitted, uses an answer that has come meanwhile."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.now += 2
    assert rig.matched(request) == (0, False)
    rig.found(2)
    assert rig.matched(request) == (2 * BLOCK, True)


def test_no_session_no_wait() -> None:
    """Without a session requests are computed at once, and asked for when they come up while there is one."""
    rig = Rig(is_connected=False)
    rig.link.is_taking = False
    request = rig.arrive("r", 3 * BLOCK + 1)
    assert rig.matched(request) == (0, False)
    rig.connect()
    assert rig.matched(request) == (None, False)
    rig.found(1)
    assert rig.matched(request) == (BLOCK, True)


def test_refusal_is_a_miss() -> None:
    """Where the daemon refuses, vLLM is told 0, and it is not asked again for this request."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.not_found()
    assert rig.matched(request) == rig.matched(request) == (0, False)
    assert rig.link.taken(Seek) == []


def test_hit_that_cannot_be_loaded_is_a_miss() -> None:
    """Where the daemon has a lease but no load, vLLM is told 0."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(3, loadable=False)
    assert rig.matched(request) == (0, False)


def test_skip_reading_asks_for_nothing() -> None:
    """A request that must be computed is not asked for; its blocks are stored under a lease that prepares no load."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1, skip_reading=True)
    assert rig.matched(request) == (0, False)
    assert rig.link.commands == []
    rig.start(request, 0, 3 * BLOCK + 1)
    (seek,) = rig.link.taken(Seek)
    assert not seek.load


def test_aborted_before_answer() -> None:
    """A request that ends before its answer gives back what the answer brings."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.finish(request, [])
    assert rig.side.is_busy
    found = rig.found(3)
    rig.idle()
    assert found.load is not None
    assert rig.link.commands == [DropLoad(1, found.load.transfer), Release(1, found.lease)]
    assert not rig.side.is_busy


def test_aborted_with_answer() -> None:
    """A request that ends before it was admitted gives back its load and its lease."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    found = rig.found(3)
    rig.matched(request)
    rig.finish(request, [])
    assert found.load is not None
    assert rig.link.commands == [DropLoad(1, found.load.transfer), Release(1, found.lease)]


def test_admitted_without_load_drops_it() -> None:
    """A hit that vLLM does not take, because its own covers it or another connector's was chosen, is given back."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    found = rig.found(2)
    assert rig.matched(request, 3 * BLOCK) == (0, False)
    rig.side.allocated(request, [rig.blocks(4)], 0)
    assert found.load is not None
    assert rig.link.taken(DropLoad) == [DropLoad(1, found.load.transfer)]


def test_session_lost_before_use_asks_the_next_one() -> None:
    """A hit that waits to be used is void with its session; the request is asked for in the next one."""
    rig = Rig()
    request = rig.arrive("r", 3 * BLOCK + 1)
    rig.found(3)
    rig.matched(request)
    rig.lose()
    rig.connect()
    assert rig.matched(request) == (None, False)
    rig.found(2)
    assert rig.matched(request) == (2 * BLOCK, True)
    assert (rig.link.taken(Release), rig.link.taken(DropLoad)) == ([], [])


def test_workers_are_told_of_session_with_every_step() -> None:
    """Each step says which session workers are to join; none while there is none."""
    rig = Rig(is_connected=False)
    assert rig.idle().session is None
    note = rig.connect()
    assert rig.idle().session == rig.idle().session == note
    rig.lose()
    assert rig.idle().session is None


@pytest.mark.parametrize("request_id", ["x", "x" * 250, "x" * 256, "x" * 5000, "\ud800"])
def test_names_fit_and_differ(request_id: str) -> None:
    """Request ids of any length and any characters make names that the daemon takes, another one each time."""
    rig = Rig()
    names = set()
    for _ in range(3):
        rig.side.on_new_request(FakeRequest(request_id, range(3 * BLOCK)))
        (seek,) = rig.link.taken(Seek)
        names.add(seek.name)
    assert len(names) == 3
    assert max(map(len, names)) <= REQUEST_NAME_LENGTH_MAX
    assert all(name.encode() for name in names)


def test_hook_for_unknown_request() -> None:
    """A request whose arrival was not told is asked for when it comes up."""
    rig = Rig()
    request = FakeRequest("r", range(3 * BLOCK))
    assert rig.matched(request) == (None, False)
    assert len(rig.link.taken(Seek)) == 1
