"""Who writes memory of CUDA devices in engine pools: the processes that were given it, until they are dead.

A process's lock says too little about such memory. When a process ends, the kernel drops its locks and closes the
driver's files in an order that nobody promises. Only when both is done does it say that the process is dead.
"""

from __future__ import annotations

import os
import select
from typing import Protocol

from kvcached.memory.engine_pool import EnginePool
from kvcached.process.identity import PID_MAX, ProcessIdentity, open_process, pid_namespace
from kvcached_client.blocks.engine_table import Writer
from kvcached_client.errors import ErrorCode, request_error


class WriterProcess(Protocol):
    """A process by its pidfd; see `PeerProcess`."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """What tells it from later processes with its id; None where that is not visible."""

    def is_dead(self) -> bool:
        """Whether it has ended. Never waits."""

    def close(self) -> None:
        """Close its pidfd."""


class UnknownWriter(Exception):
    """A process that an earlier daemon has written down may live, and its death cannot be seen from here."""


class EngineWriters:
    """The writers of all engine pools, by pool and rank. A dead one is forgotten with its pool, or for the next one."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, int], WriterProcess] = {}

    def find(self, pool: EnginePool) -> None:
        """Find the writers of a pool that an earlier daemon has left.

        Raises:
            UnknownWriter: it was written down in another pid namespace, or without an id.
        """
        for rank in range(pool.head.ranks):
            writer = pool.table.writer(rank)
            if not writer.pid:
                continue
            if writer.namespace != pid_namespace():
                raise UnknownWriter
            pidfd = open_process(writer.pid, writer.started)
            if pidfd is not None:
                identity = ProcessIdentity(writer.pid, writer.started)
                self._known[pool.head.pool_id, rank] = _FoundProcess(identity, pidfd)

    def admit(self, pool: EnginePool, rank: int, process: WriterProcess) -> None:
        """A process is given a rank's memory. It is taken over; on an error it is closed.

        Raises:
            RequestError: another process that may still write there lives.
        """
        place = pool.head.pool_id, rank
        known = self._known.get(place)
        if known is not None:
            if not known.is_dead() and not _is_same(known, process):
                process.close()
                raise request_error(
                    ErrorCode.LIMIT,
                    f"another living process has the memory of rank {rank}",
                    "end it, or give each engine an engine_id of its own",
                )
            known.close()
        self._known[place] = process
        pool.table.note_writer(rank, _written_down(process))

    def has(self, pool: EnginePool) -> bool:
        """Whether a process that was given memory of a pool lives."""
        return any(not writer.is_dead() for (pool_id, _), writer in self._known.items() if pool_id == pool.head.pool_id)

    def forget(self, pool: EnginePool) -> None:
        """Forget the writers of a pool that is given back."""
        for place in [place for place in self._known if place[0] == pool.head.pool_id]:
            self._known.pop(place).close()


class _FoundProcess:
    """`WriterProcess` that an earlier daemon has written down."""

    def __init__(self, identity: ProcessIdentity, pidfd: int) -> None:
        self.identity = identity
        self._pidfd = pidfd

    def is_dead(self) -> bool:
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return bool(poll.poll(0))

    def close(self) -> None:
        os.close(self._pidfd)


def _is_same(one: WriterProcess, other: WriterProcess) -> bool:
    return one.identity is not None and one.identity == other.identity


def _written_down(process: WriterProcess) -> Writer:
    """For the next daemon; one without a visible id is never found again, nor taken for dead."""
    identity = process.identity
    if identity is None:
        return Writer(PID_MAX, 0, 0)
    return Writer(identity.pid, identity.started, pid_namespace())
