"""The copy process: ``python -m kvcached_client.copy_process CONNECTION MEMORY PARENT``, started by an engine.

CONNECTION and MEMORY are inherited descriptors. The one of the memory stays open, because a lock of the engine may
belong to it. Loads go before stores. Every end of the process is sudden: what it was copying fails with it.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import socket
import threading
from collections import deque
from typing import Final, NoReturn

from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.blocks.pages import EnginePages, LayerPages
from kvcached_client.copy_process.messages import (
    Begin,
    Load,
    MessageStream,
    NotReady,
    Order,
    Outcome,
    Ready,
    Store,
    decode_begin,
    decode_order,
)
from kvcached_client.errors import KvcachedError, RequestError
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transport.attach import SessionGrant

_NOT_JOINED: Final = 3
_FAILED: Final = 4
#: A store that waits has its turn after so many loads.
PASSES_MAX: Final = 16
_ERROR_CHARS_MAX: Final = 1000

_log: Final = logging.getLogger("kvcached_client")


class Orders:
    """What waits. Filled by one thread, emptied by another one."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._loads: deque[Load] = deque()
        self._stores: deque[Store] = deque()
        self._passed = 0

    def put(self, order: Order) -> None:
        """Queue an order."""
        with self._changed:
            if isinstance(order, Load):
                self._loads.append(order)
            else:
                self._stores.append(order)
            self._changed.notify()

    def take(self) -> Order:
        """The next order; waits for one."""
        with self._changed:
            while not (self._loads or self._stores):
                self._changed.wait()
            if self._loads and not (self._stores and self._passed >= PASSES_MAX):
                self._passed = self._passed + 1 if self._stores else 0
                return self._loads.popleft()
            self._passed = 0
            return self._stores.popleft()


class Copying(threading.Thread):
    """Carries out orders, one after the other, and says how each has ended."""

    def __init__(self, shard: OffloadShard, orders: Orders, connection: MessageStream) -> None:
        super().__init__(name="kvcached-copies", daemon=True)
        self._shard = shard
        self._orders = orders
        self._connection = connection

    def run(self) -> None:
        """Until the process ends."""
        try:
            while True:
                self._connection.send(self._carry_out(self._orders.take()), None)
        except OSError:
            os._exit(0)  # the engine is gone
        except BaseException:  # noqa: BLE001  a process that has lost this thread must not look as if it lived
            _log.exception("copies end")
            os._exit(_FAILED)

    def _carry_out(self, order: Order) -> Outcome:
        try:
            if isinstance(order, Load):
                return Outcome(order.number, bad=tuple(self._shard.load(order.job.job())))
            self._shard.store_all([job.job() for job in order.jobs])
        except KvcachedError as error:
            return Outcome(order.number, error=f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX])
        return Outcome(order.number)


def join(begin: Begin, memory: int) -> OffloadShard:
    """Map the engine's memory, and join the session.

    Raises:
        KvcachedError: as `OffloadShard.join`; or the memory cannot be mapped.
    """
    mapped = map_sealed(memory, begin.memory_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    address = ctypes.addressof(mapped)
    layers = tuple(LayerPages(address + offset, page, stride) for offset, page, stride in begin.layers)
    pages = EnginePages(layers, begin.blocks, begin.fingerprint, (mapped,))
    return OffloadShard.join(SessionGrant.from_bytes(begin.grant), begin.shard, pages, deadline_ms=begin.deadline_ms)


def serve(shard: OffloadShard, connection: MessageStream, engine: int) -> NoReturn:
    """Take orders until the engine is dead, the session is over, or the daemon is gone."""
    orders = Orders()
    Copying(shard, orders, connection).start()
    poller = select.poll()
    for descriptor in (connection.fileno(), engine, shard.fileno()):
        poller.register(descriptor, select.POLLIN)
    try:
        while {descriptor for descriptor, _ in poller.poll()} == {connection.fileno()}:
            for data in connection.receive(None):
                orders.put(decode_order.decode(data))
    except EOFError:
        pass
    except (ValueError, OSError):  # msgspec.DecodeError is a ValueError
        _log.exception("orders cannot be read")
        os._exit(_FAILED)
    os._exit(0)


def main(arguments: list[str]) -> int:
    """Serve one engine's shard. Returns an exit status only if it could not join."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s kvcached copy process: %(message)s")
    inherited, memory, parent = map(int, arguments[1:])
    connection = MessageStream(socket.socket(fileno=inherited))
    engine = os.pidfd_open(parent)
    if os.getppid() != parent:
        return 0  # it is dead, and another process may have its id
    begin = _first(connection)
    try:
        shard = join(begin, memory)
    except KvcachedError as error:
        connection.send(_not_ready(error), None)
        return _NOT_JOINED
    connection.send(Ready(shard.epoch), None)
    serve(shard, connection, engine)


def _first(connection: MessageStream) -> Begin:
    while True:
        for data in connection.receive(None):
            return decode_begin(data)


def _not_ready(error: KvcachedError) -> NotReady:
    if isinstance(error, RequestError):
        return NotReady(error.code, error.message, error.fix)
    return NotReady(None, str(error))
