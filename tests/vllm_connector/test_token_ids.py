"""Tokens of vLLM's requests, which the daemon tells routers where its configuration allows it."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from kvcached_client.vllm.daemon.commands import Offer, Seek
from kvcached_client.vllm.daemon.offers import OfferBatch
from tests.vllm_connector.rig import BLOCK, Rig


def packed(*tokens: int) -> bytes:
    return array("i", tokens).tobytes()


@pytest.mark.parametrize("is_wanted", [True, False])
def test_seeks_and_offers_bring_tokens(is_wanted: bool) -> None:
    """A prompt's seek and the offers of its blocks bring their tokens to a daemon that wants them, and to no other."""
    rig = Rig(is_connected=False)
    rig.tells_tokens = is_wanted
    rig.connect()
    rig.side.matched_tokens(rig.arrive("warm-up", BLOCK), 0)  # takes the event
    rig.link.taken(Seek)
    request = rig.arrive("a", 3 * BLOCK)
    (seek,) = rig.link.taken(Seek)
    rig.link.commands.append(seek)
    rig.found(0)
    rig.matched(request)
    rig.start(request, 0, 3 * BLOCK)
    (offer,) = rig.link.taken(Offer)

    told = packed(*range(3 * BLOCK)) if is_wanted else None
    assert (None if seek.token_ids is None else seek.token_ids(), offer.token_ids) == (told, told)
    (offered,) = OfferBatch([offer], offer.session).offered
    assert offered.token_ids == told


@pytest.mark.parametrize(
    ("attribute", "value"),
    [("cache_salt", "tenant"), ("lora_request", object()), ("mm_features", [object()]), ("prompt_embeds", object())],
)
def test_tokens_that_do_not_name_the_prompt_stay(attribute: str, value: Any) -> None:
    """Salts, adapters, pictures and embeddings are part of a prompt's keys, and its tokens alone name another one."""
    rig = Rig(is_connected=False)
    rig.tells_tokens = True
    rig.connect()
    request = rig.arrive("a", 3 * BLOCK)
    rig.link.taken(Seek)
    setattr(request, attribute, value)
    rig.side.matched_tokens(request, 0)
    rig.side.on_new_request(request)
    (seek,) = rig.link.taken(Seek)

    assert seek.token_ids is not None
    assert seek.token_ids() is None
