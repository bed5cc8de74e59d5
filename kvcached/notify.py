"""Talks to the service manager: systemd's datagram protocol, which tests and the demo speak too.

The manager names its socket in ``$NOTIFY_SOCKET``; a leading ``@`` stands for an abstract one.
"""

from __future__ import annotations

import logging
import os
import socket
from array import array
from typing import Final

VARIABLE: Final = "NOTIFY_SOCKET"
READY: Final = "READY=1"
STOPPING: Final = "STOPPING=1"

_log: Final = logging.getLogger(__name__)


def notify(state: str, descriptors: tuple[int, ...] = ()) -> bool:
    """Send `state`, and descriptors with it, to whoever waits for it. Does nothing where nobody asked.

    A manager that cannot be reached is logged and no reason to stop: it decides by itself what a missing message means.

    Returns:
        Whether it was sent. Nobody says whether it was understood.
    """
    address = os.environ.get(VARIABLE, "")
    if not address:
        return False
    if address.startswith("@"):
        address = "\0" + address[1:]
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        try:
            sender.sendmsg([state.encode()], ancillary, 0, address)
        except OSError as error:
            _log.warning("%s not sent to %s: %s", state.replace("\n", " "), VARIABLE, error)
            return False
    return True
