"""What requests ask of the cache: what is executed, and that nothing else is ignored without a word."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvcached_client.types import TransferId
from kvcached_client.vllm.daemon.commands import DropLoad, Offer, Pin, Pinned, Release, Seek
from kvcached_client.vllm.scheduling.wishes import ACTIONS_MAX, NO_WISHES, Wishes, WishLog, read_wishes
from tests.vllm_connector.link_rig import EXPIRED, REFUSED, ScriptedClient, connected, fetching_rig, rig
from tests.vllm_connector.link_rig import Rig as LinkRig
from tests.vllm_connector.rig import BLOCK, FakeRequest, Rig

__all__ = ["fetching_rig", "rig"]


def own(**wishes: object) -> dict[str, Any]:
    return {"kvcached": wishes}


def action(kind: object, version: object = "1.0", **payload: object) -> dict[str, Any]:
    return {"action_id": "1", "action_type": kind, "action_version": version, "payload": payload}


def envelope(*actions: object, version: object = "0.1") -> dict[str, Any]:
    return {"protocol_version": version, "message_id": "1", "actions": list(actions)}


def read(params: object = None, hints: object = None, *, may_fetch: bool = True, may_store: bool = True) -> Wishes:
    return read_wishes(params, hints, may_fetch=may_fetch, may_store=may_store)


def test_requests_without_wishes_are_as_before() -> None:
    """Without parameters and hints there is nothing to report; an empty map asks for nothing."""
    assert read() is NO_WISHES
    assert read({}) == read(own()) == read(None, envelope()) == NO_WISHES
    assert NO_WISHES.report() is None


def test_own_parameters() -> None:
    """Each key is executed and reported."""
    wishes = read(own(priority=-3, pin_ttl_s=1.5, prefetch="best_effort", share=False, tenant="acme"))
    assert (wishes.priority, wishes.pin_ttl_ms, wishes.prefetch, wishes.share) == (-3, 1500, "best_effort", False)
    assert wishes.tenant == "acme"
    assert wishes.report() == {
        "kvcached": {"accepted": ["priority", "pin_ttl_s", "prefetch", "share", "tenant"], "refused": {}},
    }


@pytest.mark.parametrize("kind", ["kv.retain", "kv.pin"])
def test_hints_as_a_map_and_as_vllms_structure(kind: str) -> None:
    """The same actions are executed whether they come in the parameters or in the field that vLLM has for them."""
    actions = [action(kind, ttl_s=60), action("kv.demote"), action("kv.prefetch", wait="off")]
    structure = SimpleNamespace(protocol_version="0.1", actions=[SimpleNamespace(**each) for each in actions])
    for wishes in (read({"kv_hint": envelope(*actions)}), read(None, structure)):
        assert (wishes.pin_ttl_ms, wishes.priority, wishes.prefetch) == (60_000, -8, "off")
        assert wishes.accepted == (kind, "kv.demote", "kv.prefetch")
        assert wishes.refused == ()
    assert not read(None, envelope(action("kv.share", share=False))).share


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (own(ttl=3), "ttl"),
        (own(priority=8), "priority"),
        (own(priority=True), "priority"),
        (own(priority=1.0), "priority"),
        (own(pin_ttl_s=0), "pin_ttl_s"),
        (own(pin_ttl_s=604_801), "pin_ttl_s"),
        (own(pin_ttl_s=float("nan")), "pin_ttl_s"),
        (own(pin_ttl_s="60"), "pin_ttl_s"),
        (own(prefetch="never"), "prefetch"),
        (own(prefetch=[]), "prefetch"),
        (own(share=1), "share"),
        (own(tenant=""), "tenant"),
        (own(tenant="t" * 65), "tenant"),
        (own(tenant=7), "tenant"),
        (own(tenant="\ud800"), "tenant"),
        ({"kvcached": 3}, "kvcached"),
        ({"do_remote_prefill": True}, "do_remote_prefill"),
        ([], "kv_transfer_params"),
        ({"kv_hint": 7}, "kv_hint"),
        ({"kv_hint": envelope(version="9")}, "kv_hint"),
        ({"kv_hint": {"protocol_version": "0.1", "actions": {}}}, "kv_hint"),
        ({"kv_hint": envelope(action("kv.fetch", block_hashes=[1]))}, "kv.fetch"),
        ({"kv_hint": envelope(action(["kv.pin"]))}, "['kv.pin']"),
        ({"kv_hint": envelope(3)}, "None"),
        ({"kv_hint": envelope(action("kv.demote", version="2.0"))}, "kv.demote"),
        ({"kv_hint": envelope(action("kv.demote", block_hashes=[1]))}, "kv.demote"),
        ({"kv_hint": envelope(action("kv.pin"))}, "kv.pin"),
        ({"kv_hint": envelope(action("kv.pin", ttl_s=-1))}, "kv.pin"),
    ],
)
def test_what_cannot_be_executed_is_refused(params: object, name: str) -> None:
    """A wish that is unknown, malformed or beyond a limit changes nothing, and is reported with a reason."""
    wishes = read(params)
    assert [refused for refused, _ in wishes.refused] == [name]
    assert Wishes(refused=wishes.refused) == wishes
    report = wishes.report()
    assert report is not None
    assert report["kvcached"]["refused"][name]


def test_one_wish_does_not_spoil_another() -> None:
    """What can be executed is, whatever stands beside it; of two different values the first counts."""
    wishes = read({"x": 1, **own(priority=2, y=1), "kv_hint": envelope(action("kv.demote"), action("kv.pin", ttl_s=1))})
    assert (wishes.priority, wishes.pin_ttl_ms) == (2, 1000)
    assert dict(wishes.refused).keys() == {"x", "y", "kv.demote"}


def test_reading_from_storage_is_the_operators_choice() -> None:
    """If the engine's settings do not read from storage, no request does."""
    assert read(own(prefetch="timeout"), may_fetch=False).prefetch is None
    assert read(own(prefetch="off"), may_fetch=False).prefetch == "off"


