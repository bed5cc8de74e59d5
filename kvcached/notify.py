"""Tells the service manager how far the daemon is: systemd's datagram protocol, which tests and the demo speak too.

The manager names its socket in ``$NOTIFY_SOCKET``; a leading ``@`` stands for an abstract one.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

_log: Final = logging.getLogger(__name__)


def notify(state: str) -> None:
    """Send `state` to whoever waits for it. Does nothing where nobody asked.

    A manager that cannot be reached is logged and no reason to stop: it decides by itself what a missing message means.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return
    if address.startswith("@"):
        address = "\0" + address[1:]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendto(state.encode(), address)
        except OSError as error:
            _log.warning("%s not sent to %s: %s", state, VARIABLE, error)
