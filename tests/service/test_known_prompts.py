"""What the daemon remembers of prompts that a session has acquired: it completes keys, and decides nothing."""

from __future__ import annotations

import pytest

from kvcached.service import known_prompts
from kvcached.service.known_prompts import KnownPrompts
from kvcached_client.errors import ErrorCode, RequestError
from kvcached_client.protocol import engine as wire
from kvcached_client.types import KEY_SIZE_BYTES
from tests.service.office import EPOCH, TWO, FakePeer, Office, key_chain


def behind(known: int, keys: bytes) -> bytes:
    """The frame of an acquire whose first `known` blocks the daemon knows."""
    return keys[max(known - 1, 0) * KEY_SIZE_BYTES :]


def acquire(office: Office, keys: bytes, request: str, known: int = 0) -> wire.Acquire:
    return wire.Acquire(
        id=office.next_id(), epoch=EPOCH, request=request, tokens=len(keys) // 4, full=True, known=known
    )


@pytest.mark.parametrize("known", [0, 1, 3, 4])
def test_continuation_is_completed(known: int) -> None:
    """The last key of what is known and the keys behind it stand for all keys."""
    prompts, keys = KnownPrompts(1), key_chain(4)
    prompts.keep(keys[: known * KEY_SIZE_BYTES])

    assert prompts.whole(known, behind(known, keys)) == keys


def test_only_the_same_prompt_is_continued() -> None:
    """Another last key, another length and another session's prompt are unknown."""
    prompts, keys = KnownPrompts(1), key_chain(4)
    prompts.keep(keys)
    for known, frame in ((4, key_chain(6, seed=1)[3 * KEY_SIZE_BYTES :]), (3, behind(4, keys)), (4, b"")):
        with pytest.raises(RequestError, match="unknown_prefix"):
            prompts.whole(known, frame)
    with pytest.raises(RequestError, match="unknown_prefix"):
        KnownPrompts(1).whole(4, behind(4, keys))


def test_keys_of_all_parts_are_limited_together() -> None:
    """However many parts they come in, the keys of a prompt are no more than those of one message."""
    prompts, most = KnownPrompts(), wire.BLOCKS_PER_MESSAGE_MAX
    keys = key_chain(most)
    prompts.keep(keys)

    assert prompts.whole(most, behind(most, keys)) == keys
    with pytest.raises(RequestError, match="oversize"):
        prompts.whole(most, behind(most, keys) + bytes(KEY_SIZE_BYTES))


def test_short_prompts_are_not_remembered() -> None:
    """Their keys are sent with each acquire."""
    prompts = KnownPrompts()
    prompts.keep(key_chain(wire.KNOWN_BLOCKS_MIN - 1))
    assert len(prompts) == 0
    prompts.keep(key_chain(wire.KNOWN_BLOCKS_MIN))
    assert len(prompts) == 1


def test_memory_is_bounded_and_prompts_in_use_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was neither acquired nor continued for longest is forgotten: a document that all requests share stays."""
    monkeypatch.setattr(known_prompts, "KNOWN_BYTES_MAX", 10 * KEY_SIZE_BYTES)
    prompts, shared, other = KnownPrompts(1), key_chain(4, seed=1), key_chain(3)
    document = shared[: 3 * KEY_SIZE_BYTES]
    prompts.keep(document)
    prompts.keep(other)
    prompts.keep(other)
    assert prompts.size_bytes == 6 * KEY_SIZE_BYTES
    prompts.keep(shared, 3)
    assert prompts.size_bytes == 10 * KEY_SIZE_BYTES
    prompts.keep(key_chain(1, seed=2))

    assert prompts.size_bytes == 8 * KEY_SIZE_BYTES
    assert prompts.whole(3, behind(3, document)) == document
    assert prompts.whole(4, behind(4, shared)) == shared
    with pytest.raises(RequestError, match="unknown_prefix"):
        prompts.whole(3, behind(3, other))


def test_sessions_share_one_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many sessions a user opens, all of them together have the daemon remember no more."""
    monkeypatch.setattr(known_prompts, "_ALL_KNOWN_BYTES_MAX", 24 * KEY_SIZE_BYTES)
    office = Office("a", "b", "c", known_blocks_min=1)
    sizes = []
    for number, replica in enumerate("abc"):
        peer = bytes([number]) * 4
        office.enter(FakePeer(number + 1), replica, peer=peer)
        for seed in range(9):
            keys = key_chain(4, seed=10 * number + seed)
            header = office.expect(wire.Acquired, acquire(office, keys, f"r{number}{seed}"), keys, peer=peer)
            office.expect(
                wire.Released, wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease), b"", b"", peer=peer
            )
        sizes.append(office.service._groups.owner(peer).prompts.size_bytes // KEY_SIZE_BYTES)

    assert sizes == [24, 12, 8]
    groups = [office.service._groups.owner(bytes([number]) * 4) for number in range(3)]
    assert [group.prompts.size_bytes // KEY_SIZE_BYTES for group in groups] == [8, 8, 8]


def test_next_turn_hits_what_the_last_one_stored() -> None:
    """An acquire that sends only the keys behind the last prompt gets what one with all keys gets."""
    office, keys = Office(known_blocks_min=1), key_chain(5)
    office.enter(FakePeer(1))
    office.store(keys[: 3 * KEY_SIZE_BYTES])

    header, frames = office.ask(acquire(office, keys, "turn", known=3), behind(3, keys))
    assert isinstance(header, wire.Acquired)
    assert header.hit == 3
    again = office.expect(wire.Acquired, acquire(office, keys, "turn"), keys)
    assert again.lease == header.lease
    commit = wire.Commit(id=office.next_id(), epoch=EPOCH, lease=header.lease, start=3)
    office.expect(wire.Committed, commit, behind(4, keys), frames[1])
    assert office.expect(wire.Acquired, acquire(office, keys, "later"), keys).hit == 5


def test_prompt_of_an_acquire_without_effect_is_not_remembered() -> None:
    """What is refused can be sent again whole; what was granted is remembered by its own session only."""
    office, keys = Office("a", "b", known_blocks_min=1), key_chain(4)
    office.enter(FakePeer(1))
    office.enter(FakePeer(2), "b", peer=TWO)
    too_large = wire.Acquire(id=office.next_id(), epoch=EPOCH, request="r", tokens=1000, full=True)

    assert office.error(too_large, keys) is ErrorCode.NO_CAPACITY
    assert office.error(acquire(office, keys, "r", known=4), behind(4, keys)) is ErrorCode.UNKNOWN_PREFIX
    office.expect(wire.Acquired, acquire(office, keys, "r"), keys)
    office.expect(wire.Acquired, acquire(office, keys, "s", known=4), behind(4, keys))
    assert office.error(acquire(office, keys, "r", known=4), behind(4, keys), peer=TWO) is ErrorCode.UNKNOWN_PREFIX


def test_evicted_prompt_is_a_miss_though_its_keys_are_known() -> None:
    """That keys are remembered says nothing about their blocks."""
    office, keys = Office(known_blocks_min=1), key_chain(3)
    office.enter(FakePeer(1))
    office.store(keys)
    office.store(key_chain(16, seed=1))

    assert office.expect(wire.Acquired, acquire(office, keys, "turn", known=3), behind(3, keys)).hit == 0
