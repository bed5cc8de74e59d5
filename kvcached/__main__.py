"""``python -m kvcached``, and what the command ``kvcached`` starts.

Imports nothing but the standard library at first, so that Ctrl-C ends it in order from its first moment on.
"""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import cast


def run() -> None:
    """Run the command line. SIGINT ends it with status 130 and without a traceback, wherever it is."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _told(sys.stdout)
    signal.signal(signal.SIGINT, _end)
    from kvcached.cli.main import main  # noqa: PLC0415 - takes a tenth of a second, in which Ctrl-C may come
    from kvcached.cli.options import ExitCode, fail  # noqa: PLC0415 - as above

    try:
        main()
    except _OutputLost as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit tries to write the rest
        if error.has_no_reader:
            sys.exit(ExitCode.NO_READER)
        fail(ExitCode.USAGE, f"the output cannot be written: {error}")


class _OutputLost(Exception):
    """What a command prints could not be written.

    No `OSError`: commands expect these of other files, and click and rich end a program whose reader has gone with 1,
    which here would mean that a problem was found.
    """

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.has_no_reader = error.errno == errno.EPIPE


class _Stdout(io.FileIO):
    def write(self, data: object, /) -> int:
        try:
            return super().write(cast("bytes", data))
        except OSError as error:
            raise _OutputLost(error) from error


def _told(stdout: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, with an error of its own."""
    return io.TextIOWrapper(
        io.BufferedWriter(_Stdout(stdout.fileno(), "w", closefd=False)),
        stdout.encoding,
        stdout.errors,
        line_buffering=stdout.line_buffering,
        write_through=stdout.write_through,
    )


def _open_missing_streams() -> None:
    """Put /dev/null where stdin, stdout or stderr was closed by whoever started this.

    Otherwise the next files that are opened get these numbers: logs would go into a socket, and libuv aborts when it
    has to close one of them.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel gives the lowest number that is free, which is this one
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115 - open until the process ends
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def _end(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)


if __name__ == "__main__":
    run()
