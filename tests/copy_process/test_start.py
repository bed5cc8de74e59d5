"""How an engine starts its copy process, without a daemon."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvcached_client import BadRequest, CopyProcess, EngineMemory, EnginePages
from kvcached_client.blocks.mapping import SEALS
from kvcached_client.copy_process.start import started

#: Closes descriptors, starts a copy process, writes to stderr, and hangs up. The process ends when it sees that.
ENGINE = """
import os, sys
report = os.dup(1)
for descriptor in map(int, sys.argv[1:]):
    os.close(descriptor)
from kvcached_client.blocks.mapping import SEALS
from kvcached_client.copy_process.start import started
made = started(())
is_beyond = min(made.stream.fileno(), made.said) > 2
closed = []
for descriptor in range(3):
    try:
        os.fstat(descriptor)
    except OSError:
        closed.append(str(descriptor))
made.stream.close()
status = made.process.wait(30)
os.write(report, f"{is_beyond} {' '.join(closed)} {status} {made.take_last_words()!r}".encode())
"""


@pytest.mark.parametrize("closed", ["2", "0", "1 2", "0 1 2"])
def test_connection_is_no_standard_descriptor(closed: str) -> None:
    """With stdin, stdout or stderr closed, an engine does not get the connection there, and they stay closed."""
    done = subprocess.run(
        [sys.executable, "-c", ENGINE, *closed.split()], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.stderr) == (f"True {closed} 0 ''", "")


def _descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir()}


def _children() -> str:
    return Path(f"/proc/self/task/{os.getpid()}/children").read_text()


def _nothing_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/no/such/interpreter")


def _no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> int:
        raise OSError

    monkeypatch.setattr(os, "memfd_create", fail)


@pytest.mark.parametrize("fault", [_nothing_can_be_started, _no_memory])
def test_start_that_fails_keeps_no_descriptor(
    fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that cannot start a copy process, and tries again and again, does not run out of descriptors."""
    fault(monkeypatch)
    before, error = _descriptors(), None
    try:
        started(())
    except OSError as raised:
        error = raised  # with what the frames of its traceback hold
    assert error is not None
    assert _descriptors() == before


def _memory(size_bytes: int, seals: int) -> int:
    descriptor = os.memfd_create("kv", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size_bytes)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: os.eventfd(0), "it cannot carry seals"),
        (lambda: _memory(8192, fcntl.F_SEAL_GROW), "seals 0x4 lack some of 0x7"),
        (lambda: _memory(4096, SEALS), "4096 bytes, at least 8192 are needed"),
    ],
)
def test_memory_that_is_not_sealed_is_the_callers_mistake(make: Callable[[], int], why: str) -> None:
    """An engine whose own memory can change its size is told so, and how to make it, before a process is started."""
    descriptor, before, array = make(), _children(), np.zeros((8, 1024), np.uint8)
    pages = EnginePages.of_tensors({"layer": array})
    with pytest.raises(BadRequest, match=why) as refused:
        CopyProcess.prepare(0, pages, EngineMemory(descriptor, array.ctypes.data, array.nbytes))
    assert "MFD_ALLOW_SEALING" in refused.value.fix
    assert _children() == before
    os.close(descriptor)
