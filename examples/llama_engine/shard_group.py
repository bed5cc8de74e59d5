"""The shard processes as the scheduler sees them: start, run a step on all of them, notice a death, stop."""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from examples.llama_engine.config import EngineSettings
from examples.llama_engine.copy_pipes import CopyPipes
from examples.llama_engine.messages import Channel, ChannelClosed, OwnBlocks, Ready, Remap, Setup, Step, StepDone
from kvcached_client.transport.attach import SessionGrant

Answer = TypeVar("Answer", Ready, StepDone)

_EXIT_TIMEOUT_S = 10


class ShardDied(RuntimeError):
    """A shard process ended. Its group cannot go on: close the engine and start another; the cache stays warm."""


@dataclass(frozen=True, slots=True)
class _Shard:
    process: subprocess.Popen[bytes]
    channel: Channel
    copies: Channel


class ShardGroup:
    """`tp` shard processes that compute the same step at the same time.

    Attributes:
        ready: what the shards said of their memory.
        copies: to their copy threads.
    """

    def __init__(self, settings: EngineSettings, memory: SessionGrant | OwnBlocks) -> None:
        """Start the processes and wait until all are ready.

        Args:
            settings: of the engine.
            memory: the session whose pool the shards map, or what they make themselves.

        Raises:
            ShardDied: one of them could not start; its reason is on stderr.
        """
        self._shards = [_start_process() for _ in range(settings.tp)]
        self.copies = CopyPipes([shard.copies for shard in self._shards], self._death_of)
        try:
            with tempfile.TemporaryDirectory(prefix="llama-engine-") as directory:
                for index in range(settings.tp):
                    setup = Setup(
                        model_dir=str(settings.model_dir.absolute()),
                        seed=settings.seed,
                        shard=index,
                        shards=settings.tp,
                        session=memory if isinstance(memory, SessionGrant) else None,
                        own=memory if isinstance(memory, OwnBlocks) else None,
                        device=settings.device,
                        cuda_graphs=settings.cuda_graphs,
                        rendezvous=str(Path(directory, "rendezvous")),
                    )
                    self._send(index, setup)
                self.ready = self._collect(Ready)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Of the shards, in their order."""
        return [shard.process.pid for shard in self._shards]

    def run(self, step: Step) -> StepDone:
        """Run a step on every shard; returns when all have stored their rows, so the blocks may be committed.

        Raises:
            ShardDied: a shard ended before it answered.
        """
        for index in range(len(self._shards)):
            self._send(index, step)
        return join_answers(self._collect(StepDone))

    def remap(self, session: SessionGrant) -> None:
        """Have every shard map its pool in a session that goes on for an earlier one.

        Raises:
            ShardDied: as `run`.
        """
        for index in range(len(self._shards)):
            self._send(index, Remap(session))
        self._collect(Ready)

    def close(self) -> None:
        """End all shards and wait until they are gone: only then is nobody left who could write into the pool."""
        for shard in self._shards:
            shard.copies.close()
            shard.channel.close()
        for shard in self._shards:
            try:
                shard.process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                shard.process.kill()
                shard.process.wait()

    def _send(self, index: int, message: Setup | Step | Remap) -> None:
        try:
            self._shards[index].channel.send(message)
        except ChannelClosed:
            raise self._death_of(index) from None

    def _collect(self, kind: type[Answer]) -> list[Answer]:
        """One answer of every shard, in shard order. Waits for all at once: a dead shard leaves the others hanging."""
        answers: dict[int, Answer] = {}
        with selectors.DefaultSelector() as selector:
            for index, shard in enumerate(self._shards):
                selector.register(shard.channel, selectors.EVENT_READ, index)
            while len(answers) < len(self._shards):
                for key, _ in selector.select():
                    try:
                        answer = self._shards[key.data].channel.receive_answer()
                    except ChannelClosed:
                        raise self._death_of(key.data) from None
                    if not isinstance(answer, kind):
                        raise TypeError(f"shard {key.data} sent {type(answer).__name__}, expected {kind.__name__}")
                    answers[key.data] = answer
                    selector.unregister(key.fileobj)
        return [answers[index] for index in range(len(self._shards))]

    def _death_of(self, index: int) -> ShardDied:
        process = self._shards[index].process
        try:
            status = process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return ShardDied(f"shard {index} (pid {process.pid}) closed its socket without ending")
        reason = f"was killed by signal {-status}" if status < 0 else f"ended with exit status {status}"
        return ShardDied(f"shard {index} (pid {process.pid}) {reason}; what it had to say is on stderr")


def join_answers(answers: Sequence[StepDone]) -> StepDone:
    """What a step came to, from the answers in shard order: an item that any shard left unread is unread."""
    return StepDone(answers[0].samples, sorted({index for answer in answers for index in answer.unread}))


def _start_process() -> _Shard:
    (ours, theirs), (our_copies, their_copies) = socket.socketpair(), socket.socketpair()
    with theirs, their_copies:
        numbers = [theirs.fileno(), their_copies.fileno()]
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.shard", *map(str, numbers)],
            pass_fds=numbers,
            stdin=subprocess.DEVNULL,
            stdout=2,  # stdout belongs to the scheduler's answers
        )
    return _Shard(process, Channel(ours), Channel(our_copies))
