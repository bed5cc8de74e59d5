"""How an engine starts its copy process: a process of this interpreter that has one end of a connection."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from typing import Final

from kvcached_client.copy_process.messages import MessageStream

MODULE: Final = "kvcached_client.copy_process"


def started(descriptors: Sequence[int]) -> tuple[subprocess.Popen[bytes], MessageStream]:
    """A copy process that inherits descriptors, and the connection to it.

    Raises:
        OSError: it cannot be started.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        try:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), *descriptors),
                start_new_session=True,  # Ctrl-C at the terminal is for the engine
            )
        except BaseException:
            ours.close()
            raise
    return process, MessageStream(ours)
