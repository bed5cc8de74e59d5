"""A prompt that one engine is storing while another asks for it, with real processes: computed once, loaded exactly."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin, DaemonUnreachable
from kvcached_client.prefetch import PendingPrefetch
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, keys_of
from tests.daemon.test_offload import Engine, Processes, children_of, config, engine_on, is_sound, kill

BLOCKS = 12
#: Far above what the test waits for.
DEADLINE_MS = 20_000


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon without storage."""
    with started(tmp_path, config()) as running:
        yield running


@pytest.fixture
def processes(daemon: RunningDaemon) -> Iterator[Processes]:
    with children_of(daemon) as made:
        yield made


def begin_wait(engine: Engine, blocks: int = BLOCKS) -> PendingPrefetch:
    """An engine waits for a prompt."""
    keys, tokens = keys_of("a", blocks), blocks * BLOCK_SIZE
    return engine.scheduler.client.begin_prefetch(
        keys, tokens, stop="wait_complete", deadline_ms=DEADLINE_MS, full=True
    )


def test_prompt_is_computed_once(daemon: RunningDaemon, processes: Processes) -> None:
    """An engine that asks while another one stores waits for the store, and loads what that has computed."""
    writer, _ = processes.scheduler(0, 1)
    with engine_on(daemon) as reader:
        writer.ask(f"prepare a {BLOCKS}")
        held = reader.scheduler.acquire("a", BLOCKS)
        assert (held.hit, held.filling) == (0, BLOCKS)
        reader.scheduler.client.release(held.lease)
        waiting = begin_wait(reader)
        assert [writer.ask("copy"), writer.hear()] == ["begins", "done"]

        assert waiting.result() == (BLOCKS, 0, True, "stored")
        assert reader.load("a", BLOCKS) == BLOCKS
    with Admin.connect(daemon.run_dir) as admin:
        counters = admin.stats().counters
    assert (counters["stored_blocks"], counters["store_waits"]) == (BLOCKS, 1)
    assert is_sound(daemon)


def test_death_of_the_storing_engine_ends_the_wait(daemon: RunningDaemon, processes: Processes) -> None:
    """SIGKILL of the engine that stores: within a second the waiter has the hit that there is, and its bytes."""
    writer, _ = processes.scheduler(0, 1)
    writer.ask("prepare a 4")
    assert [writer.ask("copy"), writer.hear()] == ["begins", "done"]
    writer.ask(f"prepare a {BLOCKS}")
    with engine_on(daemon) as reader:
        waiting = begin_wait(reader)
        assert reader.scheduler.hit("a", BLOCKS) == 4
        kill(writer)
        killed_at = time.monotonic()

        assert waiting.result() == (4, 0, True, "failed")
        assert time.monotonic() - killed_at <= 1
        assert reader.load("a", BLOCKS) == 4
    assert is_sound(daemon)


def test_death_of_the_daemon_ends_the_wait(daemon: RunningDaemon, processes: Processes) -> None:
    """SIGKILL of the daemon: who waits is told so at once, and computes."""
    writer, _ = processes.scheduler(0, 1)
    writer.ask(f"prepare a {BLOCKS}")
    with engine_on(daemon) as reader:
        waiting = begin_wait(reader)
        reader.scheduler.hit("a", BLOCKS)  # the wait has arrived before this
        daemon.process.kill()
        killed_at = time.monotonic()

        with pytest.raises(DaemonUnreachable):
            waiting.result()
        assert time.monotonic() - killed_at <= 2
