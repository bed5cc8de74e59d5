"""Whole requests of an engine, as the suite ``request`` times them: from a prompt's tokens to the last answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import zmq

from benchmarks.echo import open_dealer
from kvcached_client import Client, Lease
from kvcached_client.keys import KeyChain
from kvcached_client.offload import OffloadClient, OffloadLayout, new_instance
from kvcached_client.protocol.engine import Settled, TransferDone
from kvcached_client.protocol.offload import CopyKind
from kvcached_client.transport.session import SessionChannel
from kvcached_client.transport.steps import BatchedCall, Steps, complete
from kvcached_client.types import TransferId

BLOCK_SIZE: Final = 16
#: A block of the offload engine's only shard; nothing is copied, so it may be small.
BLOCK_BYTES: Final = 1024
DEADLINE_MS: Final = 10_000
#: Steps whose leases are held at the same time: more than are prepared before the first of them runs.
STEPS_PREPARED_MAX: Final = 16

Tokens = npt.NDArray[np.int32]


class Traffic(NamedTuple):
    """What one request sent and received.

    Attributes:
        calls: messages that were sent.
        sent_bytes: of all of them.
        received_bytes: of all replies.
    """

    calls: int
    sent_bytes: int
    received_bytes: int


class Engine(Protocol):
    """What the suite needs of an engine."""

    channel: SessionChannel

    def root(self, tokens: Tokens) -> KeyChain:
        """The keys of a prompt."""

    def serve(self, name: str, chain: KeyChain) -> int:
        """One request but its hashing: all calls that a prompt causes; returns the blocks that were hit."""


class ManagedEngine(AbstractContextManager["ManagedEngine"]):
    """An engine on a device pool of the daemon: acquire, then finish, or many of these in a batch."""

    def __init__(self, run_dir: Path, replica: str) -> None:
        self.client = Client.connect(run_dir, replica=replica, deadline_ms=DEADLINE_MS)
        self.channel = self.client._channel  # noqa: SLF001 - the traffic is counted where it is sent
        self._last: tuple[Lease, int] | None = None
        self._steps: deque[list[Lease]] = deque()

    def root(self, tokens: Tokens) -> KeyChain:
        """See `Engine`."""
        return self.client.chain(tokens)

    def serve(self, name: str, chain: KeyChain) -> int:
        """See `Engine`."""
        lease = self.client.acquire(name, chain)
        lease.finish(chain.token_count)
        return lease.hit_blocks

    def turn_over(self, name: str, chain: KeyChain) -> None:
        """A request as in a loop of steps: one batch finishes the last one and acquires this one."""
        with self.client.batch() as batch:
            if self._last is not None:
                batch.finish(*self._last)
            call = batch.acquire(name, chain)
        self._last = call.result(), chain.token_count

    def acquire(self, chains: list[tuple[str, KeyChain]]) -> list[Lease]:
        """The leases of a step's requests; those of a step so long ago that it is over are given back."""
        with self.client.batch() as batch:
            if len(self._steps) >= STEPS_PREPARED_MAX:
                for lease in self._steps.popleft():
                    batch.release(lease)
            calls = [batch.acquire(name, chain) for name, chain in chains]
        self._steps.append([call.result() for call in calls])
        return self._steps[-1]

    def commit(self, leases: list[Lease], tokens: int) -> None:
        """A step that has filled a block of each request: a round trip for each commit."""
        for lease in leases:
            lease.commit(tokens)

    def commit_batched(self, leases: list[Lease], tokens: int) -> None:
        """The same in one batch."""
        with self.client.batch() as batch:
            for lease in leases:
                batch.commit(lease, tokens)

    def match(self, chain: KeyChain) -> int:
        """Ask only how much is cached."""
        return self.client.match(chain)

    def __exit__(self, *_: object) -> None:
        self.client.close()


