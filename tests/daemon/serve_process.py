"""`kvcached`, whose readiness is a line on stdout: a daemon of another user may not reach the test's socket."""

from __future__ import annotations

import os

import pytest

from kvcached.cli.main import main as command
from kvcached.recovery.watchdog import Pings
from tests.line_process import say


def main() -> None:
    """Run the command line of this process."""
    os.environ.pop("NOTIFY_SOCKET", None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Pings, "ready", lambda _: say("ready"))
        command()


if __name__ == "__main__":
    main()
