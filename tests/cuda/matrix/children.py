"""Engines as forked children of the runner, which has all they need imported and never calls the driver itself."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Final

import cuda.bindings.driver  # type: ignore[import-untyped] # noqa: F401 - in the runner, so that no child has to

from kvcached_client.errors import KvcachedError
from tests.cuda.matrix.arming import follow
from tests.cuda.matrix.engines import ENGINES, MatrixEngine
from tests.cuda_driver.build import LIBRARY

#: A request that has no answer by then never gets one.
PATIENCE_S: Final = 30.0
_LINE_BYTES_MAX: Final = 4096
_PR_SET_PDEATHSIG: Final = 1


class Unanswered(Exception):
    """A request has got no answer in time."""


class Child:
    """An engine's process. It answers each line with one.

    Attributes:
        said: what it said when it was ready: "ready", or why it is not.
        asked: requests so far.
    """

    def __init__(self, kind: str, run_dir: Path, folder: Path, driver: Mapping[str, str]) -> None:
        self._link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            _run(lambda: _serve(kind, run_dir, folder, theirs, driver), folder)
        theirs.close()
        self._is_buried = False
        self.asked = 0

    def ask(self, line: str, event: int | None = None, on_event: Callable[[], None] | None = None) -> str:
        """The answer; "" if the process has ended. `on_event` is called when a descriptor has something to read.

        Raises:
            Unanswered: it has not answered in time.
        """
        self.asked += 1
        try:
            self._link.send(line.encode())
        except OSError:
            return ""
        return self.hear(event, on_event)

    def hear(self, event: int | None = None, on_event: Callable[[], None] | None = None) -> str:
        """The next line."""
        until_s = time.monotonic() + PATIENCE_S
        watched: list[socket.socket | int] = [self._link] if event is None else [self._link, event]
        while (left_s := until_s - time.monotonic()) > 0:
            readable, _, _ = select.select(watched, [], [], left_s)
            if event in readable and on_event is not None:
                on_event()
            if self._link in readable:
                try:
                    return self._link.recv(_LINE_BYTES_MAX).decode()
                except ConnectionResetError:  # it has ended with a line unread
                    return ""
        raise Unanswered(f"engine {self.pid}")

    def kill(self) -> None:
        """SIGKILL, in whatever state it is; returns when it is dead."""
        if not self._is_buried:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
            self._is_buried = True
        self._link.close()


def _run(work: Callable[[], None], folder: Path) -> None:
    status = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        log = os.open(folder / "engines.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work()
        status = 0
    except BaseException:  # noqa: BLE001 - the process ends here
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def _serve(kind: str, run_dir: Path, folder: Path, link: socket.socket, driver: Mapping[str, str]) -> None:
    os.environ.update(driver)
    ctypes.CDLL(str(Path(os.environ["LD_LIBRARY_PATH"]) / LIBRARY))  # the loader does not look into the variable again
    follow("engine", folder)
    made: list[MatrixEngine] = []

    def make() -> str:
        made.append(ENGINES[kind](str(run_dir)))
        return "ready"

    link.send(_outcome(make).encode())
    while line := link.recv(_LINE_BYTES_MAX).decode():
        command, number = line.split()
        link.send(_outcome(partial(getattr(made[0], command), int(number))).encode())


def _outcome(action: Callable[[], str]) -> str:
    """What an action returns, or how it failed: ``refused`` by an error of the SDK, or ``crashed``."""
    try:
        return action()
    except KvcachedError as error:
        return f"refused {type(error).__name__}: {error}"[:_LINE_BYTES_MAX]
    except Exception as error:  # noqa: BLE001 - the runner judges it
        traceback.print_exc()
        return f"crashed {type(error).__name__}: {error}"[:_LINE_BYTES_MAX]
