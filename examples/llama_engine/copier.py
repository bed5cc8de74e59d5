"""A shard's copy thread: blocks from its tensors into the daemon's host pool, and back, while steps are computed."""

from __future__ import annotations

import logging
import select
import threading

import torch

from examples.llama_engine.messages import Channel, ChannelClosed, CopyDone, CopyOrder, JoinSession
from kvcached_client.blocks.jobs import BlockJob
from kvcached_client.blocks.pages import EnginePages
from kvcached_client.errors import KvcachedError
from kvcached_client.offload_shard import OffloadShard

_log = logging.getLogger("llama_engine")


class Copier:
    """Does what comes through a channel, one order after the other.

    Only the scheduler says which blocks are computed on and which are copied, and never both at a time: so nothing here
    needs a lock.

    Args:
        channel: its own, to the scheduler.
        shard: which shard this is.
        pages: where the blocks of this shard's tensors are.
    """

    def __init__(self, channel: Channel, shard: int, pages: EnginePages) -> None:
        self._channel = channel
        self._shard = shard
        self._pages = pages
        self._joined: OffloadShard | None = None

    def start(self) -> None:
        """Run in a thread of its own, until the scheduler closes the channel or dies."""
        threading.Thread(target=self._run, name="copier", daemon=True).start()

    def _run(self) -> None:
        try:
            while True:
                self._wait()
                order = self._channel.receive_copy_order()
                if isinstance(order, JoinSession):
                    self._join(order)
                else:
                    self._channel.send(CopyDone(order.id, self._copy(order)))
        except ChannelClosed:
            return
        finally:
            self._channel.close()  # whatever ended this: the scheduler must not wait
            self._leave()

    def _wait(self) -> None:
        """Return when there is an order. A session that ends before is left: a mapped pool takes memory."""
        if self._joined is not None:
            poller = select.poll()
            poller.register(self._channel, select.POLLIN)
            poller.register(self._joined, select.POLLIN)
            if self._channel.fileno() not in dict(poller.poll()):
                self._leave()

    def _leave(self) -> None:
        left, self._joined = self._joined, None
        if left is not None:
            left.close()

    def _join(self, order: JoinSession) -> None:
        """Go over to another session. By joining it a shard says that it is through with the earlier one."""
        joined = None
        try:
            joined = OffloadShard.join(order.session, self._shard, self._pages, deadline_ms=order.deadline_ms)
        except KvcachedError as error:
            _log.warning("shard %d copies nothing: %s", self._shard, error)
        self._leave()
        self._joined = joined

    def _copy(self, order: CopyOrder) -> list[int]:
        """The blocks that were not copied, counted from 0 in the order's own order."""
        job = BlockJob.from_bytes(order.job)
        if self._joined is None:
            return list(range(len(job.blocks)))
        try:
            after = self._joined.mark(current_stream()) if self._pages.is_on_cuda else None
            if not order.is_store:
                return self._joined.load(job, after=after)
            self._joined.store(job, after=after)
        except KvcachedError as error:
            _log.warning("shard %d: transfer %d: %s", self._shard, job.transfer, error)
            return list(range(len(job.blocks)))
        return []


def current_stream() -> int:
    """The stream of CUDA in which the shard computes. Steps are over before their blocks are copied."""
    return torch.cuda.current_stream().cuda_stream
