"""Loads that workers were ordered to make."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.types import TransferId
from kvcached_client.vllm.orders import LoadOrder, job_span
from kvcached_client.vllm.scheduling.chains import Chains
from kvcached_client.vllm.scheduling.request_state import RequestState


@dataclass(slots=True)
class OrderedLoad:
    """A load in flight: its blocks, and the depth from which on they are bad.

    Attributes:
        session: number of the session.
        transfer: the copy.
        start: depth of the first block.
        blocks: ids in vLLM's pool.
        bad_from: depth of the first block that is bad.
    """

    session: int
    transfer: TransferId
    start: int
    blocks: tuple[int, ...]
    bad_from: int | None = None

    def note_bad(self, block_ids: Collection[int]) -> None:
        """Note bad blocks; some may belong to other loads."""
        for depth, block in enumerate(self.blocks, self.start):
            if block in block_ids:
                self.bad_from = depth if self.bad_from is None else min(self.bad_from, depth)
                return


def order_load(
    tracked: RequestState, chains: Chains, tables: Sequence[Sequence[int]], tokens: int
) -> tuple[LoadOrder, OrderedLoad]:
    """The order to load a request's hit, as far as vLLM has not got it: so many tokens, and the states behind them.

    Args:
        tracked: the request.
        chains: how blocks form chains.
        tables: its block ids, a list for each group.
        tokens: how many tokens vLLM waits for.

    Raises:
        RuntimeError: the request has no load of them.
    """
    load, start, request_id = tracked.load, tracked.local_blocks, tracked.request.request_id
    stop = start + chains.blocks_in(tokens)
    if load is None or (tracked.states and stop != tracked.loadable):
        raise RuntimeError(f"vLLM awaits {tokens} tokens for {request_id}, which nobody announced")
    keys, runs = tracked.chain, list(chains.runs(tables, start, stop))
    if tracked.states:
        units = stop // chains.unit_blocks
        keys = chains.branch(keys, units)
        runs.append((stop, chains.state_blocks(tables, units)))
    spans = [job_span(keys, depth, run, load.slots[depth : depth + len(run)]) for depth, run in runs]
    blocks = tuple(block for _, run in runs for block in run)
    order = LoadOrder(tracked.session, request_id, BlockJob(load.transfer, load.generation, tuple(spans)))
    return order, OrderedLoad(tracked.session, load.transfer, start, blocks)
