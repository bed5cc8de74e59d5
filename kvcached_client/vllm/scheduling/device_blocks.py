"""Which of vLLM's blocks the table of its engine pool names, so that the next vLLM finds them again.

A block is named when all ranks have computed the step that filled it, as they report sooner or later, and no longer
when vLLM hands it out again: vLLM calls back then (`BlockPool.unpin_blocks`), before it orders the step that may write
it. So at any instant a named block holds what its name says, whichever processes are killed.

vLLM's groups of layers share its blocks. A name has the number of its group, and each group of a request has a chain of
blocks. In those of layers with windows, block 0 stands for blocks that nobody needs any more, and in those of layers
with states for blocks that never were. A state is written in place until it is that of all tokens up to the end of its
block, and no more then: it is named like a block of tokens, when it is full.

vLLM's pool has a call-back for each block that is named, or will be when its step is over.

Blocks belong to the epoch of the table in which their request began, and to none if the request builds on blocks of
another epoch: after a clear nothing is named that was computed before, or from that. Of what epoch a part of a block is
that vLLM finds by fewer tokens than it has room for, is not known once there has been a clear.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias

from kvcached_client.blocks.engine_table import NO_PARENT, EngineTable, Row
from kvcached_client.vllm.scheduling.request_state import HashedBlock, Step, WatchedPool

#: The epoch of requests whose blocks are not named.
_NO_EPOCH: Final = 0
#: Stands for no block in vLLM's tables.
_NULL_BLOCK: Final = 0
#: The number of a group is the end of a name.
_GROUP_BYTES: Final = 4

#: The blocks of a request, a list for each group.
Tables: TypeAlias = Sequence[Sequence[HashedBlock]]


@dataclass(slots=True)
class _Request:
    """A request in vLLM's blocks.

    Attributes:
        noted: how many of its leading blocks need not be looked at any more, for each group.
        epoch: of its blocks.
        tokens: that are computed after its last step.
        due: with how many tokens one of its groups has a full block that is not noted.
        full_tokens: that are computed after step `full_step`. When the step's output is known, blocks of several groups
            that are full with these tokens have a hash, or never get one.
        full_step: number of that step; 0 = none.
    """

    noted: list[int]
    epoch: int
    tokens: int
    due: int = 0
    full_tokens: int = 0
    full_step: int = 0


class _New(NamedTuple):
    """A request that begins, or begins again, in a step."""

    request: str
    computed_tokens: int  #: before the step
    tokens: int  #: after it


class _Loading(NamedTuple):
    """A request for which blocks are loaded, until it is scheduled."""

    blocks: list[list[int]]  #: for each group
    local: list[int]  #: how many of them vLLM had, for each group
    epoch: int  #: of the request


class _Filled(NamedTuple):
    """A block that a step fills."""

    number: int  #: of the step
    row: Row


class DeviceBlocks:
    """The table of one vLLM's blocks. Used by the scheduler's thread only.

    Args:
        table: of its engine pool, which nobody else writes.
        pool: vLLM's blocks.
        block_sizes: tokens of a block, of each group.
        tables: the blocks that a request has now, by its id; none if it has none.
    """

    def __init__(
        self, table: EngineTable, pool: WatchedPool, block_sizes: Sequence[int], tables: Callable[[str], Tables]
    ) -> None:
        self._table = table
        self._pool = pool
        self._block_sizes = block_sizes
        self._tables = tables
        self._arrived: dict[str, int] = {}  #: in which epoch of the table
        self._requests: dict[str, _Request] = {}
        self._loading: dict[str, _Loading] = {}
        self._behind: dict[str, _Request] = {}  #: requests that have a full block, of which the hash is to come
        self._filled: dict[int, _Filled] = {}  #: by block, in the order of their steps
        self._first_epoch = _NO_EPOCH  #: the table's when vLLM began with it
        self._number = self._computed = 0  #: the last step, and the last one that all ranks have computed
        self._over = 0  #: the last step of which vLLM has processed the output
        self._is_stopped = False
        self._stamp = 1

    def adopt(self) -> int:
        """Have vLLM find the blocks that the table names; returns their number. Called before the first request.

        Blocks without a name are used before them, then those that were used longest ago; of a chain, its end first.
        """
        self._first_epoch = self._table.epoch
        rows = [row for row in self._table.rows() if 0 < row.block < len(self._pool.blocks)]
        kept = {row.block for row in rows}
        for block in range(self._table.blocks):
            if block not in kept:
                self._table.clear(block)
        blocks = [self._pool.blocks[row.block] for row in in_order_of_use(rows)]
        for row in rows:
            tokens = (row.depth + 1) * self._block_sizes[self._group_of(row.name)]
            self._pool._insert_block_hash(row.name, self._pool.blocks[row.block], num_tokens=tokens)  # noqa: SLF001
        self._watch(blocks)
        self._stamp = max((row.stamp for row in rows), default=0) + 1
        return len(rows)

    def arrived(self, request_id: str) -> None:
        """Note a new request: from now on the daemon may find blocks to load for it."""
        self._arrived[request_id] = self._table.epoch

    def allocated(self, request_id: str, *, is_loading: bool) -> None:
        """Note that a request has got blocks, and whether some are to be loaded: those without a hash.

        vLLM calls this again, with more blocks, when they are loaded; after a failure it may be with others. What is
        loaded is of no epoch if there was a clear since the request arrived: it may have been found before.
        """
        tables = self._tables(request_id)
        if is_loading:
            local = [_known(blocks) for blocks in tables]
            epoch = self._epoch_behind(tables, local)
            if self._arrived.get(request_id) != epoch:
                epoch = _NO_EPOCH
            self._loading[request_id] = _Loading([_numbers(blocks) for blocks in tables], local, epoch)
        elif (loading := self._loading.get(request_id)) and any(
            before != _numbers(blocks[: len(before)]) for before, blocks in zip(loading.blocks, tables, strict=True)
        ):
            del self._loading[request_id]

    def step(self, step: Step) -> int:
        """Note the blocks that a step fills; returns the step's number."""
        self._number += 1
        if self._first_epoch == _NO_EPOCH:
            self._first_epoch = self._table.epoch
        for request_id in step.preempted_req_ids or ():
            self._requests.pop(request_id, None)
            self._behind.pop(request_id, None)
        cached = step.scheduled_cached_reqs
        beginning = [
            _New(new.req_id, new.num_computed_tokens, new.num_computed_tokens + step.num_scheduled_tokens[new.req_id])
            for new in step.scheduled_new_reqs
        ]
        for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
            tokens = computed + step.num_scheduled_tokens[request_id]
            if request_id in cached.resumed_req_ids:
                beginning.append(_New(request_id, computed, tokens))
            elif (request := self._requests.get(request_id)) is not None:
                request.tokens = tokens
                if tokens >= request.due:
                    self._look(request_id, request)
        self._begin_all(beginning)
        return self._number

    def step_over(self) -> None:
        """Note blocks that got their hash with a step's output: the next decision may take them from their request."""
        self._over = min(self._over + 1, self._number)
        for request_id, request in list(self._behind.items()):
            self._look(request_id, request)

    def computed(self, number: int) -> None:
        """Name the blocks of all steps up to one that all ranks have computed."""
        self._computed = max(self._computed, number)
        epoch = self._table.epoch
        while self._filled and (first := next(iter(self._filled.values()))).number <= number:
            del self._filled[first.row.block]
            if first.row.epoch == epoch and self._block(first.row.block).block_hash == first.row.name:
                self._table.write(first.row._replace(stamp=self._stamp))

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are named once further steps have been computed."""
        return bool(self._filled)

    def stop(self) -> None:
        """Name no block any more: what is computed from now on is not known to be."""
        self._is_stopped = True
        self._filled.clear()

    def finished(self, request_id: str) -> None:
        """Note the end of a request, before vLLM frees its blocks: they are used last of all."""
        tables = self._tables(request_id)
        self._arrived.pop(request_id, None)
        request = self._requests.pop(request_id, None)
        self._behind.pop(request_id, None)
        if (loading := self._loading.pop(request_id, None)) is not None:
            request = _Request(loading.local, loading.epoch, 0)
        if request is not None:
            self._note(request, tables)  # blocks that have a hash since the last step only
            if self._computed == self._number:
                self.computed(self._number)
        self._use(tables)

    def forget(self, blocks: Collection[int]) -> None:
        """Name blocks no longer: they were not loaded correctly, and are computed in place."""
        for block in blocks:
            self._handed_out(self._block(block))

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _begin_all(self, beginning: Sequence[_New]) -> None:
        """Note requests that begin, those last that build on blocks which others fill in the same step."""
        while beginning:
            later = [new for new in beginning if not self._begin(new, is_last=False)]
            if len(later) == len(beginning):
                for new in later:
                    self._begin(new, is_last=True)
                return
            beginning = later

    def _begin(self, new: _New, *, is_last: bool) -> bool:
        """Note a request that begins; unless `is_last`, only if its epoch is known, which is returned."""
        loading, tables = self._loading.get(new.request), self._tables(new.request)
        local = [new.computed_tokens // size for size in self._block_sizes] if loading is None else loading.local
        epoch = self._epoch_behind(tables, local) if loading is None else loading.epoch
        if loading is None and new.computed_tokens and not self._is_known(new, epoch):
            epoch = _NO_EPOCH
        if epoch == _NO_EPOCH and not is_last:
            return False
        self._loading.pop(new.request, None)
        request = self._requests[new.request] = _Request(list(local), epoch, new.tokens)
        self._use([blocks[:count] for blocks, count in zip(tables, local, strict=True)])
        self._look(new.request, request)
        return True

    def _look(self, request_id: str, request: _Request) -> None:
        """Note what there is to note of a request now, and whether more is to come without another step."""
        self._note(request, self._tables(request_id))
        if request.full_step and self._over >= request.full_step:
            full = [request.full_tokens // size for size in self._block_sizes]
            request.noted = list(map(max, request.noted, full))
            request.full_step = 0
        request.due = min((noted + 1) * size for noted, size in zip(request.noted, self._block_sizes, strict=True))
        if request.tokens < request.due:
            self._behind.pop(request_id, None)
            return
        self._behind[request_id] = request
        if len(self._block_sizes) > 1 and not request.full_step:
            request.full_tokens, request.full_step = request.tokens, self._number

    def _is_known(self, new: _New, epoch: int) -> bool:
        """Whether all that a request builds on, of which the blocks are of an epoch, is known.

        A part of a block is not, once there was a clear. Nor is what a request has that was taken back a token, as
        sessions are which go on with another input: a state may hold that token.
        """
        is_inside = any(map(new.computed_tokens.__mod__, self._block_sizes))
        return not (is_inside and epoch != self._first_epoch) and new.request not in self._requests

    def _epoch_behind(self, tables: Tables, counts: Sequence[int]) -> int:
        """The epoch of what is computed from the first blocks of each group: the present one, or none.

        All of them count. After a clear vLLM may find blocks of before it in front of one that was computed since.
        """
        epoch, named = self._table.epoch, []
        for blocks, count in zip(tables, counts, strict=True):
            for number in _numbers(blocks[:count]):
                if number == _NULL_BLOCK:
                    continue
                if (filled := self._filled.get(number)) is None:
                    named.append(number)
                elif filled.row.epoch != epoch:
                    return _NO_EPOCH
        return epoch if self._table.all_of(epoch, named) else _NO_EPOCH

    def _note(self, request: _Request, tables: Tables) -> None:
        """Note blocks that have a hash by now: they are full after this step at the latest.

        vLLM gives hashes in the order of a chain, but none to blocks at which no request could continue.
        """
        for group, (blocks, size) in enumerate(zip(tables, self._block_sizes, strict=True)):
            watched = []
            for depth in range(request.noted[group], len(blocks)):
                block = blocks[depth]
                if block.block_id == _NULL_BLOCK:
                    request.noted[group] += request.noted[group] == depth
                elif block.block_hash is not None and block.block_hash_num_tokens == (depth + 1) * size:
                    request.noted[group] = depth + 1
                    if request.epoch != _NO_EPOCH and not self._is_stopped:
                        self._fill(block, blocks[depth - 1].block_id if depth else _NULL_BLOCK, depth, request.epoch)
                        watched.append(block)
            self._watch(watched)

    def _fill(self, block: HashedBlock, parent: int, depth: int, epoch: int) -> None:
        """Note that this step fills a block."""
        before = NO_PARENT if parent == _NULL_BLOCK else parent
        row = Row(block.block_id, self._stamp, epoch, before, depth, block.block_hash or b"")
        self._filled.pop(row.block, None)
        self._filled[row.block] = _Filled(self._number, row)

    def _use(self, tables: Tables) -> None:
        self._stamp += 1
        for blocks in tables:
            numbers = [number for number in _numbers(blocks) if number != _NULL_BLOCK]
            if numbers:
                self._table.stamp(numbers, self._stamp)

    def _watch(self, blocks: Sequence[HashedBlock]) -> None:
        """Have vLLM call back when it hands out one of these blocks."""
        if blocks:
            self._pool.touch(blocks)
            self._pool.unpin_blocks(blocks, self._handed_out)

    def _handed_out(self, block: HashedBlock) -> None:
        self._table.clear(block.block_id)
        self._filled.pop(block.block_id, None)

    def _block(self, number: int) -> HashedBlock:
        return self._pool.blocks[number]

    def _group_of(self, name: bytes) -> int:
        """Which group the block of a name is of."""
        return int.from_bytes(name[-_GROUP_BYTES:]) if len(self._block_sizes) > 1 else 0


def _numbers(blocks: Sequence[HashedBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def _known(blocks: Sequence[HashedBlock]) -> int:
    """How many leading blocks vLLM has got, or needs no more."""
    unknown = (index for index, each in enumerate(blocks) if each.block_hash is None and each.block_id != _NULL_BLOCK)
    return next(unknown, len(blocks))


def in_order_of_use(rows: Sequence[Row]) -> list[Row]:
    """The rows, what was used longest ago first. A block is used when those behind it are, and goes after them."""
    stamps = {row.block: row.stamp for row in rows}
    depths = {row.block: row.depth for row in rows}
    for row in sorted(rows, key=lambda row: -row.depth):
        if depths.get(row.parent) == row.depth - 1:
            stamps[row.parent] = max(stamps[row.parent], stamps[row.block])
    return sorted(rows, key=lambda row: (stamps[row.block], -row.depth))
