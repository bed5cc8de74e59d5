"""From what the core asks for to commands of a replica's workers, and from their acks to what the core is told."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from typing import Final

from kvcached.core.messages import AbandonLoad, HurryTransfer, StartTransfer, TransferKind
from kvcached.memory.device_pool import ShardMemory
from kvcached.service.replica import Settled
from kvcached.worker.commands import ShardResult
from kvcached.worker.lifecycle import WorkersState
from kvcached.worker.messages import BlockSpan, Hurry, Load, Probe, Store
from kvcached.worker.restart import ReplicaGroups
from kvcached_client.errors import RequestError
from kvcached_client.failpoints import failpoint
from kvcached_client.types import ShardIndex

#: A worker that gets on with none of its commands for this long is hung, and is killed.
PROGRESS_DEADLINE_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


class ReplicaWorkers:
    """A replica's workers as the service sees them: `kvcached.service.replica.Workers`.

    Args:
        groups: the workers.
        memory: of each shard of the replica.
        epoch: of the daemon.
        generation: of the replica's namespace.
        verify_loads: whether loads compare checksums.

    Attributes:
        generation: that of the orders from now on.
    """

    def __init__(
        self,
        groups: ReplicaGroups,
        *,
        memory: Sequence[ShardMemory],
        epoch: int,
        generation: int,
        verify_loads: bool,
        deadline_s: float = PROGRESS_DEADLINE_S,
    ) -> None:
        self._groups = groups
        self._memory = memory
        self._epoch = epoch
        self.generation = generation
        self._verify_loads = verify_loads
        self._deadline_s = deadline_s
        self._loop = asyncio.get_running_loop()

    @property
    def state(self) -> WorkersState:
        """What the workers do; the device pool serves while they are running or on probation."""
        return self._groups.state

    @property
    def is_degraded(self) -> bool:
        """Whether they die again and again, so that they are started as rarely as possible, or are on probation."""
        return self._groups.is_degraded

    @property
    def restarts(self) -> int:
        """How often they were replaced since the daemon's start."""
        return self._groups.restarts

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: pool memory, progress page, eventfds."""
        return self._memory[shard].for_engine

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Order a copy on every shard. `settled` is called once per shard, never before this returns."""

        def tell(result: ShardResult) -> None:
            if result.is_lost:
                self._fail_load(transfer, result.shard)
            settled(result.shard, result.error, result.corrupt)

        try:
            failpoint("daemon.order")
            self._groups.current.order(self._command(transfer), tell, deadline_s=self._deadline_s)
        except RequestError as error:
            _log.warning("transfer %d was not ordered: %s", transfer.transfer, error.message)
            self._fail(transfer, settled, error.message)
        except Exception as error:  # noqa: BLE001  whatever it was, the core has to hear that no shard copies
            _log.exception("transfer %d was not ordered", transfer.transfer)
            self._fail(transfer, settled, f"{type(error).__name__}: {error}")

    def _fail(self, transfer: StartTransfer, settled: Settled, error: str) -> None:
        """No worker was told of a copy."""
        for shard in map(ShardIndex, range(len(self._memory))):
            self._fail_load(transfer, shard)
            self._loop.call_soon(settled, shard, error, ())

    def _fail_load(self, transfer: StartTransfer, shard: ShardIndex) -> None:
        """Tell who waits for layers that none will come; no worker writes the entry of the load."""
        if transfer.kind is TransferKind.LOAD:
            self._memory[shard].progress.fail(transfer.progress, transfer.transfer)

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started copy."""
        try:
            self._groups.current.order(Hurry(transfer=transfer.transfer), lambda _: None, deadline_s=self._deadline_s)
        except RequestError as error:  # a group that does not run copies nothing; one that reads nothing is soon killed
            _log.info("transfer %d cannot be hurried: %s", transfer.transfer, error.message)

    def abandon(self, load: AbandonLoad) -> None:
        """Tell the progress pages that a load failed which was never started, so that no worker writes its entry."""
        for memory in self._memory:
            memory.progress.fail(load.progress, load.transfer)

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Run a probe on every shard.

        Raises:
            DaemonFailure: a worker is lost.
        """
        work = Probe(source=first, target=second, seed=secrets.randbits(32))
        return self._groups.current.submit(work, deadline_s=self._deadline_s)

    def _command(self, transfer: StartTransfer) -> Store | Load:
        spans = tuple(
            BlockSpan(span.depth, span.parent, span.keys, span.device.tobytes(), span.host.tobytes())
            for span in transfer.spans
        )
        if transfer.kind is TransferKind.STORE:
            return Store(
                transfer=transfer.transfer,
                epoch=self._epoch,
                generation=self.generation,
                spans=spans,
                urgent=transfer.urgent,
            )
        return Load(
            transfer=transfer.transfer,
            generation=self.generation,
            spans=spans,
            progress=transfer.progress,
            verify=self._verify_loads,
        )
