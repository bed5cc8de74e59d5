"""Who writes memory of CUDA devices in engine pools: the processes that were given it, until they are dead.

Each rank has two places: for the engine's process, and for a process that copies for it. The second one is given the
memory while the first one lives, and usually outlives it by moments.

A process's lock says too little about such memory. When a process ends, the kernel drops its locks and closes the
driver's files in an order that nobody promises. Only when both is done does it say that the process is dead.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from kvcached.memory.engine_pool import EnginePool
from kvcached.memory.engine_record import Writer
from kvcached.process.identity import PID_MAX, ProcessIdentity, open_process, pid_namespace
from kvcached_client.blocks.engine_table import RANKS_MAX
from kvcached_client.errors import ErrorCode, request_error


class WriterProcess(Protocol):
    """A process by its pidfd; see `PeerProcess`."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """What tells it from later processes with its id; None where that is not visible."""

    def is_dead(self) -> bool:
        """Whether it has ended. Never waits."""

    def is_same_process(self, other: object) -> bool:
        """Whether two living ones are surely one process, also where no identity is visible."""

    def close(self) -> None:
        """Close its pidfd."""


class UnknownWriter(Exception):
    """A process that an earlier daemon has written down may live, and its death cannot be seen from here."""


class EngineWriters:
    """The writers of all engine pools, by pool and place. A dead one is forgotten with its pool, or for another."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], WriterProcess] = {}

    def find(self, pool: EnginePool) -> None:
        """Find the writers of a pool that an earlier daemon has left.

        Raises:
            UnknownWriter: it was written down in another pid namespace, or without an id.
        """
        for place in range(min(2 * pool.head.ranks, RANKS_MAX)):
            writer = pool.record.writer(place)
            if not writer.pid:
                continue
            if writer.namespace != pid_namespace():
                raise UnknownWriter
            pidfd = open_process(writer.pid, writer.started)
            if pidfd is not None:
                identity = ProcessIdentity(writer.pid, writer.started)
                self._known[pool.head.pool_id, place] = _FoundProcess(identity, pidfd)

    def admit(self, pool: EnginePool, rank: int, process: WriterProcess) -> None:
        """An engine's process is given a rank's memory. It is taken over; on an error it is closed.

        Raises:
            RequestError: another process that may still write there lives.
        """
        is_taken = self._lives(pool, rank) and not self._is_in(pool, rank, process)
        if is_taken or self._lives(pool, _place_of_copies(pool, rank)):
            process.close()
            raise request_error(
                ErrorCode.LIMIT,
                f"another living process has the memory of rank {rank}",
                "end it, or give each engine an engine_id of its own",
            )
        self._put(pool, rank, process)

    def admit_copies(self, pool: EnginePool, rank: int, process: WriterProcess) -> None:
        """A process is given a rank's memory to copy for the engine's process that has it. Else as `admit`.

        Raises:
            RequestError: that one is dead, or there is another one that copies; or the engine has too many ranks.
        """
        place, code, fault = _place_of_copies(pool, rank), ErrorCode.LIMIT, ""
        if 2 * pool.head.ranks > RANKS_MAX:
            code, fault = ErrorCode.BAD_VALUE, f"no processes can copy for an engine of {pool.head.ranks} ranks"
        elif not self._lives(pool, rank):
            fault = f"no living process has the memory of rank {rank}"
        elif self._lives(pool, place):
            fault = f"another living process copies for rank {rank}"
        if fault:
            process.close()
            raise request_error(code, fault, "let the engine's own process copy")
        self._put(pool, place, process)

    def has(self, pool: EnginePool) -> bool:
        """Whether a process that was given memory of a pool lives."""
        return any(not writer.is_dead() for (pool_id, _), writer in self._known.items() if pool_id == pool.head.pool_id)

    def forget(self, pool: EnginePool) -> None:
        """Forget the writers of a pool that is given back."""
        for place in [place for place in self._known if place[0] == pool.head.pool_id]:
            self._known.pop(place).close()

    def _lives(self, pool: EnginePool, place: int) -> bool:
        known = self._known.get((pool.head.pool_id, place))
        return known is not None and not known.is_dead()

    def _is_in(self, pool: EnginePool, place: int, process: WriterProcess) -> bool:
        known = self._known[pool.head.pool_id, place]
        is_visible = known.identity is not None and known.identity == process.identity
        return is_visible or known.is_same_process(process)

    def _put(self, pool: EnginePool, place: int, process: WriterProcess) -> None:
        known = self._known.pop((pool.head.pool_id, place), None)
        if known is not None:
            known.close()
        self._known[pool.head.pool_id, place] = process
        pool.record.note_writer(place, _written_down(process))


class _FoundProcess:
    """`WriterProcess` that an earlier daemon has written down."""

    def __init__(self, identity: ProcessIdentity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd

    def is_dead(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def is_same_process(self, other: object) -> bool:
        """Only this very object: it is visible from here, so its identity says more."""
        return other is self

    def close(self) -> None:
        os.close(self._pidfd)


def _place_of_copies(pool: EnginePool, rank: int) -> int:
    return pool.head.ranks + rank


def _written_down(process: WriterProcess) -> Writer:
    """For the next daemon; one without a visible id is never found again, nor taken for dead."""
    identity = process.identity
    if identity is None:
        return Writer(PID_MAX, 0, 0)
    return Writer(identity.pid, identity.started, pid_namespace())
