from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kvcached.process.earlier import end_earlier, name_holder, take_lock
from kvcached.process.identity import PID_MAX


def test_holder_that_cannot_be_seen_is_not_taken_for_dead(tmp_path: Path) -> None:
    """A lock that is held by a process of another pid namespace stops the start; once it is released, nothing does."""
    path = tmp_path / "worker.lock"
    lock = take_lock(str(path))
    name_holder(lock, PID_MAX)

    with pytest.raises(OSError, match="not visible in this pid namespace"):
        asyncio.run(end_earlier(path, "kvcached.worker.main", 1))
    os.close(lock)

    asyncio.run(end_earlier(path, "kvcached.worker.main", 1))
