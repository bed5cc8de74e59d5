"""The storage process: ``python -m kvcached.storage.main FD``, with an inherited connection to the daemon.

It does the I/O of the storage tier, so that neither the daemon's loop nor the copies of workers and engines ever wait
for a device. It ends when the daemon closes the connection, or dies.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Final, NoReturn

import msgspec

from kvcached.config.tables import RECORD_NAME
from kvcached.process.seqpacket import wait_packet
from kvcached.storage.backend import (
    DISK,
    SHARED_RECORD_BYTES_MAX,
    Storage,
    StorageGone,
    StorageMisconfigured,
    StorageUnusable,
    Usage,
    open_backend,
)
from kvcached.storage.encryption.backend import EncryptedStorage, read_secret
from kvcached.storage.executor import HostCopies
from kvcached.storage.messages import (
    ERROR_SIZE_CHARS_MAX,
    MESSAGE_SIZE_BYTES_MAX,
    PROGRESS_PER_TIMEOUT,
    Done,
    NotOpened,
    Opened,
    Progress,
    ReadRecord,
    Request,
    StorageConfig,
    WriteRecord,
    decode_config,
    decode_request,
    encode,
)
from kvcached.storage.shared_records import SharedRecords
from kvcached.storage.tiers.backend import TieredStorage
from kvcached.storage.tiers.full_pauses import FullPauses
from kvcached_client.blocks.mapping import map_sealed
from kvcached_client.errors import KvcachedError

_EXIT_STARTUP: Final = 3
#: Where cores are short, whoever answers engines goes first.
NICENESS: Final = 5

_log: Final = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone.

    Returns:
        The exit status: 3 where the backend or the host pool cannot be used; else the process ends by itself.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=int(arguments[1]))
    connection.settimeout(None)
    packet = wait_packet(connection, MESSAGE_SIZE_BYTES_MAX, 2)
    if packet is None:
        return 0
    try:
        config = decode_config(packet.data)
        host, record_memory = packet.descriptors
        memory, record = _map(host, config.host_bytes), _map(record_memory, SHARED_RECORD_BYTES_MAX)
        backend = _open(config)
    except (OSError, ValueError, StorageUnusable, KvcachedError) as error:  # msgspec.DecodeError is a ValueError
        _log.error("%s", error)
        _refuse(connection, error)
        return _EXIT_STARTUP
    records = SharedRecords(record, backend, config.timeout_s)
    pauses = FullPauses() if config.local_disk is None else None
    copies = HostCopies(memory, backend, config.timeout_s, records, pauses)
    return serve(connection, copies, backend, config.timeout_s)


def _map(descriptor: int, size_bytes: int) -> memoryview:
    return memoryview(map_sealed(descriptor, size_bytes, mmap.PROT_READ | mmap.PROT_WRITE)).cast("B")


def _open(config: StorageConfig) -> Storage:
    """Open the backend, behind a local disk if one is configured, and behind encryption if there is a key.

    Raises:
        StorageUnusable: the backend, the disk or the key cannot be used.
    """
    backend = open_backend(config.backend, config.settings)
    if config.local_disk is not None:
        disk = open_backend(DISK, config.local_disk)
        # Of a time when this disk was all of storage. It knows nothing of what others clear in the service from now on.
        Path(config.local_disk["directory"], RECORD_NAME).unlink(missing_ok=True)
        backend = TieredStorage(disk, backend, config.backend)
    if config.key_file:
        backend = EncryptedStorage(backend, read_secret(Path(config.key_file)))
    return backend


def _refuse(connection: socket.socket, error: Exception) -> None:
    """Tell the daemon why there is no storage, so that it need not look for it in a log."""
    reason = _clean(str(error))
    with contextlib.suppress(OSError):  # it is gone, too
        connection.sendmsg([encode(NotOpened(reason=reason, is_misconfigured=isinstance(error, StorageMisconfigured)))])


def _clean(error: str) -> str:
    """A text that can be sent: names of files may be no UTF-8."""
    return error.encode(errors="replace").decode()[:ERROR_SIZE_CHARS_MAX]


def serve(connection: socket.socket, copies: HostCopies, backend: Storage, timeout_s: float) -> NoReturn:
    """Carry out what comes, as many at a time as the backend bears. Does not return."""
    sending = Lock()

    def answer(request: Request) -> None:
        began_ns = told_ns = time.monotonic_ns()

        def progress() -> None:
            nonlocal told_ns
            if (now_ns := time.monotonic_ns()) - told_ns >= timeout_s * 1e9 / PROGRESS_PER_TIMEOUT:
                told_ns = now_ns
                say(Progress(sequence=request.sequence))

        try:
            done = finished(copies.carry_out(request, progress), backend)
        except StorageGone as error:
            _log.error("%s", error)
            with sending:
                _refuse(connection, error)
                os._exit(_EXIT_STARTUP)
        say(msgspec.structs.replace(done, took_us=(time.monotonic_ns() - began_ns) // 1000))

    def say(message: Opened | Progress | Done) -> None:
        with sending:
            try:
                connection.sendmsg([encode(message)])
            except OSError as error:
                _log.info("ending: the daemon is gone: %s", error)
                os._exit(0)  # other threads may be in the middle of a copy, and nobody waits for it

    os.nice(NICENESS)
    capabilities = backend.capabilities
    executor = ThreadPoolExecutor(capabilities.threads, thread_name_prefix="storage")
    records = ThreadPoolExecutor(1, thread_name_prefix="record")  # which must not wait behind a clear of minutes
    say(
        Opened(
            persistent=capabilities.persistent,
            threads=capabilities.threads,
            is_shared=capabilities.is_shared,
            usage=finished(Done(sequence=0), backend).usage,
        )
    )
    while (packet := wait_packet(connection, MESSAGE_SIZE_BYTES_MAX, 1)) is not None:
        request = decode_request(packet.data)
        (records if isinstance(request, ReadRecord | WriteRecord) else executor).submit(answer, request)
    _log.info("ending: the daemon has closed the connection")
    os._exit(0)


def finished(done: Done, backend: Storage) -> Done:
    """An answer that can be sent, with how full the backend is, where it says so. Without one it would seem hung."""
    done = msgspec.structs.replace(done, error=_clean(done.error))
    try:
        usage, trouble = Usage(*backend.usage()), _clean(backend.trouble())
    except Exception as error:  # noqa: BLE001 - a backend may raise anything, and what was ordered is done
        _log.warning("the backend does not report its size: %s", error)
        return done
    return msgspec.structs.replace(done, usage=usage, trouble=trouble)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
