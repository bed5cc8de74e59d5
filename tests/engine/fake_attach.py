"""The attach socket without a daemon: hands every shard that joins sealed memory and a progress page of its own."""

from __future__ import annotations

import fcntl
import os
import socket
import struct
import threading
from pathlib import Path

from kvcached_client.blocks.layout import Layout
from kvcached_client.blocks.progress import ENTRY_SIZE_BYTES, PAGE_SIZE_BYTES
from kvcached_client.protocol.attach import (
    ATTACH_MESSAGE_SIZE_BYTES_MAX,
    Join,
    Joined,
    decode_attach_request,
    encode_attach,
)
from kvcached_client.protocol.engine import LoadTicket
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME
from kvcached_client.types import PROGRESS_SLOTS

_ENTRY = struct.Struct("<QII")  # transfer, layers done, state


class FakeAttachServer:
    """Serves joins in `run_dir` until `close`; keeps the connections open as the daemon does."""

    def __init__(self, run_dir: Path, layout: Layout, slots: int) -> None:
        self.grant = SessionGrant(id=1, token=bytes(32), run_dir=str(run_dir))
        self._layout = layout
        self._slots = slots
        self._connections: list[socket.socket] = []
        self._memory = [_sealed_memory(layout.pool_bytes(slots)) for _ in range(layout.shards)]
        self._progress = [_sealed_memory(PAGE_SIZE_BYTES) for _ in range(layout.shards)]
        self._events = [os.eventfd(0) for _ in range(PROGRESS_SLOTS)]
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(run_dir / ATTACH_SOCKET_NAME))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        for each in (self._listener, *self._connections):
            each.close()
        for descriptor in (*self._memory, *self._progress, *self._events):
            os.close(descriptor)

    def tell(self, shard: int, ticket: LoadTicket, state: int) -> None:
        """Write an entry of a shard's progress page. Nobody is woken: the load is over before it is waited for."""
        entry = _ENTRY.pack(ticket.transfer, 0, state)
        os.pwrite(self._progress[shard], entry, ticket.progress * ENTRY_SIZE_BYTES)

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self._connections.append(connection)
            data, descriptors, _, _ = socket.recv_fds(connection, ATTACH_MESSAGE_SIZE_BYTES_MAX, 2)
            for descriptor in descriptors:
                os.close(descriptor)
            request = decode_attach_request(data)
            assert isinstance(request, Join)
            joined = Joined(
                kind="memfd", shard=request.shard, epoch=1, layout=self._layout, slots=self._slots,
                pool_bytes=self._layout.pool_bytes(self._slots),
            )  # fmt: skip
            descriptors = [self._memory[request.shard], self._progress[request.shard], *self._events]
            socket.send_fds(connection, [encode_attach(joined)], descriptors)


def _sealed_memory(size_bytes: int) -> int:
    descriptor = os.memfd_create("pool", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor
