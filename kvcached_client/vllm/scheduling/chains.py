"""How the blocks of a request form the one chain of blocks that the daemon knows.

With one group of layers, the chain is the request's blocks. With several groups, vLLM has a list of blocks for each
group. Blocks of all groups have as many bytes, because they come from one pool, but may hold different numbers of
tokens. Then the chain consists of *units*. A unit is the blocks of all groups that hold the same tokens, as few tokens
as are whole blocks in every group. So the leading whole units of a chain are a prefix of the prompt whose blocks exist
for every group.

The key of a block of several groups is vLLM's hash of the last tokens in it, and the number of its group. vLLM hashes
`hash_tokens` tokens at a time, which may be fewer than a block has: an earlier hash inside the block would say nothing
about the tokens behind it. The blocks of a unit are in the order of their last tokens. So a key of the chain depends on
all tokens of the blocks before it, too: for the daemon, equal keys mean equal chains up to there.

A group of *states* (Mamba, short convolutions, linear attention) has one block for all tokens up to a boundary, and
only at some boundaries, so its blocks are not in the chain. What the groups of states have at a boundary is a *branch*
of the chain: the chain up to the boundary, and behind it one block of each of these groups. The keys of a branch depend
on the boundary as all keys do, so the state of another boundary is another branch. A hit ends where there is a branch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from math import lcm
from typing import Final, NamedTuple, Protocol, overload

from kvcached_client.protocol.fields import BLOCKS_PER_MESSAGE_MAX, TOKENS_PER_MESSAGE_MAX
from kvcached_client.vllm.daemon.commands import Branches
from kvcached_client.vllm.orders import GROUP_HASH_BYTES, group_key
from kvcached_client.vllm.scheduling.request_state import Request, RequestState

#: Groups have numbers of one byte.
GROUPS_MAX: Final = 256
#: The id of the block that stands in vLLM's lists for blocks that a group does not need.
NULL_BLOCK: Final = 0


class LiveBlock(Protocol):
    """A block in the list of one of a request's groups."""

    @property
    def block_id(self) -> int:
        """Id in vLLM's pool."""

    @property
    def is_null(self) -> bool:
        """Whether it only stands for a block that the group does not need any more."""


#: The blocks of a request by its id, a list for each group, as vLLM has them now.
LiveBlocks = Callable[[str], Sequence[Sequence[LiveBlock]]]


class Place(NamedTuple):
    """A block of a unit.

    Attributes:
        group: number of its group.
        block: how many blocks of the group are before it in the unit.
        blocks: number of the group's blocks in the unit.
        last_hash: how many hashes of the unit are before that of the last tokens in the block.
    """

    group: int
    block: int
    blocks: int
    last_hash: int

    def index_in_group(self, unit: int) -> int:
        """The index of the block in the list of its group, by the number of units before its unit."""
        return unit * self.blocks + self.block


class Unit(NamedTuple):
    """The blocks of all groups that hold the same tokens.

    Attributes:
        tokens: number of these tokens.
        hashes: number of vLLM's hashes of them.
        places: the blocks, in the order of the chain.
        states: the blocks that hold the states behind the last of these tokens, in the order of a branch.
    """

    tokens: int
    hashes: int
    places: tuple[Place, ...]
    states: tuple[Place, ...] = ()


