"""How recorded requests become those that are played."""

from __future__ import annotations

import pytest

from benchmarks.replay_trace import Recorded, Scale, calls, read_trace, reuse, thin

_SCALE = Scale(block_tokens=32, token_ids=(3, 512), tokens_max=200)


def _recorded(at_ms: int, ids: tuple[int, ...], *, tail: int = 0, output: int = 32) -> Recorded:
    """A prompt whose last block has `tail` tokens, or is full."""
    tokens = 512 * len(ids) if not tail else 512 * (len(ids) - 1) + tail
    return Recorded(at_ms, tokens, output, ids)


_CONVERSATIONS = [
    _recorded(0, (0, 1)),
    _recorded(10, (0, 2, 3)),
    _recorded(20, (0, 1, 4), tail=100),
    _recorded(30, (0, 5)),
    _recorded(40, (0, 2, 3, 6)),
    _recorded(50, (0,)),
]


def test_trace_has_the_reuse_that_its_readme_tells() -> None:
    """Over the whole trace an endless cache hits 105,592 of 276,491 full blocks."""
    assert reuse(read_trace()) == (276_491, 276_491 - 170_899)


def test_thinning_keeps_whole_conversations_in_order_of_arrival() -> None:
    """Requests that share two full blocks stay together; those that no other one follows up are left out."""
    drawn = thin(_CONVERSATIONS, _SCALE, requests=100, seed=0)
    assert [request.at_ms for request in drawn] == [0, 10, 20, 40]


def test_thinning_stops_at_a_whole_conversation() -> None:
    """Asked for one request it gives the conversation that it comes from, the same one for the same seed."""
    drawn = thin(_CONVERSATIONS, _SCALE, requests=1, seed=0)
    assert drawn == thin(_CONVERSATIONS, _SCALE, requests=1, seed=0)
    assert len(drawn) == 2
    assert len({request.ids[1] for request in drawn}) == 1


def test_thinning_leaves_out_what_does_not_fit() -> None:
    """A conversation with one prompt that is too long for the model is not played at all."""
    short = Scale(block_tokens=32, token_ids=(3, 512), tokens_max=4 * 32)
    drawn = thin(_CONVERSATIONS, short, requests=100, seed=0)
    assert [request.at_ms for request in drawn] == [0, 20]


def test_prompts_share_exactly_what_was_shared() -> None:
    """Equal ids give equal tokens and others do not; a partial block is scaled like a full one."""
    first, second, third = (call.prompt for call in calls(_CONVERSATIONS[:3], _SCALE, 1.0))
    assert (len(first), len(second), len(third)) == (64, 96, 64 + 100 * 32 // 512)
    assert third[:64] == first
    assert second[:32] == first[:32]
    assert second[32:64] != first[32:64]
    assert all(3 <= token < 512 for token in second)


def test_calls_come_at_the_pace_that_was_asked_for() -> None:
    """Times keep their proportions; in the mean there are so many requests a second."""
    played = calls(_CONVERSATIONS, _SCALE, 2.0)
    assert [call.at_s for call in played] == pytest.approx([0, 0.6, 1.2, 1.8, 2.4, 3.0])
    assert {call.output_tokens for call in played} == {2}


def test_reuse_counts_leading_blocks_only() -> None:
    """A block that was seen is no hit behind one that was not."""
    requests = [_recorded(0, (0, 1, 2)), _recorded(1, (0, 3, 2)), _recorded(2, (0, 1, 2), tail=5)]
    assert reuse(requests) == (8, 1 + 2)
