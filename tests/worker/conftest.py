from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest
import uvloop

from tests.worker.groups import MADE, RunLoop


@pytest.fixture(
    params=[
        pytest.param(asyncio.new_event_loop, id="asyncio", marks=pytest.mark.slow),
        pytest.param(uvloop.new_event_loop, id="uvloop"),
    ]
)
def run(request: pytest.FixtureRequest) -> RunLoop:
    """Runs a coroutine to its end: on the daemon's kind of event loop, and as a slow test on the plain one."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = request.param

    def run_to_end(main: Coroutine[Any, Any, None]) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(main)

    return run_to_end


@pytest.fixture(autouse=True)
def _close_memory() -> Iterator[None]:
    """Pools of a test give their memory back after it."""
    yield
    while MADE:
        MADE.pop().close()


@pytest.fixture
def run_dir() -> Iterator[str]:
    """An empty directory with a short path, as sockets need it."""
    with tempfile.TemporaryDirectory(prefix="kvc") as path:
        yield path
