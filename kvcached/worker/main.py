"""The worker process: ``python -m kvcached.worker.main FD NAME``, with an inherited connection and a name for `ps`.

The worker maps a shard's pool and the host pool, both of which belong to the daemon, and carries out the daemon's
requests. It owns no memory. It ends when the daemon sends `Shutdown`, closes the connection or dies.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from typing import Final, NoReturn

from kvcached.process.seqpacket import wait_packet
from kvcached.worker.executor import Serving, Shard
from kvcached.worker.messages import DESCRIPTORS_MAX, MESSAGE_SIZE_BYTES_MAX, decode_config
from kvcached_client.errors import DeviceError

_EXIT_STARTUP: Final = 3

_log: Final = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Serve until the daemon is gone or has sent `Shutdown`.

    Returns:
        The exit status: 3 if the memory does not match the configuration; otherwise the process exits in here.
    """
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    connection = socket.socket(fileno=int(arguments[1]))
    connection.settimeout(None)
    packet = wait_packet(connection, MESSAGE_SIZE_BYTES_MAX, DESCRIPTORS_MAX)
    if packet is None:
        return 0
    try:
        config = decode_config(packet.data)
        shard = Shard(config, packet.descriptors)
    except (OSError, ValueError, DeviceError) as error:  # msgspec.DecodeError is a ValueError
        _log.error("%s", error)
        return _EXIT_STARTUP
    _log.info("worker %s/%d: pool of %d bytes", config.replica, config.shard, config.geometry.size_bytes)
    return serve(Serving(shard, connection))


def serve(serving: Serving) -> NoReturn:
    """Carry out requests. A copy that is under way when the daemon goes away ends with the process."""
    reason = serving.run()
    _log.info("ending: %s", reason)
    logging.shutdown()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main(sys.argv))