def test_storing_is_the_operators_choice() -> None:
    """An engine that only loads stores nothing for any request, and says so to the one that asks for it."""
    assert not read(may_store=False).share
    assert not read(own(priority=2), may_store=False).share
    wishes = read(own(share=True), may_store=False)
    assert (wishes.share, wishes.refused) == (False, (("share", "this engine's kv_role is kv_consumer"),))


def test_wishes_are_bounded() -> None:
    """Of many actions or keys the first are read; long names are cut in reports."""
    wishes = read({"kv_hint": envelope(*[action("kv.demote")] * (ACTIONS_MAX + 1))})
    assert [name for name, _ in wishes.refused] == ["further actions"]
    wishes = read({"kvcached": {f"{'x' * 100} {number}": 1 for number in range(ACTIONS_MAX + 5)}})
    assert {name for name, _ in wishes.refused} == {"x" * 64, "further actions"}


def test_refusals_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each reason is logged once, so that clients cannot fill the log; every refusal is counted."""
    wishes = WishLog()
    for _ in range(3):
        wishes.note(read(own(priority=9, share=True)))
    assert (wishes.take(), wishes.take()) == ((3, 3), (0, 0))
    assert [record.message.split(":")[0] for record in caplog.records] == ["kvcached"]
    assert "'priority'" in caplog.text


# --- what the scheduler's side does ---------------------------------------------------------------------------------


def arrive(rig: Rig, tokens: int, **wishes: object) -> FakeRequest:
    request = FakeRequest("r", range(tokens))
    request.kv_transfer_params = own(**wishes)
    rig.side.on_new_request(request)
    return request


def test_priority_and_prefetch_go_with_the_seek() -> None:
    """The daemon gets the priority; the thread that asks it gets how long to wait for storage."""
    rig = Rig()
    arrive(rig, 2 * BLOCK + 1, priority=-8, prefetch="off", tenant="acme")
    (seek,) = rig.link.taken(Seek)
    assert (seek.priority, seek.prefetch, seek.tenant) == (-8, "off", "acme")


def test_blocks_that_are_not_to_be_shared_are_not_stored() -> None:
    """A request that does not share loads hits, but offers no block, neither while it runs nor at its end."""
    rig = Rig()
    request = arrive(rig, 3 * BLOCK + 1, share=False)
    rig.found(1)
    assert rig.matched(request) == (BLOCK, True)
    blocks = rig.start(request, 0, 3 * BLOCK + 1)
    report = rig.side.finished(request, blocks)
    assert report == {"kvcached": {"accepted": ["share"], "refused": {}}}
    assert (rig.link.taken(Offer), rig.held, len(rig.link.taken(Release))) == ([], [], 1)
    assert not rig.side.is_busy


def finish_pinned(rig: Rig, *, prompt: int = 2 * BLOCK + 1) -> FakeRequest:
    request = arrive(rig, prompt, pin_ttl_s=60)
    rig.found(0)
    rig.matched(request)
    rig.finish(request, rig.start(request, 0, prompt))
    return request


def test_prompt_is_pinned_once_it_is_stored() -> None:
    """The pin follows the last store of the request, because a pin keeps what is stored when it is set."""
    rig = Rig()
    request = finish_pinned(rig)
    rig.plan()
    orders = rig.idle()
    assert rig.link.taken(Pin) == []
    rig.report(orders)
    assert rig.link.taken(Pin) == [Pin(1, request.keys(0, 2), 60_000)]
    rig.link.events.append(Pinned(2))
    rig.idle()
    assert rig.side.take_wishes() == (1, 0)


def test_prompt_that_is_stored_already_is_pinned_at_once() -> None:
    """Where nothing is left to store, the pin follows the end of the request."""
    rig = Rig()
    finish_pinned(rig)
    rig.plan(pieces=[])
    rig.idle()
    assert len(rig.link.taken(Pin)) == 1


@pytest.mark.parametrize("blocks", [None, 0])
def test_pin_that_keeps_nothing_is_counted(blocks: int | None) -> None:
    """A pin that the daemon refuses, for its quota, or that meets no stored block, counts as refused."""
    rig = Rig()
    finish_pinned(rig)
    rig.unplan()
    rig.idle()
    rig.link.events.append(Pinned(blocks))
    rig.idle()
    assert rig.side.take_wishes() == (1, 1)


def test_pin_without_a_session_or_a_full_block_is_counted() -> None:
    """A request that never had a lease, or whose prompt fills no block, cannot be pinned."""
    rig = Rig(is_connected=False)
    rig.link.is_taking = False
    request = arrive(rig, 2 * BLOCK + 1, pin_ttl_s=60)
    rig.finish(request, rig.start(request, 0, 2 * BLOCK + 1))
    assert (rig.link.taken(Pin), rig.side.take_wishes()) == ([], (1, 1))
    rig = Rig()
    request = arrive(rig, BLOCK - 1, pin_ttl_s=60)
    rig.finish(request, rig.start(request, 0, BLOCK - 1))
    assert (rig.link.taken(Pin), rig.side.take_wishes()) == ([], (1, 1))


# --- what the daemon's thread does ----------------------------------------------------------------------------------


def test_pin_is_told(rig: LinkRig) -> None:
    """A pin gets the number of blocks that it keeps; one that is refused, or of another session, gets none."""
    client = ScriptedClient(1, pin=[3, REFUSED])
    connected(rig, client)
    for session in (1, 1, 7):
        rig.link.submit(Pin(session, bytes(32), 5000))
    assert rig.wait(3) == [Pinned(3), Pinned(None), Pinned(None)]
    assert client.calls == [("pin", bytes(32), 5000)] * 2


def test_pin_at_the_end_of_a_session_is_told(rig: LinkRig) -> None:
    """A pin that waits while the session ends gets its event, too."""
    client = ScriptedClient(1, cancel_load=EXPIRED)
    connected(rig, client)
    rig.link.submit(DropLoad(1, TransferId(3)))
    rig.link.submit(Pin(1, bytes(32), 5000))
    assert Pinned(None) in rig.wait(2)


def test_priority_is_told(rig: LinkRig) -> None:
    """The daemon gets the priority of a seek."""
    client = ScriptedClient(1)
    connected(rig, client)
    rig.link.submit(Seek(1, "r~1", bytes(32), 9, True, priority=-8))
    rig.wait(1)
    assert client.calls == [("acquire", "r~1", bytes(32), 9, False, -8)]


def test_tenant_is_told_before_its_blocks_are_fetched(fetching_rig: LinkRig) -> None:
    """The daemon gets the tenant of a seek with its prefetch, and again with its acquire."""
    client = ScriptedClient(1)
    connected(fetching_rig, client)
    fetching_rig.link.submit(Seek(1, "r~1", bytes(32), 9, True, tenant="acme"))
    fetching_rig.wait(1)
    client.pending[0].end()
    fetching_rig.wait(1)
    asked = [call for call in client.calls if call[0] in {"begin_prefetch", "acquire"}]
    assert [(call[0], call[-1]) for call in asked] == [("begin_prefetch", "acme"), ("acquire", "acme")]


def test_a_request_chooses_how_long_it_waits_for_storage(fetching_rig: LinkRig) -> None:
    """A request's wish goes before the engine's setting: not to ask storage, or to wait in another way."""
    client = ScriptedClient(1)
    connected(fetching_rig, client)
    fetching_rig.link.submit(Seek(1, "r~1", bytes(32), 9, True, prefetch="off"))
    fetching_rig.wait(1)
    fetching_rig.link.submit(Seek(2, "r~2", bytes(32), 9, True, prefetch="wait_complete"))
    fetching_rig.wait(1)
    assert [call[:1] for call in client.calls] == [("acquire",), ("begin_prefetch",)]
    assert client.calls[1][3] == "wait_complete"
    client.pending[0].end()
    fetching_rig.wait(1)
