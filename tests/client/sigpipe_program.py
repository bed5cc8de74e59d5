"""A client in a process that SIGPIPE kills, see `test_sigpipe`."""

from __future__ import annotations

import signal
import sys

from kvcached_client import Client
from tests.line_process import serve


class Program:
    """Its commands."""

    def __init__(self, run_dir: str, *, heartbeat: bool) -> None:
        self._client = Client.connect(run_dir, heartbeat=heartbeat)

    def match(self) -> int:
        return self._client.match(self._client.chain(range(8)))

    def close(self) -> None:
        self._client.close()


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    serve(Program(sys.argv[1], heartbeat=sys.argv[2] == "True"))