def unit_of(block_sizes: Sequence[int], hash_tokens: int, states: Collection[int] = ()) -> Unit:
    """The unit of groups with these numbers of tokens in a block.

    Args:
        block_sizes: of each group.
        hash_tokens: tokens of one of vLLM's hashes.
        states: numbers of the groups of states.

    Raises:
        ValueError: a block is not a whole number of hashes, or there are too many groups.
    """
    if len(block_sizes) > GROUPS_MAX or any(size % hash_tokens for size in block_sizes):
        raise ValueError(f"groups with blocks of {list(block_sizes)} tokens, hashes of {hash_tokens}")
    tokens = lcm(*block_sizes)
    places = [
        Place(group, block, tokens // size, (block + 1) * size // hash_tokens - 1)
        for group, size in enumerate(block_sizes)
        for block in range(tokens // size)
    ]
    places.sort(key=lambda place: (place.last_hash, place.group))
    hashes = tokens // hash_tokens
    return Unit(
        tokens,
        hashes,
        tuple(place for place in places if place.group not in states),
        tuple(place for place in places if place.group in states and place.last_hash == hashes - 1),
    )


class GroupKeys(Sequence[bytes]):
    """The keys of a request's chain. It grows with the hashes of the request.

    Args:
        request: the request.
        unit: the unit of its chain.
    """

    def __init__(self, request: Request, unit: Unit) -> None:
        self._request = request
        self._unit = unit
        self._keys: list[bytes] = []
        self._last_hash = b""  #: of the last unit in `_keys`

    def __len__(self) -> int:
        return len(self._request.block_hashes) // self._unit.hashes * len(self._unit.places)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[bytes]: ...

    def __getitem__(self, index: int | slice) -> bytes | Sequence[bytes]:
        self._follow()
        return self._keys[index]

    def of_states(self, units: int) -> list[bytes]:
        """The keys of the states behind so many units, which are full."""
        last = self._request.block_hashes[units * self._unit.hashes - 1]
        return [group_key(last, place.group) for place in self._unit.states]

    def branches(self, name: str, block_size: int, units: int) -> Branches:
        """The branches behind the first unit, the second one, and so on; `block_size` as the daemon was told."""
        hashes, unit = self._request.block_hashes, self._unit
        ends = b"".join(
            [each[:GROUP_HASH_BYTES] for each in hashes[unit.hashes - 1 : units * unit.hashes : unit.hashes]]
        )
        return Branches(name, block_size, len(unit.places), tuple(place.group for place in unit.states), ends)

    def _follow(self) -> None:
        hashes, unit = self._request.block_hashes, self._unit
        known = len(self._keys) // len(unit.places) * unit.hashes
        if known and (known > len(hashes) or hashes[known - 1] != self._last_hash):
            self._keys.clear()  # the request has other tokens now
            known = 0
        for start in range(known, len(hashes) - unit.hashes + 1, unit.hashes):
            self._keys += [group_key(hashes[start + place.last_hash], place.group) for place in unit.places]
            self._last_hash = hashes[start + unit.hashes - 1]


class Chains:
    """The chains of all requests of an engine.

    Args:
        block_size: tokens in a block, as the daemon is told.
        unit: the unit of several groups; None for one group that keeps all blocks.
        live: needed with a unit.

    Attributes:
        block_size: as above.
        is_grouped: whether there is a unit.
        unit_tokens: a hit is a multiple of so many tokens.
        unit_blocks: number of blocks that hold these tokens.
        states: number of blocks that hold the states behind a unit; 0 = no group is of states.
        blocks_max: how many leading blocks of a chain one message can name, in whole units, with states behind them.
    """

    def __init__(self, block_size: int, *, unit: Unit | None = None, live: LiveBlocks | None = None) -> None:
        self.is_grouped = unit is not None
        self.unit_tokens = block_size if unit is None else unit.tokens
        self.unit_blocks = 1 if unit is None else len(unit.places)
        self.states = 0 if unit is None else len(unit.states)
        self.block_size = block_size
        self.blocks_max = self._units_max() * self.unit_blocks
        self._unit = unit
        self._live = live

    def _units_max(self) -> int:
        """As `blocks_max`, in units. There is room for one more token: a hit leaves the last one to compute."""
        tokens = TOKENS_PER_MESSAGE_MAX - 1
        blocks = min(BLOCKS_PER_MESSAGE_MAX, tokens // self.block_size) - self.states
        return max(min(blocks // self.unit_blocks, tokens // self.unit_tokens), 0)

    def group_keys(self, request: Request) -> GroupKeys | None:
        """The keys of a request's chain; None with one group, where they are its hashes."""
        return None if self._unit is None else GroupKeys(request, self._unit)

    def branch(self, chain: Sequence[bytes], units: int) -> list[bytes]:
        """The keys of a chain up to so many units, and of the states behind them."""
        states = chain.of_states(units) if isinstance(chain, GroupKeys) else []
        return [*chain[: units * self.unit_blocks], *states]

    def own_blocks(self, tables: Sequence[Sequence[int]]) -> list[int]:
        """The ids of blocks that are a request's as long as it runs; with several groups there is no such list."""
        return [] if self.is_grouped else list(tables[0])

    def state_blocks(self, tables: Sequence[Sequence[int]], units: int) -> list[int]:
        """The ids of the blocks that hold the states behind so many units.

        Args:
            tables: the request's block ids, a list for each group.
            units: number of units.
        """
        places = () if self._unit is None else self._unit.states
        return [tables[place.group][place.index_in_group(units - 1)] for place in places]

    def in_branch(self, blocks: Mapping[int, int]) -> list[int]:
        """The blocks of states, by group, in the order of a branch; none unless every group of states has one."""
        groups = [] if self._unit is None else [place.group for place in self._unit.states]
        return [blocks[group] for group in groups] if set(groups) <= blocks.keys() else []

    def blocks_in(self, tokens: int) -> int:
        """Number of blocks in the units that are full with so many tokens."""
        return tokens // self.unit_tokens * self.unit_blocks

    def daemon_tokens(self, tokens: int) -> int:
        """A number of tokens as the daemon counts them: every block of a chain has `block_size` tokens of its own."""
        if self._unit is None:
            return tokens
        rest = 1 if tokens % self.unit_tokens else 0
        return self.blocks_in(tokens) * self.block_size + rest

    def daemon_rate(self, tokens_per_s: float) -> float:
        """A rate of tokens as the daemon counts them."""
        return tokens_per_s * self.unit_blocks * self.block_size / self.unit_tokens

    def runs(self, tables: Sequence[Sequence[int]], start: int, stop: int) -> Iterator[tuple[int, list[int]]]:
        """The blocks of a chain that exist: the depth of the first block of each run, and the run's block ids.

        Args:
            tables: the request's block ids, a list for each group.
            start: depth of the first block, the begin of a unit.
            stop: depth behind the last block, the end of a unit.
        """
        if self._unit is None:
            yield start, list(tables[0][start:stop])
            return
        run: list[int] = []
        for depth in range(start, stop):
            number, place = divmod(depth, self.unit_blocks)
            at = self._unit.places[place]
            block_id = tables[at.group][at.index_in_group(number)]
            if block_id != NULL_BLOCK:
                run.append(block_id)
            elif run:
                yield depth - len(run), run
                run = []
        if run:
            yield stop - len(run), run

    def live_run(self, tracked: RequestState, start: int, stop: int) -> list[int]:
        """The ids of a request's blocks from a depth on, up to the first one that vLLM does not keep for it."""
        if self._unit is None or self._live is None:
            raise RuntimeError("only blocks of several groups come and go while their request runs")
        lists = self._live(tracked.request.request_id)
        run: list[int] = []
        for depth in range(start, stop):
            number, place = divmod(depth, self.unit_blocks)
            at = self._unit.places[place]
            of_group, index = lists[at.group], at.index_in_group(number)
            if index >= len(of_group) or of_group[index].is_null:
                break
            run.append(of_group[index].block_id)
        return run
