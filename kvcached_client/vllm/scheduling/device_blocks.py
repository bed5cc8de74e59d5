"""Which of vLLM's blocks the table of its engine pool names, so that the next vLLM finds them again.

A block is named when all ranks have computed the step that filled it, as they report sooner or later, and no longer
when vLLM hands it out again: vLLM calls back then (`BlockPool.unpin_blocks`), before it orders the step that may write
it. So at any instant a named block holds what its name says, whichever processes are killed.

vLLM's pool has a call-back for each block that is named, or will be when its step is over.

Blocks belong to the epoch of the table in which their request began, and to none if the request builds on blocks of
another epoch: after a clear nothing is named that was computed before, or from that.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcached_client.blocks.engine_table import NO_PARENT, EngineTable, Row
from kvcached_client.vllm.scheduling.request_state import HashedBlock, Step, WatchedPool

#: The epoch of requests whose blocks are not named.
_NO_EPOCH: Final = 0


@dataclass(slots=True)
class _Request:
    """A request in vLLM's blocks.

    Attributes:
        blocks: numbers of its blocks.
        noted: how many of its leading blocks need not be looked at any more.
        epoch: of its blocks.
    """

    blocks: list[int]
    noted: int
    epoch: int


class _New(NamedTuple):
    """A request that begins, or begins again, in a step."""

    request: str
    blocks: Sequence[int]
    computed_tokens: int  #: before the step


class _Loading(NamedTuple):
    """A request for which blocks are loaded, until it is scheduled."""

    blocks: list[int]
    local: int  #: how many of them vLLM had
    epoch: int  #: of the request


class _Filled(NamedTuple):
    """A block that a step fills."""

    number: int  #: of the step
    row: Row
    name: bytes


class DeviceBlocks:
    """The table of one vLLM's blocks. Used by the scheduler's thread only.

    Args:
        table: of its engine pool, which nobody else writes.
        pool: vLLM's blocks.
        block_size: tokens of a block.
    """

    def __init__(self, table: EngineTable, pool: WatchedPool, block_size: int) -> None:
        self._table = table
        self._pool = pool
        self._block_size = block_size
        self._requests: dict[str, _Request] = {}
        self._loading: dict[str, _Loading] = {}
        self._filled: dict[int, _Filled] = {}  #: by block, in the order of their steps
        self._number = self._computed = 0  #: the last step, and the last one that all ranks have computed
        self._is_stopped = False
        self._stamp = 1

    def adopt(self) -> int:
        """Have vLLM find the blocks that the table names; returns their number. Called before the first request.

        Blocks without a name are used before them, then those that were used longest ago; of a chain, its end first.
        """
        rows = [row for row in self._table.rows() if 0 < row.block < len(self._pool.blocks)]
        kept = {row.block for row in rows}
        for block in range(self._table.blocks):
            if block not in kept:
                self._table.clear(block)
        blocks = [self._pool.blocks[row.block] for row in in_order_of_use(rows)]
        for row in rows:
            tokens = (row.depth + 1) * self._block_size
            self._pool._insert_block_hash(row.name, self._pool.blocks[row.block], num_tokens=tokens)  # noqa: SLF001
        self._watch(blocks)
        self._stamp = max((row.stamp for row in rows), default=0) + 1
        return len(rows)

    def allocated(self, request_id: str, blocks: Sequence[int], *, is_loading: bool) -> None:
        """Note that a request has got blocks, and whether some are to be loaded: those without a hash.

        vLLM calls this again, with more blocks, when they are loaded; after a failure it may be with others.
        """
        if is_loading:
            hashes = (self._block(block).block_hash for block in blocks)
            local = next((index for index, each in enumerate(hashes) if each is None), len(blocks))
            self._loading[request_id] = _Loading(list(blocks), local, self._epoch_behind(blocks, local))
        elif (loading := self._loading.get(request_id)) and loading.blocks != list(blocks[: len(loading.blocks)]):
            del self._loading[request_id]

    def step(self, step: Step) -> int:
        """Note the blocks that a step fills; returns the step's number."""
        self._number += 1
        cached = step.scheduled_cached_reqs
        beginning = [_New(new.req_id, new.block_ids[0], new.num_computed_tokens) for new in step.scheduled_new_reqs]
        for request_id, added, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request_id in cached.resumed_req_ids:
                beginning.append(_New(request_id, added[0] if added is not None else (), computed))
            elif (request := self._requests.get(request_id)) is not None:
                request.blocks += added[0] if added is not None else ()
                self._note(request)
        self._begin_all(beginning)
        return self._number

    def computed(self, number: int) -> None:
        """Name the blocks of all steps up to one that all ranks have computed."""
        self._computed = max(self._computed, number)
        epoch = self._table.epoch
        while self._filled and (first := next(iter(self._filled.values()))).number <= number:
            del self._filled[first.row.block]
            if first.row.epoch == epoch and self._block(first.row.block).block_hash == first.name:
                self._table.write(first.row._replace(stamp=self._stamp))

    @property
    def is_waiting(self) -> bool:
        """Whether blocks are named once further steps have been computed."""
        return bool(self._filled)

    def stop(self) -> None:
        """Name no block any more: what is computed from now on is not known to be."""
        self._is_stopped = True
        self._filled.clear()

    def finished(self, request_id: str, blocks: Sequence[int]) -> None:
        """Note the end of a request, before vLLM frees its blocks: they are used last of all."""
        if (loading := self._loading.pop(request_id, None)) is not None:
            self._requests[request_id] = _Request(loading.blocks, loading.local, loading.epoch)
        if (request := self._requests.pop(request_id, None)) is not None:
            self._note(request)  # blocks that have a hash since the last step only
            if self._computed == self._number:
                self.computed(self._number)
        self._use(blocks)

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
        loading = self._loading.get(new.request)
        local = new.computed_tokens // self._block_size if loading is None else loading.local
        epoch = self._epoch_behind(new.blocks, local) if loading is None else loading.epoch
        if epoch == _NO_EPOCH and not is_last:
            return False
        self._loading.pop(new.request, None)
        request = self._requests[new.request] = _Request(list(new.blocks), local, epoch)
        self._use(new.blocks[:local])
        self._note(request)
        return True

    def _epoch_behind(self, blocks: Sequence[int], count: int) -> int:
        """The epoch of what is computed from the first `count` blocks."""
        epoch = self._table.epoch
        if not count:
            return epoch
        last = blocks[count - 1]
        filled = self._filled.get(last)
        known = self._table.epoch_of(last) if filled is None else filled.row.epoch
        return epoch if known == epoch else _NO_EPOCH

    def _note(self, request: _Request) -> None:
        """Note blocks that have a hash by now: they are full after this step at the latest."""
        watched = []
        while request.noted < len(request.blocks):
            number, depth = request.blocks[request.noted], request.noted
            block = self._block(number)
            if block.block_hash is None:
                break
            request.noted += 1
            if request.epoch == _NO_EPOCH or self._is_stopped:
                continue
            parent = request.blocks[depth - 1] if depth else NO_PARENT
            row = Row(number, self._stamp, request.epoch, parent, depth, block.block_hash)
            self._filled.pop(number, None)
            self._filled[number] = _Filled(self._number, row, block.block_hash)
            watched.append(block)
        self._watch(watched)

    def _use(self, blocks: Sequence[int]) -> None:
        self._stamp += 1
        if blocks:
            self._table.stamp(blocks, self._stamp)

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


def in_order_of_use(rows: Sequence[Row]) -> list[Row]:
    """The rows, what was used longest ago first. A block is used when those behind it are, and goes after them."""
    stamps = {row.block: row.stamp for row in rows}
    depths = {row.block: row.depth for row in rows}
    for row in sorted(rows, key=lambda row: -row.depth):
        if depths.get(row.parent) == row.depth - 1:
            stamps[row.parent] = max(stamps[row.parent], stamps[row.block])
    return sorted(rows, key=lambda row: (stamps[row.block], -row.depth))
