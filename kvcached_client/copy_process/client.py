"""The engine's side of a copy process: it starts the process, orders copies, and hears of their ends. Nothing waits.

The process maps the host pool and the engine's device memory, joins the session as the shard, copies and reports to the
daemon. The engine's own process maps no host memory, and has no thread for copies.

The process is one of the session's: when it is dead, the session is over, and the engine connects again. It ends as
soon as the engine's process is dead, the session is over, or the daemon is gone. A copy is cut short then.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Final, NamedTuple, Self

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.blocks.transfers import BlockJob
from kvcached_client.copy_process.messages import (
    Begin,
    Load,
    MessageStream,
    NotReady,
    Order,
    Outcome,
    PackedJob,
    Ready,
    Store,
    decode_answer,
)
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, bad_value, request_error
from kvcached_client.transport.attach import SessionGrant

__all__ = ["CopyProcess", "EngineMemory", "Outcome"]

MODULE: Final = "kvcached_client.copy_process"
#: The interpreter and its modules have to be read, on a machine that may be busy.
START_MS_MAX: Final = 30_000
#: A process that does not take an order, or does not end, for so long, is killed.
_SEND_S_MAX: Final = 5.0
_END_S_MAX: Final = 5.0


class EngineMemory(NamedTuple):
    """Sealed memory of which all of an engine's tensors are a part, as memory that the daemon keeps for the engine.

    Attributes:
        descriptor: of the memory; the caller's. If it is the one that `lock_memory` has returned, the lock holds until
            the copy process is dead, too: nobody else gets the memory while that may write it.
        address: where it is mapped in this process.
        size_bytes: how much of it is mapped.
    """

    descriptor: int
    address: int
    size_bytes: int


class CopyProcess:
    """One shard of a session, whose copies a process of its own makes. Made by `start`; used by one thread.

    Attributes:
        shard: index of this shard.
        epoch: epoch of the host pool.
    """

    def __init__(self, shard: int, process: subprocess.Popen[bytes], stream: MessageStream) -> None:
        """Use `start`."""
        self.shard = shard
        self.epoch = 0
        self._process = process
        self._stream = stream
        self._numbers = 0
        self._open: set[int] = set()
        self._is_over = False

    @classmethod
    def start(
        cls,
        grant: SessionGrant,
        shard: int,
        pages: EnginePages,
        memory: EngineMemory,
        *,
        deadline_ms: int = 1000,
        start_ms: int = START_MS_MAX,
    ) -> Self:
        """Start a process that joins a session as one of its shards, and wait until it has joined.

        Args:
            grant: session grant from the scheduler.
            shard: index of this shard.
            pages: the shard's tensors, with the layout that the scheduler declared.
            memory: what the tensors of `pages` are in.
            deadline_ms: limit of the process for joining, and for each report to the daemon.
            start_ms: limit for all of it.

        Raises:
            BadRequest: the tensors are not all in the memory, or are on a CUDA device.
            DaemonUnreachable: there is no daemon, or the process has ended.
            DeadlineExceeded: the process has not joined in time; it was killed.
            RequestError: as `OffloadShard.join`.
            OSError: the process cannot be started.
        """
        begin = Begin(
            grant.to_bytes(), shard, memory.size_bytes, _layers_in(pages, memory), pages.blocks, pages.fingerprint,
            deadline_ms,
        )  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            arguments = [theirs.fileno(), memory.descriptor, os.getpid()]
            try:
                process = subprocess.Popen(
                    [sys.executable, "-m", MODULE, *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(), memory.descriptor),
                    start_new_session=True,  # Ctrl-C at the terminal is for the engine
                )
            except BaseException:
                ours.close()
                raise
        made = cls(shard, process, MessageStream(ours))
        try:
            made._begin(begin, time.monotonic() + start_ms / 1000)
        except BaseException:
            process.kill()
            made._end()
            raise
        return made

    def store(self, jobs: Sequence[BlockJob]) -> int:
        """Order stores, as `OffloadShard.store_all`. Never waits for the copy.

        Every kernel that writes the blocks must be through. An engine orders them after the forward pass.

        Returns:
            The order's number, which comes back with its outcome.

        Raises:
            DaemonUnreachable: the process is gone. If it ends after the call, an outcome says so.
        """
        return self._order(Store(self._numbers + 1, tuple(map(PackedJob.of, jobs))))

    def load(self, job: BlockJob) -> int:
        """Order a load, as `OffloadShard.load`; loads go before stores. Else as `store`."""
        return self._order(Load(self._numbers + 1, PackedJob.of(job)))

    def outcomes(self) -> list[Outcome]:
        """The orders that have ended since the last call. Never waits for a copy.

        If the process has ended, it is dead when this returns, so that nothing writes the engine's memory any more, and
        every order without an outcome has failed: `error` says why. The session is over then.
        """
        found: list[Outcome] = []
        try:
            while not self._is_over:
                answers = map(decode_answer.decode, self._stream.receive(0))
                found += [answer for answer in answers if isinstance(answer, Outcome)]
        except BlockingIOError:
            pass
        except EOFError:
            self._end()
        self._open.difference_update(outcome.number for outcome in found)
        if self._is_over:
            found += [Outcome(number, error=self._ending()) for number in sorted(self._open)]
            self._open.clear()
        return found

    def fileno(self) -> int:
        """A descriptor that is readable when there are outcomes, or the process has ended.

        Raises:
            DaemonUnreachable: the process is gone.
        """
        self._check()
        return self._stream.fileno()

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    def close(self) -> None:
        """End the process, which cuts copies short, and wait for its death. May be called again."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, begin: Begin, deadline: float) -> None:
        try:
            self._stream.send(begin, _SEND_S_MAX)
            while True:
                for data in self._stream.receive(max(deadline - time.monotonic(), 0.001)):
                    answer = decode_answer.decode(data)
                    if isinstance(answer, Ready):
                        self.epoch = answer.epoch
                        return
                    if isinstance(answer, NotReady):
                        raise _refusal(answer)
        except TimeoutError:
            raise DeadlineExceeded("the copy process has not joined the session in time") from None
        except (EOFError, OSError):
            self._end()
            raise DaemonUnreachable(self._ending()) from None

    def _order(self, order: Order) -> int:
        self._check()
        try:
            self._stream.send(order, _SEND_S_MAX)
        except OSError:
            # It has read a part of the order at most, and carries out none; what it has reported can still be read.
            self._process.kill()
            raise DaemonUnreachable("the copy process takes no orders") from None
        self._numbers = order.number
        self._open.add(order.number)
        return order.number

    def _check(self) -> None:
        if self._is_over:
            raise DaemonUnreachable(self._ending())

    def _end(self) -> None:
        """Have it dead: it ends by itself when its connection is closed; if not, it is killed."""
        if self._is_over:
            return
        self._is_over = True
        self._stream.close()
        try:
            self._process.wait(_END_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ending(self) -> str:
        return f"the copy process has ended with status {self._process.returncode}"


def _layers_in(pages: EnginePages, memory: EngineMemory) -> tuple[tuple[int, int, int], ...]:
    """Each layer's place in the memory."""
    if pages.is_on_cuda:
        raise bad_value("the tensors are on a CUDA device", "use OffloadShard: a copy process is for the CPU so far")
    for layer in pages.layers:
        end = layer.address + (pages.blocks - 1) * layer.stride_bytes + layer.page_bytes
        if not memory.address <= layer.address <= end <= memory.address + memory.size_bytes:
            raise bad_value("some of the tensors are not in the memory", "give the memory that all of them are in")
    return tuple((each.address - memory.address, each.page_bytes, each.stride_bytes) for each in pages.layers)


def _refusal(answer: NotReady) -> Exception:
    if answer.code is None:
        return DaemonUnreachable(answer.message)
    return request_error(answer.code, answer.message, answer.fix)
