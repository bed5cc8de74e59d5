"""``python -m kvcached``, and what the command ``kvcached`` starts.

Imports nothing but the standard library at first, so that Ctrl-C ends it in order from its first moment on.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import signal
import sys
from types import FrameType
from typing import Final, cast


def run() -> None:
    """Run the command line. SIGINT ends it with status 130 and without a traceback, wherever it is."""
    _open_missing_streams()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _told(sys.stdout)
    signal.signal(signal.SIGINT, _end)
    os.environ.setdefault(_BLAS_THREADS, "1")
    from kvcached.cli.main import main  # noqa: PLC0415 - takes a tenth of a second, in which Ctrl-C may come
    from kvcached.cli.options import ExitCode, fail  # noqa: PLC0415 - as above

    try:
        main()
    except _OutputLost as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the exit tries to write the rest
        if error.has_no_reader:
            sys.exit(ExitCode.NO_READER)
        fail(ExitCode.USAGE, f"the output cannot be written: {error}")


#: NumPy's library for matrices reads it when it is loaded, and starts a thread for each core without it, up to 64. Here
#: nothing multiplies matrices. Workers and the storage process inherit it: a unit's TasksMax= counts all their threads.
_BLAS_THREADS: Final = "OPENBLAS_NUM_THREADS"

#: What pictures are drawn with, where an encoding has no such characters: bars, heights, and a gap between heights.
_PLAIN: Final = dict(zip("█░▁▂▃▄▅▆▇·", "#-1234567.", strict=True))


def _in_plain(error: UnicodeError) -> tuple[str, int]:
    """For `codecs.register_error`. What cannot be drawn in another way, as names, becomes question marks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(_PLAIN.get(each, "?") for each in error.object[error.start : error.end]), error.end


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
    """The same stream, with an error of its own, and with a stand-in for every character that its encoding lacks."""
    codecs.register_error("kvcached.plain", _in_plain)
    is_short = codecs.lookup(stdout.encoding).name != "utf-8" and stdout.errors in {"strict", "surrogateescape"}
    return io.TextIOWrapper(
        io.BufferedWriter(_Stdout(stdout.fileno(), "w", closefd=False)),
        stdout.encoding,
        "kvcached.plain" if is_short else stdout.errors,
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
