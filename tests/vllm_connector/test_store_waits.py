"""Seeks that were told of blocks that another engine is storing wait for these, and acquire again."""

from __future__ import annotations

import pytest

from kvcached_client.errors import KvcachedError
from kvcached_client.offload import Hold
from kvcached_client.prefetch import PrefetchResult
from kvcached_client.types import LeaseId
from kvcached_client.vllm.daemon.client import FETCH_MS_MAX, UNAVAILABLE_S
from kvcached_client.vllm.daemon.commands import (
    Connected,
    Event,
    Fetching,
    Found,
    Lost,
    NotFound,
    Offer,
    Release,
    Seek,
)
from kvcached_client.vllm.scheduling.request_state import PREFILL_TOKENS
from kvcached_client.vllm.settings import PrefetchMode
from tests.vllm_connector.link_rig import (
    GONE,
    LOAD,
    REFUSED,
    SLOW,
    UNAVAILABLE,
    ScriptedClient,
    connected,
    fetching_rig,
    seek,
)
from tests.vllm_connector.link_rig import Rig as LinkRig
from tests.vllm_connector.rig import BLOCK, Rig

__all__ = ["fetching_rig"]

WAITS = FETCH_MS_MAX / 1000
#: Two of three blocks are being stored; then they are there.
STORING, STORED = Hold(LeaseId(5), 0, 2), Hold(LeaseId(6), 2)
WAITED = PrefetchResult(2, 0, is_over=True, reason="stored")


def without_storage(rig: LinkRig, client: ScriptedClient, *following: ScriptedClient) -> None:
    """Open a session with a daemon that has said that it has no storage."""
    connected(rig, client, *following)
    assert rig.link.submit(seek(99))
    assert rig.wait(1) == [Fetching(99, WAITS)]
    client.pending.pop().end(UNAVAILABLE)
    assert rig.wait(1) == [Found(99, 1, LeaseId(4), 0, None)]
    client.calls.clear()


def client_of(*holds: Hold | KvcachedError) -> ScriptedClient:
    """A session that answers the first seek with a miss, and further ones as said."""
    return ScriptedClient(1, acquire=[Hold(LeaseId(4), 0), *holds])


def found(hold: Hold = STORED, session: int = 1) -> Event:
    return Found(1, session, hold.lease, hold.hit, LOAD if hold.hit else None)


def test_seek_waits_for_a_store_and_acquires_again(fetching_rig: LinkRig) -> None:
    """A seek that hits blocks that are being stored gives its lease back behind the wait, and hits them afterwards."""
    client = client_of(STORING, STORED)
    without_storage(fetching_rig, client)
    assert fetching_rig.link.submit(seek(1, rate=100.0))
    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    client.pending[0].end(WAITED)

    assert fetching_rig.wait(1) == [found()]
    assert [call[0] for call in client.calls] == ["acquire", "begin_prefetch", "release", "acquire", "prepare_load"]
    assert client.calls[1] == ("begin_prefetch", bytes(32), 9, "timeout", 100.0)
    assert client.calls[2] == ("release", STORING.lease)


def test_seek_waits_again_as_long_as_that_brings_something(fetching_rig: LinkRig) -> None:
    """Of a prompt that is stored piece by piece each is waited for; a wait in vain is the last."""
    more, same = Hold(LeaseId(6), 1, 1), Hold(LeaseId(7), 1, 1)
    client = client_of(STORING, more, same)
    without_storage(fetching_rig, client)
    assert fetching_rig.link.submit(seek(1))
    for number in range(2):
        assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
        client.pending[number].end(WAITED)

    assert fetching_rig.wait(1) == [found(same)]


def test_wait_in_vain_does_not_silence_storage(fetching_rig: LinkRig) -> None:
    """However a wait for a store ends, storage is asked as often as before; that there is none says its own answer."""
    client = ScriptedClient(1, acquire=[STORING, STORED, STORED])
    connected(fetching_rig, client)
    assert fetching_rig.link.submit(seek(1))
    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    client.pending[0].end()
    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    client.pending[1].end(PrefetchResult(0, 0, is_over=True, reason="failed"))
    assert fetching_rig.wait(1) == [found()]

    assert fetching_rig.link.submit(seek(2))
    assert fetching_rig.wait(1) == [Fetching(2, WAITS)]


