"""From what the core asks for to commands of a replica's workers, and from their acks to what the core is told."""

from __future__ import annotations

import asyncio
import logging
import secrets
from typing import Final

from kvcached.core.effects import AbandonLoad, HurryTransfer, StartTransfer, TransferKind
from kvcached.ledger import ProcessIdentity
from kvcached.replica import Settled
from kvcached.worker.commands import ShardResult
from kvcached.worker.lifecycle import WorkersState
from kvcached.worker.messages import Abandon, BlockSpan, Hurry, Load, Probe, Store
from kvcached.worker.restart import ReplicaGroups
from kvcached_client.errors import RequestError
from kvcached_client.failpoints import failpoint
from kvcached_client.types import ShardIndex

#: A worker that gets on with none of its commands for this long is hung, and is killed.
PROGRESS_DEADLINE_S: Final = 30.0

_log: Final = logging.getLogger(__name__)


class ReplicaWorkers:
    """A replica's workers as the service sees them: `kvcached.replica.Workers`.

    Args:
        groups: the workers.
        shards: of the replica.
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
        shards: int,
        epoch: int,
        generation: int,
        verify_loads: bool,
        deadline_s: float = PROGRESS_DEADLINE_S,
    ) -> None:
        self._groups = groups
        self._shards = shards
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

    @property
    def adopted(self) -> bool:
        """Whether they are an earlier daemon's, with what its engines had written."""
        return self._groups.adopted

    @property
    def processes(self) -> dict[ShardIndex, ProcessIdentity]:
        """Each shard's worker, to be written down for the next daemon; empty where none run."""
        return self._groups.processes

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: pool memory, progress page, eventfds.

        Raises:
            DaemonFailure: the shard has no worker now.
        """
        return self._groups.current.descriptors(shard)

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Order a copy on every shard. `settled` is called once per shard, never before this returns."""

        def tell(result: ShardResult) -> None:
            settled(result.shard, result.error, result.corrupt)

        try:
            failpoint("daemon.order")
            self._groups.current.order(self._command(transfer), tell, deadline_s=self._deadline_s)
        except RequestError as error:
            _log.warning("transfer %d was not ordered: %s", transfer.transfer, error.message)
            self._fail(settled, error.message)
        except Exception as error:  # noqa: BLE001  whatever it was, the core has to hear that no shard copies
            _log.exception("transfer %d was not ordered", transfer.transfer)
            self._fail(settled, f"{type(error).__name__}: {error}")

    def _fail(self, settled: Settled, error: str) -> None:
        for shard in range(self._shards):
            self._loop.call_soon(settled, ShardIndex(shard), error, ())

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started copy."""
        self._order_at_once(Hurry(transfer=transfer.transfer))

    def abandon(self, load: AbandonLoad) -> None:
        """Tell the progress pages that a load failed which was never started."""
        self._order_at_once(Abandon(transfer=load.transfer, progress=load.progress))

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

    def _order_at_once(self, work: Hurry | Abandon) -> None:
        """Order what nobody is told the end of.

        Nobody is left waiting where it is refused: a group that does not run has no sessions, and one that has not
        read `COMMANDS_IN_FLIGHT_MAX` such commands is hung, and soon killed.
        """
        try:
            self._groups.current.order(work, _note_failure, deadline_s=self._deadline_s)
        except RequestError as error:
            _log.info("%s of transfer %d was not ordered: %s", type(work).__name__, work.transfer, error.message)


def _note_failure(result: ShardResult) -> None:
    if result.error:
        _log.info("shard %d: %s", result.shard, result.error)
