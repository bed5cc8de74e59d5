"""What single requests ask for, as salts, adapters and resets; and what becomes of those that nobody waits for."""

from __future__ import annotations

import http.client
import json
from typing import Any

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, UnixConnection
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import assert_same
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_salts_share_nothing(server: VllmServer, reference: VllmServer, prompt: Prompts) -> None:
    """What was computed under a cache salt is hit under the same salt only."""
    tokens = prompt(5)
    for salt in ("red", "blue"):
        assert server.complete(tokens, cache_salt=salt).cached_tokens == 0
        server.forget()
    assert server.complete(tokens).cached_tokens == 0
    reference.complete(tokens)
    server.forget()
    for options in ({"cache_salt": "red"}, {"cache_salt": "blue"}, {}):
        assert_same(server.complete(tokens, **options), reference.complete(tokens))


def test_adapters_share_nothing(server: VllmServer, other: VllmServer, reference: VllmServer, prompt: Prompts) -> None:
    """What was computed with a LoRA adapter is hit with that adapter only, on all servers that have it."""
    tokens = prompt(6)
    names = ("tiny", "one", "two")
    cold = [reference.complete(tokens, model=name) for name in names]
    assert len({answer.tokens for answer in cold}) == len(names)
    for name, expected in zip(names, cold, strict=True):
        assert_same(server.complete(tokens, model=name), expected)
        server.forget()
    for name in names:
        expected = reference.complete(tokens, model=name)
        assert_same(server.complete(tokens, model=name), expected)
        assert_same(other.complete(tokens, model=name), expected)


def test_adapters_of_one_name_share_nothing(
    server: VllmServer, other: VllmServer, reference: VllmServer, prompt: Prompts
) -> None:
    """Two servers that call different adapters by the same name get nothing of each other."""
    tokens = prompt(6)
    assert_same(server.complete(tokens, model="three"), reference.complete(tokens, model="one"))
    server.forget()
    assert_same(other.complete(tokens, model="three"), reference.complete(tokens, model="two"))


def test_prompt_logprobs_are_computed(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """A request for the log-probabilities of its prompt, which needs every token computed, loads nothing."""
    tokens = prompt(6)
    expected = reference.complete(tokens, prompt_logprobs=2)
    assert "logprob" in expected.prompt_logprobs
    assert_same(server.complete(tokens, prompt_logprobs=2), expected)
    server.forget()
    loaded = daemon.count("loaded_blocks")

    assert_same(server.complete(tokens, prompt_logprobs=2), expected)
    assert daemon.count("loaded_blocks") == loaded
    server.forget()
    assert server.complete(tokens).cached_tokens == 5 * BLOCK_SIZE  # what it computed was stored


def test_external_reset_forgets_for_all(
    server: VllmServer, other: VllmServer, reference: VllmServer, prompt: Prompts
) -> None:
    """After a reset with reset_external no server hits what was stored before; what is stored afterwards is hit."""
    tokens = prompt(6)
    cold, warm = reference.complete(tokens), reference.complete(tokens)
    assert_same(server.complete(tokens), cold)
    server.forget(external=True)

    assert_same(server.complete(tokens), cold)
    other.forget()
    server.forget()
    assert_same(other.complete(tokens), warm)
    assert_same(server.complete(tokens), warm)
    server.forget()
    other.forget(external=True)
    assert_same(server.complete(tokens), cold)


def test_tenants_keep_to_their_quotas(server: VllmServer, daemon: CacheDaemon, prompt: Prompts) -> None:
    """Prompts of a tenant that requests name take no more of the host pool than its cap, and the latest are hit."""
    whose: dict[str, Any] = {"cache_salt": "red", "kv_transfer_params": {"kvcached": {"tenant": "acme"}}}
    prompts = [prompt(8, f"tenant {number}") for number in range(16)]
    for tokens in prompts:
        answer = server.complete(tokens, **whose)
        assert answer.kv_transfer_params["kvcached"] == {"accepted": ["tenant"], "refused": {}}
    daemon.until_idle()
    (tenant,) = (each for host in daemon.stats().hosts for each in host.tenants)

    assert 0 < tenant.blocks <= tenant.cap_blocks < 16 * 7
    server.forget()
    assert server.complete(prompts[-1], **whose).cached_tokens == 7 * BLOCK_SIZE
    assert server.complete(prompts[0], **whose).cached_tokens == 0


def test_abandoned_requests_hold_nothing(
    server: VllmServer, reference: VllmServer, daemon: CacheDaemon, prompt: Prompts
) -> None:
    """Requests whose clients hang up, before they hit or in the midst of decoding, leave no lease behind."""
    tokens = prompt(10)
    server.complete(tokens)
    reference.complete(tokens)
    server.forget()
    document = {"model": "tiny", "prompt": tokens, "max_tokens": 1500, "ignore_eos": True, "stream": True}
    for stays in (False, True):
        for _ in range(4):
            connection = UnixConnection(server.socket)
            connection.request("POST", "/v1/completions", json.dumps(document), {"Content-Type": "application/json"})
            if stays:
                response = connection.getresponse()
                assert response.status == http.client.OK
                response.readline()
                response.close()
            connection.close()
    daemon.until_idle()
    server.forget()
    assert_same(server.complete(tokens), reference.complete(tokens))


def test_wishes_of_a_request(server: VllmServer, daemon: CacheDaemon, prompt: Prompts) -> None:
    """A request's prompt is pinned, another's is not stored; what is refused is said in the response and counted."""
    refused = server.metric("vllm:kvcached_request_wishes_refused_total")
    wishes = {"kvcached": {"pin_ttl_s": 3600, "ttl": 1}, "do_remote_decode": True}
    answer = server.complete(prompt(4, "pinned"), kv_transfer_params=wishes)
    report = answer.kv_transfer_params["kvcached"]
    assert (report["accepted"], sorted(report["refused"])) == (["pin_ttl_s"], ["do_remote_decode", "ttl"])
    daemon.until(lambda stats: sum(host.pinned for host in stats.hosts) == 4, "pinned")
    assert server.metric("vllm:kvcached_request_wishes_refused_total") - refused == 2

    tokens = prompt(4, "not shared")
    demote = {"action_id": "1", "action_type": "kv.demote", "action_version": "1.0", "payload": {}}
    hint = {"protocol_version": "0.1", "message_id": "1", "actions": [demote]}
    answer = server.complete(tokens, kv_transfer_params={"kvcached": {"share": False}, "kv_hint": hint})
    assert answer.kv_transfer_params["kvcached"] == {"accepted": ["share", "kv.demote"], "refused": {}}
    server.forget()
    assert server.complete(tokens).cached_tokens == 0


def test_requests_without_wishes_get_no_report(server: VllmServer, prompt: Prompts) -> None:
    """The response of an ordinary request says nothing of kvcached."""
    assert server.complete(prompt(2)).kv_transfer_params is None
