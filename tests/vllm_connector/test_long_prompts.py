"""Prompts of more blocks or tokens than one message of the protocol may name: their beginning is cached."""

from __future__ import annotations

import pytest

from kvcached_client.protocol.fields import BLOCKS_PER_MESSAGE_MAX, TOKENS, TOKENS_PER_MESSAGE_MAX
from kvcached_client.types import KEY_SIZE_BYTES, LeaseId
from kvcached_client.vllm.daemon.client import begin_fetch
from kvcached_client.vllm.daemon.commands import Found, Offer, Pin, Seek
from kvcached_client.vllm.scheduling.chains import Chains, LiveBlock, unit_of
from tests.vllm_connector.link_rig import ScriptedClient
from tests.vllm_connector.mini_hybrid import ListedBlock
from tests.vllm_connector.rig import FakeRequest, FakeStep, HandedOff, New, Rig

#: As many tokens in a block that few blocks are too many tokens.
SIZE = 1 << 14
#: Blocks of one group that have room in a message, beside one more token.
MOST = TOKENS_PER_MESSAGE_MAX // SIZE - 1


class LongRequest(FakeRequest):
    """A request of so many tokens, which vLLM hashes so many at a time."""

    def __init__(self, tokens: int, hash_tokens: int) -> None:
        super().__init__("r", ())
        self._length = self.num_prompt_tokens = tokens
        self.block_hashes = [b"%032d" % number for number in range(tokens // hash_tokens)]

    @property
    def num_tokens(self) -> int:
        return self._length

    @property
    def all_token_ids(self) -> list[int]:
        return [7] * self._length


def seek_of(rig: Rig, request: LongRequest) -> Seek:
    rig.side.on_new_request(request)
    (seek,) = rig.link.commands
    assert isinstance(seek, Seek)
    return seek


def check_fits(keys: bytes, tokens: int, block_size: int) -> int:
    """That a message can name them, and that the last block may be hit; the number of blocks."""
    blocks = len(keys) // KEY_SIZE_BYTES
    assert blocks <= BLOCKS_PER_MESSAGE_MAX
    assert blocks * block_size < tokens <= TOKENS_PER_MESSAGE_MAX
    return blocks


@pytest.mark.parametrize("block_size", [16, 32, 128, SIZE])
@pytest.mark.parametrize("tokens", [TOKENS_PER_MESSAGE_MAX, 1_200_000])
def test_beginning_of_a_long_prompt_is_asked_for(block_size: int, tokens: int) -> None:
    """Of a prompt that is too long for a message, as many blocks are asked for as fit beside one more token."""
    seek = seek_of(Rig(chains=Chains(block_size)), LongRequest(tokens, block_size))
    assert check_fits(seek.keys, seek.tokens, block_size) == (TOKENS_PER_MESSAGE_MAX - 1) // block_size


def test_tokens_of_a_long_prompt_fit_into_their_frame() -> None:
    """A daemon that wants to know the tokens of blocks gets those of the blocks that are asked for, in one frame."""
    rig = Rig(chains=Chains(SIZE), is_connected=False)
    rig.tells_tokens = True
    rig.connect()
    rig.idle()
    seek = seek_of(rig, LongRequest(TOKENS_PER_MESSAGE_MAX + SIZE, SIZE))
    told = seek.token_ids() if seek.token_ids is not None else None
    assert told is not None
    assert len(told) == MOST * SIZE * TOKENS.item_bytes <= TOKENS.size_bytes_max


def test_blocks_are_limited_beside_tokens() -> None:
    """Where blocks have few tokens, their number is the limit."""
    seek = seek_of(Rig(chains=Chains(8)), LongRequest(600_000, 8))
    assert (len(seek.keys) // KEY_SIZE_BYTES, seek.tokens) == (65_536, 65_536 * 8 + 1)


def test_prompt_that_fits_is_asked_for_as_it_is() -> None:
    """The longest prompt that fits is asked for with all its blocks and its own number of tokens."""
    seek = seek_of(Rig(chains=Chains(SIZE)), LongRequest(MOST * SIZE + 1, SIZE))
    assert (len(seek.keys) // KEY_SIZE_BYTES, seek.tokens) == (MOST, MOST * SIZE + 1)


def test_long_prompt_is_loaded_and_stored_up_to_the_limit() -> None:
    """All blocks that are asked for may be loaded; what is computed behind them is neither offered nor held."""
    rig = Rig(chains=Chains(SIZE))
    request = LongRequest((MOST + 9) * SIZE, SIZE)
    rig.side.on_new_request(request)
    rig.found(MOST)
    assert rig.matched(request) == (MOST * SIZE, True)
    rig.side.finished(request, [])

    rig.side.on_new_request(request)
    rig.found(0)
    assert rig.matched(request) == (0, False)
    blocks = rig.blocks(MOST + 9)
    rig.start(request, 0, request.num_tokens, blocks=blocks)
    assert rig.held == blocks[:MOST]
    assert rig.plan().pieces == ((0, MOST),)
    rig.report(rig.idle())
    rig.finish(request, blocks)
    rig.idle()
    assert (rig.link.taken(Offer), rig.held) == ([], [])


def test_long_prompt_is_pinned_up_to_the_limit() -> None:
    """A pin names the blocks that can be stored."""
    rig = Rig(chains=Chains(SIZE))
    request = LongRequest((MOST + 9) * SIZE, SIZE)
    request.kv_transfer_params = {"kvcached": {"pin_ttl_s": 1}}
    rig.side.on_new_request(request)
    rig.found(MOST, loadable=False)
    rig.matched(request)
    rig.start(request, 0, 1, blocks=rig.blocks(1))
    rig.finish(request, [1])
    rig.idle()
    (pin,) = rig.link.taken(Pin)
    assert pin.keys == request.keys(0, MOST)


@pytest.mark.parametrize(
    ("sizes", "block_size", "blocks"),
    [
        ([64] * 4, 64, 16_383 // 4 * 4),
        ([16] * 6, 16, 65_535 // 6 * 6),
        ([SIZE, SIZE // 2], SIZE // 2, 127 // 3 * 3),
        ([17_408], 32, (TOKENS_PER_MESSAGE_MAX - 1) // 17_408),
    ],
)
def test_groups_ask_for_whole_units(sizes: list[int], block_size: int, blocks: int) -> None:
    """The blocks of all groups count, in whole units; so do the tokens in them, of which a block may have more."""
    unit = unit_of(sizes, block_size)
    seek = seek_of(Rig(chains=Chains(block_size, unit=unit, live=lambda _: [])), LongRequest(1_200_000, block_size))
    assert check_fits(seek.keys, seek.tokens, block_size) == blocks


class StatesRig(Rig):
    """A rig with a group of full attention between two groups of states, whose requests have the blocks in `table`."""

    def __init__(self) -> None:
        self.table: list[int] = []
        unit = unit_of([SIZE] * 3, SIZE, states=(0, 2))
        super().__init__(chains=Chains(SIZE, unit=unit, live=self._lists))

    def _lists(self, _: str) -> list[list[LiveBlock]]:
        return [[], [ListedBlock(block) for block in self.table], []]


def test_branch_fits_with_its_states() -> None:
    """A chain that branches ends early enough for the states behind it, in every message that names a branch."""
    request = LongRequest((MOST + 9) * SIZE + 1, SIZE)
    seek = seek_of(StatesRig(), request)
    assert check_fits(seek.keys, seek.tokens, SIZE) == MOST - 2
    assert seek.branches is not None
    assert seek.branches.units_of(MOST + 9) == MOST - 2
    client = ScriptedClient(1)
    begin_fetch(seek, client, stop="timeout")
    ((_, keys, tokens, *_),) = client.calls
    assert check_fits(keys, tokens, SIZE) == MOST


def test_states_behind_the_limit_are_not_stored() -> None:
    """The last states that are stored have room behind the blocks before them; those of a longer beginning are not."""
    rig = StatesRig()
    request = LongRequest((MOST + 9) * SIZE + 1, SIZE)
    rig.side.on_new_request(request)
    rig.found(0)
    assert rig.matched(request) == (0, False)
    rig.table = rig.blocks(MOST + 9)
    rig.side.allocated(request, [[], rig.table, []], 0)
    units = {MOST - 2: (201, 202), MOST - 1: (301, 302)}
    handed_off = [
        (group, block, at * SIZE) for at, blocks in units.items() for group, block in zip((0, 2), blocks, strict=True)
    ]
    rig.side.step(
        FakeStep(
            scheduled_new_reqs=[New("r", ([], [], []), 0)],
            num_scheduled_tokens={"r": request.num_tokens},
            kv_connector_block_state=HandedOff({"r": handed_off}),
        )
    )
    assert rig.plan().pieces == ((0, MOST - 2),)
    rig.report(rig.idle())
    rig.idle()
    (seek,) = rig.link.taken(Seek)
    assert check_fits(seek.keys, seek.tokens, SIZE) == MOST
    rig.link.events.append(Found(seek.ticket, rig.number, LeaseId(9), MOST - 2, None))
    rig.idle()
    assert rig.plan().pieces == ((MOST - 2, 2),)
    assert rig.held == [201, 202]
