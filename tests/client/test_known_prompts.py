"""The next turn of a conversation: an acquire sends only the keys behind the prompt that the session acquired last."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcached_client import Client, ErrorCode, KeyChain, Refused
from kvcached_client.errors import request_error
from kvcached_client.protocol.engine import KNOWN_BLOCKS_MIN, Acquire, Header, Request, error_reply
from kvcached_client.transport.prompts import AcquiredPrompts
from kvcached_client.types import KEY_SIZE_BYTES
from tests.client.fake_daemon import BLOCK_SIZE, FakeDaemon

Connect = Callable[..., Client]
PROMPT = range(KNOWN_BLOCKS_MIN * BLOCK_SIZE)
TURN = range(2 * BLOCK_SIZE)


def sent(daemon: FakeDaemon) -> list[tuple[int, bytes]]:
    """What each acquire said: the known blocks, and the keys."""
    return [(request.known, frames[0]) for request, frames in daemon.requests if isinstance(request, Acquire)]


def all_of(chain: KeyChain) -> tuple[int, bytes]:
    return 0, chain.keys


def behind(chain: KeyChain, known: int) -> tuple[int, bytes]:
    return known, chain.key_range(known - 1, chain.block_count)


def forgetting(code: ErrorCode) -> Callable[[Request, list[bytes]], tuple[Header, list[bytes]] | None]:
    """A daemon that refuses each acquire that does not send all keys."""

    def script(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        if isinstance(request, Acquire) and request.known:
            return error_reply(request.id, request_error(code, "refused", "see the test")), []
        return None

    return script


def test_next_turn_sends_the_keys_behind_the_last_prompt(daemon: FakeDaemon, connect: Connect) -> None:
    """By the same chain or by a fork of it; output and the new prompt are behind. Turn after turn."""
    client = connect()
    chain = client.chain(PROMPT)
    client.acquire("turn 1", chain)
    chain.extend(TURN)
    client.acquire("turn 2", chain)
    fork = chain.fork()
    fork.extend(TURN)
    client.acquire("turn 3", fork)
    client.acquire("turn 3 again", fork)
    known = KNOWN_BLOCKS_MIN
    whole = client.chain(PROMPT)
    assert sent(daemon) == [all_of(whole), behind(chain, known), behind(fork, known + 2), behind(fork, known + 4)]
    assert len(sent(daemon)[-1][1]) == KEY_SIZE_BYTES


def test_forgotten_prompt_costs_a_round_trip(daemon: FakeDaemon, connect: Connect) -> None:
    """The daemon says that it does not know the prompt; the acquire is sent again with all keys, under another id."""
    client = connect()
    chain = client.chain(PROMPT)
    client.acquire("turn 1", chain)
    chain.extend(TURN)
    daemon.script = forgetting(ErrorCode.UNKNOWN_PREFIX)
    lease = client.acquire("turn 2", chain)
    assert (lease.granted, lease.capacity_tokens) == (True, chain.token_count)
    assert sent(daemon)[1:] == [behind(chain, KNOWN_BLOCKS_MIN), all_of(chain)]
    assert len({request.id for request in daemon.of(Acquire)}) == 3
    assert client.failure_count == 0


def test_other_refusals_are_the_callers(daemon: FakeDaemon, connect: Connect) -> None:
    """Only an unknown prompt is sent again."""
    client = connect()
    chain = client.chain(PROMPT)
    client.acquire("turn 1", chain)
    daemon.script = forgetting(ErrorCode.REQUEST_CONFLICT)
    with pytest.raises(Refused, match="request_conflict"):
        client.acquire("turn 2", chain)


def test_chain_that_was_made_anew_continues_the_earlier_prompt(daemon: FakeDaemon, connect: Connect) -> None:
    """A chain of the same tokens is recognised by its keys; one of other tokens sends all keys."""
    client = connect()
    client.acquire("turn 1", client.chain(PROMPT))
    later, other = client.chain([*PROMPT, *TURN]), client.chain([7, *PROMPT])
    client.acquire("turn 2", later)
    client.acquire("other", other)
    with client.batch() as batch:
        batch.acquire("turn 3", client.chain([*PROMPT, *TURN]))
    known = KNOWN_BLOCKS_MIN
    assert sent(daemon)[1:] == [behind(later, known), all_of(other), behind(later, known + 2)]


def test_prompt_is_known_in_the_session_that_acquired_it(daemon: FakeDaemon, connect: Connect) -> None:
    """A prompt that only another session has acquired, or that is short, is sent whole."""
    client, other = connect(), connect()
    chain, short = client.chain(PROMPT), client.chain(PROMPT[: -2 * BLOCK_SIZE])
    for acquiring in (client, other, client):
        acquiring.acquire("turn 1", chain)
    client.acquire("short", short)
    client.acquire("short again", short)
    known = behind(chain, KNOWN_BLOCKS_MIN)
    assert sent(daemon) == [all_of(chain), all_of(chain), known, all_of(short), all_of(short)]


def test_forgotten_prompt_is_not_tried_again(daemon: FakeDaemon, connect: Connect) -> None:
    """Of prompts that begin alike, only what the daemon may still know is left out."""
    client = connect()
    client.acquire("turn 1", client.chain(PROMPT))
    daemon.script = forgetting(ErrorCode.UNKNOWN_PREFIX)
    for end in (1, 2):
        client.acquire(f"branch {end}", client.chain([*PROMPT, *TURN[: end * BLOCK_SIZE], 7]))
    kinds = [known for known, _ in sent(daemon)]
    assert kinds == [0, KNOWN_BLOCKS_MIN, 0, KNOWN_BLOCKS_MIN + 1, 0]


def test_longest_of_the_last_prompts_is_continued() -> None:
    """So many prompts are looked for; those that were acquired first are forgotten."""
    prompts = AcquiredPrompts()
    keys = b"".join(number.to_bytes(KEY_SIZE_BYTES, "big") for number in range(1, 161))
    for blocks in (70, 80, KNOWN_BLOCKS_MIN, KNOWN_BLOCKS_MIN - 1):
        prompts.note_all(keys[: blocks * KEY_SIZE_BYTES])
    lengths = [prompts.known_blocks(keys[: blocks * KEY_SIZE_BYTES]) for blocks in (160, 79, 69, 63)]
    assert lengths == [80, 70, KNOWN_BLOCKS_MIN, 0]
    assert prompts.known_blocks(bytes(len(keys))) == 0
    for number in range(64):
        prompts.note(bytes([number]) * KEY_SIZE_BYTES, KNOWN_BLOCKS_MIN)
    assert prompts.known_blocks(keys) == 0


def test_refused_prompt_is_not_taken_as_known(daemon: FakeDaemon, connect: Connect) -> None:
    """After an acquire without effect, and after a miss, all keys are sent."""
    client = connect(failures="miss")
    chain = client.chain(PROMPT)

    def full(request: Request, _: list[bytes]) -> tuple[Header, list[bytes]] | None:
        no_capacity = request_error(ErrorCode.NO_CAPACITY, "full", "wait")
        return (error_reply(request.id, no_capacity), []) if isinstance(request, Acquire) else None

    daemon.script = full
    assert not client.acquire("a", chain).granted
    daemon.script = None
    assert client.acquire("b", chain).granted
    assert sent(daemon) == [all_of(chain)] * 2


def test_chain_that_grows_before_its_reply_is_known_as_far_as_it_was_sent(daemon: FakeDaemon, connect: Connect) -> None:
    """In a batch, tokens that are added after the call are behind the prompt."""
    client = connect()
    chain = client.chain(PROMPT)
    with client.batch() as batch:
        batch.acquire("turn 1", chain)
        chain.extend(TURN)
    client.acquire("turn 2", chain)
    assert sent(daemon)[1] == behind(chain, KNOWN_BLOCKS_MIN)
