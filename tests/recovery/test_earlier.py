from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kvcached.process import earlier
from kvcached.process.earlier import end_earlier, name_holder, take_lock
from kvcached.process.identity import PID_MAX
from tests.unkillable import unkillable


def test_holder_that_cannot_be_seen_is_not_taken_for_dead(tmp_path: Path) -> None:
    """A lock that is held by a process of another pid namespace stops the start; once it is released, nothing does."""
    path = tmp_path / "worker.lock"
    lock = take_lock(str(path))
    name_holder(lock, PID_MAX)

    with pytest.raises(OSError, match="not visible in this pid namespace"):
        asyncio.run(end_earlier(path, "kvcached.worker.main"))
    os.close(lock)

    asyncio.run(end_earlier(path, "kvcached.worker.main"))


def test_holder_that_cannot_be_killed_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A process that SIGKILL does not end makes no start fail: it is waited for, and named in the log now and then."""
    monkeypatch.setattr(earlier, "_NAMED_AFTER_S", 0.05)
    monkeypatch.setattr(earlier, "_NAMED_EVERY_S", 0.05)
    path = tmp_path / "worker.lock"
    lock = take_lock(str(path))
    command = [sys.executable, "-c", "import time; time.sleep(1000)", "kvcached.worker.main"]
    with subprocess.Popen(command, pass_fds=(lock,)) as holder:
        name_holder(lock, holder.pid)
        os.close(lock)

        async def start() -> None:
            async with asyncio.timeout(10):
                with unkillable(holder.pid):
                    ending = asyncio.create_task(end_earlier(path, "kvcached.worker.main"))
                    await asyncio.sleep(0.5)
                    assert not ending.done()
                    named = f"process {holder.pid} of an earlier daemon, which holds worker.lock"
                    assert caplog.text.count(named) >= 2
                await ending
            os.close(take_lock(str(path)))

        asyncio.run(start())
        assert holder.wait() == -signal.SIGKILL


@pytest.mark.parametrize("content", ["a poem\n", "1" * 21], ids=["text", "long"])
def test_file_that_is_no_lock_keeps_its_content(tmp_path: Path, content: str) -> None:
    """A file that holds something else than a process id is not emptied, and stays free for its owner's own locks."""
    path = tmp_path / "poem.lock"
    path.write_text(content)

    for _ in range(2):
        with pytest.raises(OSError, match="holds something else than a process id; move it away, or name another"):
            take_lock(str(path))

    assert path.read_text() == content


@pytest.mark.parametrize("content", ["", "4194304\n", "\0" * 8], ids=["empty", "dead", "crash"])
def test_lock_of_a_dead_process_is_taken(tmp_path: Path, content: str) -> None:
    """A lock whose holder is dead is taken and emptied, whatever the holder or a crash of the machine has left."""
    path = tmp_path / "worker.lock"
    path.write_text(content)

    os.close(take_lock(str(path)))

    assert path.read_text() == ""
