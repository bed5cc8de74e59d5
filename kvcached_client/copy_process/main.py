"""The copy process: ``python -m kvcached_client.copy_process CONNECTION PARENT ERRORS``, started by an engine.

CONNECTION and ERRORS, the engine's stderr, are inherited descriptors, and so are those that the first message names.
The one of memory of this machine stays open, because a lock of the engine may belong to it. Loads go before stores.
Every end of the process is sudden: what it was copying fails with it. When its device has failed it ends, since another
process may still use the device; where the device has refused one copy, and works, that copy alone has failed.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import select
import socket
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NoReturn

from kvcached_client.blocks.mapping import Buffer, map_sealed
from kvcached_client.blocks.pages import EnginePages, LayerPages
from kvcached_client.copy_process.messages import (
    DEVICE_FAILED,
    Begin,
    Join,
    Load,
    MessageStream,
    NotReady,
    Order,
    Outcome,
    PoolClaim,
    Ready,
    Store,
    decode_begin,
    decode_join,
    decode_order,
)
from kvcached_client.errors import BadRequest, DaemonUnreachable, DeviceError, KvcachedError, RequestError
from kvcached_client.offload_shard import OffloadShard
from kvcached_client.transport.attach import SessionGrant, claim_pool

if TYPE_CHECKING:
    from kvcached_client.cuda.imported import ImportedMemory
    from kvcached_client.cuda.marks import MarkReader

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

    def __init__(
        self, shard: OffloadShard, marks: MarkReader | None, orders: Orders, connection: MessageStream
    ) -> None:
        super().__init__(name="kvcached-copies", daemon=True)
        self._shard = shard
        self._marks = marks
        self._orders = orders
        self._connection = connection

    def run(self) -> None:
        """Until the process ends."""
        try:
            while True:
                self._connection.send(self._carry_out(self._orders.take()), None)
        except OSError:
            os._exit(0)  # the engine is gone
        except DeviceError:
            _log.exception("copies end with the device")
            os._exit(DEVICE_FAILED)
        except BaseException:  # noqa: BLE001  a process that has lost this thread must not look as if it lived
            _log.exception("copies end")
            os._exit(_FAILED)

    def _carry_out(self, order: Order) -> Outcome:
        after = None if self._marks is None else self._marks.mark(order.after)
        try:
            if isinstance(order, Load):
                return Outcome(order.number, bad=tuple(self._shard.load(order.job.job(), after=after)))
            self._shard.store_all([job.job() for job in order.jobs], after=after)
        except RequestError as error:
            told = (error.message or str(error))[:_ERROR_CHARS_MAX]
            return Outcome(order.number, error=told, code=error.code, fix=error.fix)
        except KvcachedError as error:
            is_of_device = isinstance(error, DeviceError)
            if is_of_device and not self._device_works():
                raise
            told = f"{type(error).__name__}: {error}"[:_ERROR_CHARS_MAX]
            return Outcome(order.number, error=told, is_of_device=is_of_device)
        return Outcome(order.number)

    def _device_works(self) -> bool:
        return self._marks is not None and self._marks.works()


def mapped(begin: Begin) -> Buffer | ImportedMemory:
    """Map the engine's memory, and its marks; but no memory that the daemon is asked for.

    Raises:
        KvcachedError: it cannot be mapped.
    """
    if begin.device is None:
        return map_sealed(begin.descriptor, begin.memory_bytes, mmap.PROT_READ | mmap.PROT_WRITE)
    from kvcached_client.cuda.imported import ImportedMemory  # noqa: PLC0415 - only memory of a device needs the driver

    imported = ImportedMemory(begin.device.uuid, begin.device.handles, begin.device.marks)
    if begin.descriptor >= 0:
        imported.open(begin.descriptor, begin.memory_bytes)
    return imported


def pages_in(begin: Begin, memory: Buffer | ImportedMemory) -> EnginePages:
    """The engine's pages in memory that is mapped here. Memory that the daemon is asked for is mapped first.

    Raises:
        KvcachedError: the daemon does not give it, or it cannot be mapped.
    """
    if isinstance(memory, ctypes.Array):
        addresses: tuple[int, ...] = (ctypes.addressof(memory),)
    else:
        if begin.device is not None and begin.device.claim is not None:
            memory.open(claimed(begin.device.claim, begin.deadline_ms), begin.memory_bytes)
        addresses = memory.addresses
    layers = tuple(
        LayerPages(addresses[each.part] + each.offset, each.page_bytes, each.stride_bytes) for each in begin.layers
    )
    return EnginePages(layers, begin.blocks, begin.fingerprint, (memory,), begin.device is not None)


def joined(begin: Begin, pages: EnginePages, join: Join, engine: int) -> OffloadShard:
    """Join the session.

    Args:
        begin: what was mapped.
        pages: in that memory.
        join: the session.
        engine: pidfd of the engine.

    Raises:
        KvcachedError: as `OffloadShard.join`.
    """
    is_borrowed = begin.device is not None and bool(begin.device.handles)
    return OffloadShard.join(
        SessionGrant.from_bytes(join.grant),
        begin.shard,
        pages,
        deadline_ms=begin.deadline_ms,
        confirm=(lambda: check_alive(engine)) if is_borrowed else None,
    )


def claimed(claim: PoolClaim, deadline_ms: int) -> int:
    """The descriptor of memory that the daemon keeps for the engine.

    Raises:
        KvcachedError: another try may do better.
        DeviceError: the daemon does not give this memory, nor does one that knows of no such processes.
    """
    try:
        found = claim_pool(claim.run_dir, claim.question, deadline_ms=deadline_ms)
    except BadRequest as error:
        raise DeviceError(f"the daemon lets no process copy for the engine: {error}") from error
    except RequestError as error:
        raise DaemonUnreachable(f"the daemon lets no process copy for the engine now: {error}") from error
    os.close(found.table)
    if found.memory is None or found.claimed.pool != claim.question.pool:
        raise DeviceError("the daemon has given other memory than the engine's")
    return found.memory


def check_alive(engine: int) -> None:
    """Memory that is shared by a handle may be freed, and be another process's, once the engine is dead.

    Raises:
        DeviceError: it is dead.
    """
    if select.select([engine], [], [], 0)[0]:
        raise DeviceError("the engine has died, and its memory may have been freed before it was copied")


def serve(shard: OffloadShard, marks: MarkReader | None, connection: MessageStream, engine: int) -> NoReturn:
    """Take orders until the engine is dead, the session is over, or the daemon is gone."""
    orders = Orders()
    Copying(shard, marks, orders, connection).start()
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
    inherited, parent, errors = map(int, arguments[1:])
    os.dup2(errors, sys.stderr.fileno())
    os.close(errors)
    connection = MessageStream(socket.socket(fileno=inherited))
    try:
        engine = os.pidfd_open(parent)
    except ProcessLookupError:
        return 0  # it is dead
    if os.getppid() != parent:
        return 0  # another process has its id
    messages = _messages(connection, engine)
    try:
        begin = decode_begin(next(messages))
        memory = mapped(begin)
        join = decode_join(next(messages))
        shard = joined(begin, pages_in(begin, memory), join, engine)
    except EOFError:
        return 0  # the engine is gone, or does without
    except KvcachedError as error:
        connection.send(_not_ready(error), None)
        return _NOT_JOINED
    connection.send(Ready(shard.epoch), None)
    serve(shard, None if isinstance(memory, ctypes.Array) else memory.marks, connection, engine)


def _messages(connection: MessageStream, engine: int) -> Iterator[bytes]:
    """Until the engine is dead, though a forked child of it may still have the connection. Then EOFError."""
    poller = select.poll()
    for descriptor in (connection.fileno(), engine):
        poller.register(descriptor, select.POLLIN)
    while {descriptor for descriptor, _ in poller.poll()} == {connection.fileno()}:
        yield from connection.receive(None)
    raise EOFError


def _not_ready(error: KvcachedError) -> NotReady:
    if isinstance(error, RequestError):
        return NotReady(error.code, error.message, error.fix)
    return NotReady(None, str(error), is_of_device=isinstance(error, DeviceError))
