"""Python runs this at its start, in each process of the matrix: daemons and workers follow what is armed later.

Workers copy a few pieces at a time, so that copies have a middle, and are started again without a pause, as often as
need be; the daemon ends a worker that hangs for a few seconds.
"""

# ruff: noqa: PLC0415 - it must cost nothing in other processes
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

#: Longer than a worker is stopped that goes on.
HUNG_AFTER_S = 4.0


def _prepare(folder: Path, arguments: list[str]) -> None:
    if arguments[:2] == ["-m", "kvcached.worker.main"]:
        with suppress(FileNotFoundError):  # which is for one worker only
            os.environ.update(json.loads((folder / "worker").rename(folder / "taken").read_text()))
        from kvcached_client.blocks import copy

        copy.PIECES_MAX = 4  # type: ignore[misc]
        _follow("worker", folder)
    elif arguments[:3] == ["-m", "kvcached", "serve"]:
        from kvcached.worker import client, lifecycle

        lifecycle.FIRST_PAUSE_S = lifecycle.LONGEST_PAUSE_S = 0.01  # type: ignore[misc]
        lifecycle.BREAKER_LOSSES = 1 << 30  # type: ignore[misc]
        client.WorkerPool.__init__.__kwdefaults__["deadline_s"] = HUNG_AFTER_S  # type: ignore[index]
        _follow("daemon", folder)


def _follow(role: str, folder: Path) -> None:
    from tests.cuda.matrix.arming import follow

    follow(role, folder)


if "MATRIX_FOLDER" in os.environ:
    _prepare(Path(os.environ["MATRIX_FOLDER"]), [each for each in sys.orig_argv[1:] if each != "-P"])
