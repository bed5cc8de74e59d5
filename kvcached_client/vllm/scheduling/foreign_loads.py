"""Loads that another connector makes in the step that uses them: nobody knows that they are right before its output.

vLLM's `MultiConnector` joins kvcached with other connectors. Where one of them loads synchronously, vLLM counts the
blocks as computed at once, and other requests find them. If the step's output names some of them as bad, vLLM takes all
back, and computes the blocks again in place. It may do so over several steps, while requests go on finding them.

So no block of such a request behind what vLLM had itself is stored before the output has come. Once it names bad
blocks, nothing that is in them, or behind them, is stored by any request that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from kvcached_client.vllm.scheduling.chains import NULL_BLOCK, Chains
from kvcached_client.vllm.scheduling.request_state import BlockPool, RequestState


class ForeignLoads:
    """Says how far the blocks of requests can be trusted: `RequestState.trusted`.

    Args:
        pool: vLLM's blocks.
        chains: how blocks form chains.
    """

    def __init__(self, pool: BlockPool, chains: Chains) -> None:
        self._pool = pool
        self._chains = chains
        self._begun = self._over = 0  #: steps, whose outputs come in order
        #: How many tokens vLLM had itself of requests that it has asked about since the last step.
        self._local: dict[str, int] = {}
        #: Blocks that are loaded or computed in the step of this number, or from such blocks.
        self._unproved: dict[int, int] = {}
        #: Requests with such blocks.
        self._waiting: dict[RequestState, int] = {}
        #: Bad blocks, and those computed from them, as long as vLLM finds them by this hash.
        self._bad: dict[int, bytes] = {}

    def asked(self, request_id: str, local_tokens: int) -> None:
        """Note how much vLLM has itself of a request that it may schedule in the next step."""
        self._local[request_id] = local_tokens

    def scheduled(self, tracked: RequestState, tables: Sequence[Sequence[int]], computed_tokens: int) -> None:
        """Note a request that got blocks for the next step, its first, or the first since it was preempted.

        Args:
            tracked: the request.
            tables: ids of its blocks, a list for each group.
            computed_tokens: how many tokens count as computed before that step.
        """
        self._waiting.pop(tracked, None)
        depths = [self._first(tables, self._unproved.__contains__)] if self._unproved else []
        local = self._local.get(tracked.request.request_id, computed_tokens)
        # With several groups, vLLM may have some more tokens itself than it has said, but no unit.
        if computed_tokens - local >= (self._chains.unit_tokens if self._chains.is_grouped else 1):
            depths.append(self._chains.blocks_in(local))
        bad = self._first(tables, self._is_bad) if self._bad else None
        doubtful = [depth for depth in (*depths, bad) if depth is not None]
        tracked.trusted = min(doubtful, default=None)
        if tracked.trusted is None:
            return
        if bad is None:
            self._waiting[tracked] = self._begun + 1
        first = 0 if self._chains.is_grouped else tracked.trusted
        own = {block for table in tables for block in table[first:]} - {NULL_BLOCK}
        self._unproved.update(dict.fromkeys(own, self._begun + 1))

    def begin_step(self) -> None:
        """Note that a step begins, all of whose requests were noted."""
        self._begun += 1
        self._local.clear()

    def failed(self, bad_blocks: Collection[int]) -> None:
        """Note bad blocks before the end of the step that has loaded them. Those of kvcached's own loads do not count.

        vLLM takes bad blocks with one group of layers only, of which `RequestState.block_ids` has all.
        """
        if not (bad := self._unproved.keys() & set(bad_blocks)):
            return
        affected = [each for each in self._waiting if not bad.isdisjoint(each.block_ids)]
        for tracked in affected:
            del self._waiting[tracked]
            bad.update(tracked.block_ids[tracked.trusted :])
        for block in bad:
            if (block_hash := self._pool.blocks[block].block_hash) is not None:
                self._bad[block] = block_hash

    def step_over(self) -> None:
        """Note that vLLM has processed the output of the oldest step in flight: what was not bad is right."""
        self._over = min(self._over + 1, self._begun)
        if self._waiting or self._unproved:
            for tracked in [each for each, number in self._waiting.items() if number <= self._over]:
                del self._waiting[tracked]
                tracked.trusted = None
            self._unproved = {block: number for block, number in self._unproved.items() if number > self._over}

    def _first(self, tables: Sequence[Sequence[int]], is_such: Callable[[int], bool]) -> int | None:
        """Number of leading blocks before the first such block, with several groups 0; None if there is none."""
        places = [index for table in tables for index, block in enumerate(table) if is_such(block)]
        if not places:
            return None
        return 0 if self._chains.is_grouped else min(places)

    def _is_bad(self, block: int) -> bool:
        if (block_hash := self._bad.get(block)) is None:
            return False
        if self._pool.blocks[block].block_hash == block_hash:
            return True
        del self._bad[block]  # it is another block by now
        return False