class OffloadEngine(AbstractContextManager["OffloadEngine"]):
    """An engine with device memory of its own: acquire, load what is hit, store the rest, release. No bytes move."""

    def __init__(self, run_dir: Path) -> None:
        self.client = OffloadClient.connect(
            run_dir,
            engine="benchmark",
            instance=new_instance(),
            keyspace=bytes(32),
            label="benchmark",
            layout=OffloadLayout(block_size=BLOCK_SIZE, shards=1, block_bytes=BLOCK_BYTES, fingerprint=bytes(16)),
            deadline_ms=DEADLINE_MS,
        )
        self.channel = self.client._channel  # noqa: SLF001

    def root(self, tokens: Tokens) -> KeyChain:
        """See `Engine`."""
        return KeyChain(self.client.namespace, BLOCK_SIZE, tokens)

    def serve(self, name: str, chain: KeyChain) -> int:
        """See `Engine`."""
        hold = self.client.acquire(name, chain.keys, chain.token_count, load_from=0)
        if hold.load is not None:
            self.channel.posted.add(BatchedCall(self._reporting("load", hold.load.transfer)))
        if chain.block_count > hold.hit:
            store = self.client.prepare_store(hold.lease, hold.hit, chain.key_range(hold.hit, chain.block_count))
            if store.transfer:
                complete(self._reporting("store", store.transfer))
        self.client.release(hold.lease)
        return hold.hit

    def serve_pipelined(self, name: str, chain: KeyChain) -> None:
        """The same in three round trips: calls that do not need each other's answers are under way together."""
        hold = self.client.acquire(name, chain.keys, chain.token_count, load_from=0)
        if hold.load is None:
            raise RuntimeError(f"no load of a hit of {hold.hit} blocks was announced")
        store = self.client.begin_prepare_store(hold.lease, hold.hit, chain.key_range(hold.hit, chain.block_count))
        reports = self._report("load", hold.load.transfer), self._report("store", store.result().transfer)
        for report in reports:
            self.channel.send(report)
        self.client.post_release(hold.lease)
        for report in reports:
            self.channel.receive(report, Settled)

    def _reporting(self, kind: CopyKind, transfer: TransferId) -> Steps[None]:
        """What a shard says after its copy. It waits for the reply where that was a store, not where it was a load."""
        deadline_ns = self.channel.deadline_ns()
        yield from self.channel.asking(self._report(kind, transfer), Settled, deadline_ns=deadline_ns)

    def _report(self, kind: CopyKind, transfer: TransferId) -> TransferDone:
        session = self.client.session
        return TransferDone(
            id=self.channel.next_id(), session=session.id, token=session.token, kind=kind, transfer=transfer, shard=0
        )

    def __exit__(self, *_: object) -> None:
        self.client.close()


def traffic_of(engine: Engine, request: Callable[[], object]) -> Traffic:
    """What a request sends and receives, counted at the client's own calls."""
    calls = engine.channel._calls  # noqa: SLF001
    send, receive = calls.send, calls.receive
    sent: list[int] = []
    received: list[int] = []

    def counted_send(*arguments: object, **named: object) -> list[bytes]:
        parts: list[bytes] = send(*arguments, **named)  # type: ignore[arg-type]
        sent.append(sum(map(len, parts)))
        return parts

    def counted_receive(parts: list[bytes]) -> object:
        received.append(sum(map(len, parts)))
        return receive(parts)

    calls.send, calls.receive = counted_send, counted_receive  # type: ignore[method-assign, assignment]
    try:
        request()
    finally:
        del calls.send, calls.receive
    return Traffic(len(sent), sum(sent), sum(received))


class Echo(AbstractContextManager["Echo"]):
    """One round trip of as many bytes as a request moves in all its calls, with nobody behind the socket who thinks."""

    def __init__(self, endpoint: str, traffic: Traffic) -> None:
        with ExitStack() as stack:
            context: zmq.Context[zmq.Socket[bytes]] = stack.enter_context(zmq.Context())
            self._socket = open_dealer(context, endpoint)
            stack.callback(self._socket.close, linger=0)
            self._request, self._reply = bytes(traffic.sent_bytes), bytes(traffic.received_bytes)
            self._socket.send(self._reply)  # what every later message is answered with
            self._socket.recv()
            self._stack = stack.pop_all()

    def exchange(self) -> None:
        """Send, and wait for the reply."""
        self._socket.send(self._request)
        self._socket.recv()

    def __exit__(self, *_: object) -> None:
        self._stack.close()
