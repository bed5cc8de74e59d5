"""Progress pages: how far the loads of a shard are, without a message for each layer; and the engine's waits for them.

The page is an array of 64-byte entries in shared memory, little-endian, with an eventfd for each::

     0  u64  transfer      id of the load that uses the entry; later loads have higher ids
     8  u32  layers_done   layers of it that can be read, of all its blocks
    12  u32  state         0 running, 1 done, 2 failed
    16       zero

A reader that waits for a layer of load T reads the entry. If the entry's transfer is lower, T has not begun; if it is
higher, T is over. If it is T, the layer can be read once `layers_done` exceeds the layer's index or the state is 1; if
the state is 2, the layer never comes. Until one of these holds, the reader waits for the eventfd. Writes become visible
in program order (x86-64), and each event follows the change that it announces. Only the page decides: an event may
belong to a load that has ended long ago.

Workers write the page (`kvcached.memory.progress`); this module defines its format and reads it. Workers import it, so
it does not import numpy.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.errors import DaemonUnreachable, DeadlineExceeded, LoadFailed
from kvcached_client.types import PROGRESS_SLOTS

if TYPE_CHECKING:
    from kvcached_client.protocol.engine import LoadTicket
    from kvcached_client.transport.attach import AttachConnection

ENTRY_SIZE_BYTES: Final = 64
PAGE_SIZE_BYTES: Final = PROGRESS_SLOTS * ENTRY_SIZE_BYTES

STATE_RUNNING: Final = 0
STATE_DONE: Final = 1
STATE_FAILED: Final = 2

_ENTRY_WORDS: Final = ENTRY_SIZE_BYTES // 8
_EVENTFD_SIZE_BYTES: Final = 8


class _Entry(NamedTuple):
    transfer: int
    layers_done: int
    state: int


class ProgressReader:
    """Waits for layers of one shard's loads. One thread at a time, one reader per shard: the eventfds are shared."""

    def __init__(self, page: int, events: tuple[int, ...], connection: AttachConnection) -> None:
        """Map the page and take over the eventfds of its entries. The caller keeps the descriptor of the page.

        The eventfds are closed with the last reference to the reader. The end of `connection` ends every wait.

        Raises:
            DaemonFailure: the page is not sealed, too small, or cannot be mapped. The caller then keeps the eventfds.
        """
        buffer = map_sealed(page, PAGE_SIZE_BYTES, mmap.PROT_READ)
        self._words = memoryview(buffer).cast("B").cast("Q")
        self._events = events
        self._connection = connection
        # Not closed explicitly, because another thread may be waiting.
        for descriptor in events:
            weakref.finalize(self, os.close, descriptor)

    def wait_layer(self, tickets: Iterable[LoadTicket], layer: int, *, deadline_ms: int) -> None:
        """Wait until each load has copied this layer, or is over.

        Raises:
            LoadFailed: a load failed, or was cut short.
            DaemonUnreachable: the daemon or the pool is gone.
            DeadlineExceeded: a load has not copied the layer within `deadline_ms`.
        """
        deadline_ns = time.monotonic_ns() + deadline_ms * 1_000_000
        for ticket in tickets:
            while not self._has_layer(ticket, layer):
                self._wait_for_news(ticket, deadline_ns, deadline_ms)

    def _has_layer(self, ticket: LoadTicket, layer: int) -> bool:
        entry = self._read(ticket.progress)
        if entry.transfer != ticket.transfer:
            return entry.transfer > ticket.transfer
        if entry.state == STATE_FAILED:
            raise LoadFailed(f"load {ticket.transfer} failed, or was cut short")
        return entry.state == STATE_DONE or entry.layers_done > layer

    def _read(self, index: int) -> _Entry:
        """Read an entry whose two words belong to the same load."""
        at = index * _ENTRY_WORDS
        transfer = self._words[at]
        while True:
            progress, before = self._words[at + 1], transfer
            transfer = self._words[at]
            if transfer == before:
                return _Entry(transfer, progress & 0xFFFF_FFFF, progress >> 32)

    def _wait_for_news(self, ticket: LoadTicket, deadline_ns: int, deadline_ms: int) -> None:
        """Wait for an event of the ticket's entry, counting events since the last call."""
        event = self._events[ticket.progress]
        poller = select.poll()
        poller.register(event, select.POLLIN)
        poller.register(self._connection.fileno(), select.POLLIN)
        remaining_ms = max(0, -((time.monotonic_ns() - deadline_ns) // 1_000_000))
        ready = {descriptor for descriptor, _ in poller.poll(remaining_ms)}
        if event in ready:
            # Emptied before the page is read, so that an event after the read wakes the next poll.
            with contextlib.suppress(BlockingIOError):  # another waiter of this shard was faster
                os.read(event, _EVENTFD_SIZE_BYTES)
        elif ready:
            raise DaemonUnreachable(f"the daemon, or its pool, went away during load {ticket.transfer}")
        else:
            raise DeadlineExceeded(f"load {ticket.transfer} did not reach the layer within {deadline_ms} ms")
