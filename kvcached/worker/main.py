"""The worker process: ``python -m kvcached.worker.main FD NAME``, with an inherited connection and a name for `ps`.

It holds one shard's pool and maps the host pool, listens on a socket of its own, and carries out the daemon's commands.
It ends when the daemon says so. When the daemon dies, or closes the connection, it keeps its memory for the next one,
for as long as its configuration says.
"""

from __future__ import annotations

import logging
import socket
import sys
from pathlib import Path
from typing import Final

from kvcached.seqpacket import listen, receive, send
from kvcached.worker.available import NotEnoughMemory
from kvcached.worker.keeper import serve_at
from kvcached.worker.messages import (
    MESSAGE_SIZE_BYTES_MAX,
    WorkerConfig,
    WorkerListening,
    decode_config,
    encode,
)
from kvcached.worker.serving import DaemonGone
from kvcached.worker.shard import Shard

_EXIT_STARTUP: Final = 3
#: One daemon connects; room for one more, which waits to be refused, or for its turn.
_BACKLOG: Final = 2

_log: Final = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run until no daemon needs this worker any more.

    Returns:
        The exit status: 0, or 3 where the pool or the socket could not be made, or the host pool is not usable.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    control = socket.socket(fileno=int(arguments[1]))
    config, descriptors = _read_config(control)
    try:
        shard = Shard(config, descriptors)
        # Left over from a worker that was killed, or is about to end: this daemon has the run directory to itself.
        Path(config.socket_path).unlink(missing_ok=True)
        listener = listen(config.socket_path, _BACKLOG)
    except (NotEnoughMemory, OSError, ValueError) as error:
        _log.error("%s", error)
        return _EXIT_STARTUP
    _log.info("worker %s/%d: pool of %d bytes", config.replica, config.shard, config.geometry.size_bytes)
    try:
        send(control, encode(WorkerListening()))
    except OSError as error:
        _log.info("ending: the daemon is gone: %s", error)
        return 0
    control.close()
    serve_at(shard, config, listener)
    return 0


def _read_config(control: socket.socket) -> tuple[WorkerConfig, list[int]]:
    packet = receive(control, MESSAGE_SIZE_BYTES_MAX, 1)
    if packet is None:
        raise DaemonGone("the daemon sent no configuration")
    return decode_config(packet.data), packet.descriptors


if __name__ == "__main__":
    sys.exit(main(sys.argv))