@pytest.mark.parametrize("mode", ["off", "best_effort"])
def test_request_that_does_not_wait_computes(fetching_rig: LinkRig, mode: PrefetchMode) -> None:
    """A request that is not to wait for storage does not wait for stores either."""
    client = client_of(STORING)
    without_storage(fetching_rig, client)
    hurried = Seek(1, "r~1", bytes(32), 9, load=True, prefetch=mode)
    assert fetching_rig.link.submit(hurried)

    assert fetching_rig.wait(1) == [found(STORING)]


def test_seek_for_storing_does_not_wait_for_stores(fetching_rig: LinkRig) -> None:
    """A lease for storing only needs no hit."""
    client = client_of(STORING)
    without_storage(fetching_rig, client)
    assert fetching_rig.link.submit(seek(1, load=False))

    assert fetching_rig.wait(1) == [found(STORING)]


def test_refused_wait_keeps_the_hit(fetching_rig: LinkRig) -> None:
    """Where the daemon refuses to let a seek wait, the seek keeps its lease."""
    client = client_of(STORING)
    without_storage(fetching_rig, client)
    client._answers["begin_prefetch"] = REFUSED
    assert fetching_rig.link.submit(seek(1))

    assert fetching_rig.wait(1) == [found(STORING)]
    assert "release" not in [call[0] for call in client.calls]


def test_wait_ends_with_the_session_and_begins_anew(fetching_rig: LinkRig) -> None:
    """A daemon that dies while a seek waits loses it not: the next session answers it, without another wait."""
    client, following = client_of(STORING), ScriptedClient(2, acquire=[STORED])
    without_storage(fetching_rig, client, following)
    assert fetching_rig.link.submit(seek(1))
    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    client.pending[0].end(GONE)
    lost, opened, waits = fetching_rig.wait(3)
    assert (lost, waits) == (Lost(1), Fetching(1, WAITS))
    assert isinstance(opened, Connected)
    following.pending[0].end(UNAVAILABLE)

    assert fetching_rig.wait(1) == [found(session=2)]


def test_wait_that_misses_its_deadline_is_a_miss(fetching_rig: LinkRig) -> None:
    """A daemon that does not answer costs a seek that waits its hit, not the request."""
    client = client_of(STORING)
    without_storage(fetching_rig, client)
    assert fetching_rig.link.submit(seek(1))
    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    client.pending[0].end(SLOW)

    assert fetching_rig.wait(1) == [NotFound(1, is_late=True)]


def test_silence_about_storage_does_not_hold_for_stores(fetching_rig: LinkRig) -> None:
    """A daemon that has no storage is not asked for it for a while; stores are waited for meanwhile."""
    client = client_of(STORING, STORED)
    without_storage(fetching_rig, client)
    fetching_rig.now += UNAVAILABLE_S / 2
    assert fetching_rig.link.submit(seek(1))

    assert fetching_rig.wait(1) == [Fetching(1, WAITS)]
    assert client.calls[0][0] == "acquire"


def test_prefill_for_another_engine_ends_when_its_offers_are_planned() -> None:
    """A prefill of several steps has made its last offer, and knows the reply, before its response leaves vLLM."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    request.max_tokens = PREFILL_TOKENS
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 2 * BLOCK)
    blocks += (added := rig.blocks(3))
    rig.run(request, 2 * BLOCK + 1, added=added)  # as with asynchronous scheduling: the first reply has not come yet
    rig.plan()

    def answer(_: float) -> None:
        rig.plan()

    rig.link.during_wait = answer
    rig.finish(request, blocks)

    assert (len(rig.link.waits), rig.link.taken(Offer), len(rig.link.taken(Release))) == (1, [], 1)


def test_nobody_waits_for_the_offers_of_an_embedding() -> None:
    """VLLM asks for one token with every request for an embedding: no other engine waits for its blocks."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    request.max_tokens, request.pooling_params = PREFILL_TOKENS, object()
    rig.found(0)
    rig.matched(request)
    blocks = rig.start(request, 0, 4 * BLOCK + 1)
    rig.finish(request, blocks)

    assert (rig.link.waits, len(rig.link.taken(Offer)), rig.link.hurries) == ([], 1, 0)


@pytest.mark.parametrize(("max_tokens", "hurries"), [(PREFILL_TOKENS, True), (16, False)])
def test_prefill_for_another_engine_is_offered_at_once(max_tokens: int, hurries: bool) -> None:
    """The blocks of a request that ends with its first token do not wait for those of others; other blocks do."""
    rig = Rig()
    request = rig.arrive("r", 4 * BLOCK + 1)
    request.max_tokens = max_tokens
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 4 * BLOCK + 1)

    assert (len(rig.link.taken(Offer)), bool(rig.link.hurries)) == (1, hurries)
