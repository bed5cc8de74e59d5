"""A shard of an engine on a device pool: it does what it is told in the order in which it is told, as a device does.

Orders and answers are msgpack over a SOCK_SEQPACKET pair. What is queued when the scheduler dies is done all the same.
"""

from __future__ import annotations

import socket
import threading
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from kvcached_client import MappedPool, map_pool
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant
from tests.chaos.oracle import JUNK, Item, Wrong, compare, pages

_MESSAGE_BYTES_MAX = 1 << 18
_DEADLINE_MS = 3000
_LAYER_DEADLINE_MS = 1500


class Shard:
    """One shard's view of the pool.

    Args:
        index: which shard.
        link: to the scheduler.
    """

    def __init__(self, index: int, link: socket.socket) -> None:
        self._index = index
        self._link = link
        self._parts = ExitStack()
        self._pool: MappedPool | None = None
        self._views: list[Any] = []

    def work(self) -> None:
        """Until the scheduler is gone and everything it has said is done."""
        while data := self._receive():
            number, verb, *arguments = msgspec.msgpack.decode(data)
            answer = getattr(self, f"_{verb}")(*arguments)
            try:
                self._link.send(msgspec.msgpack.encode([number, self._index, answer]))
            except (BrokenPipeError, ConnectionResetError):
                continue

    def _receive(self) -> bytes:
        try:
            return self._link.recv(_MESSAGE_BYTES_MAX)
        except ConnectionResetError:  # the scheduler died with answers unread; what it has sent before comes yet
            return self._link.recv(_MESSAGE_BYTES_MAX)

    def _join(self, grant: bytes) -> str:
        """Map the pool, in place of what was mapped before."""
        try:
            pool = map_pool(SessionGrant.from_bytes(grant), self._index, deadline_ms=_DEADLINE_MS)
        except KvcachedError as error:
            return f"{type(error).__name__}: {error}"
        self._leave()
        self._pool = pool
        self._views = [pool.pages(layer) for layer in range(pool.layout.groups[0].layers)]
        return ""

    def _leave(self) -> None:
        self._views = []
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _junk(self, slots: list[int], delay_ms: int) -> None:
        self._compute(delay_ms)
        for view in self._views:
            view[slots] = JUNK

    def _write(self, blocks: list[tuple[int, int, bytes]], delay_ms: int) -> None:
        """Compute for so long, then write layer by layer."""
        self._compute(delay_ms)
        items = [Item(*block) for block in blocks]
        for layer, view in enumerate(self._views):
            view[[item.slot for item in items]] = pages(items, layer, self._index, view.shape[1])

    def _fence(self, number: int) -> int:
        return number

    def _compare(self, blocks: list[tuple[int, int, bytes]]) -> list[Wrong]:
        return [wrong for layer in range(len(self._views)) for wrong in self._compare_layer(layer, blocks)]

    def _compare_layer(self, layer: int, blocks: list[tuple[int, int, bytes]]) -> list[Wrong]:
        items, view = [Item(*block) for block in blocks], self._views[layer]
        return list(compare(np.array(view[[item.slot for item in items]]), items, layer, self._index))

    def _load(self, tickets: list[dict[str, int]], blocks: list[tuple[int, int, bytes]]) -> list[Wrong] | None:
        """Wait for layer after layer of a load, and compare each as soon as it is there; None where there is none."""
        wrong: list[Wrong] = []
        loads = [msgspec.convert(ticket, LoadTicket) for ticket in tickets]
        for layer in range(len(self._views)):
            try:
                if self._pool is not None:
                    self._pool.wait_layer(loads, layer, deadline_ms=_LAYER_DEADLINE_MS)
            except KvcachedError:
                return None
            wrong += self._compare_layer(layer, blocks)
        return wrong

    def _compute(self, delay_ms: int) -> None:
        threading.Event().wait(delay_ms / 1000)
