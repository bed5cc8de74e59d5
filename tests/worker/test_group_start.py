"""How a group of workers starts and stops, and what is left of one that could not."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from kvcached.worker.group import ReplicaPool
from kvcached.worker.messages import Probe
from kvcached_client.errors import BadRequest, DaemonFailure, ErrorCode
from kvcached_client.types import ShardIndex
from tests.worker.groups import (
    NAMESPACE,
    SLOTS,
    Losses,
    RunLoop,
    names_in,
    open_descriptors,
    process_exists,
    running,
    tiny_pool,
    workers_of,
)

SHARD_0, SHARD_1 = ShardIndex(0), ShardIndex(1)
COMMAND = "kvcached.worker.group.WORKER_COMMAND"
PROBE = Probe(source=0, target=1, seed=3)


def program(text: str) -> tuple[str, ...]:
    return (sys.executable, "-c", text)


def test_start_fails_when_a_worker_is_never_ready(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that says nothing is a start failure after the deadline, and the message ends with its log."""
    monkeypatch.setattr(
        COMMAND,
        program(
            "import sys; print('pondering', flush=True); sys.stdin = open(0); input_fd = int"
            "(sys.argv[1]); import signal; signal.pause()"
        ),
    )

    async def main() -> None:
        workers = workers_of(tiny_pool(ready_deadline_s=1), run_dir, Losses().note)
        with pytest.raises(DaemonFailure) as caught:
            await workers.open()

        assert caught.value.code is ErrorCode.DEADLINE
        assert "worker default/0 was not ready within 1 s" in caught.value.message
        assert "worker_ready_deadline_ms" in caught.value.fix
        assert caught.value.message.endswith("ends:\npondering")

    run(main())


def test_start_fails_when_a_worker_ends(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that ends before it is ready is a start failure at once, with its status and 20 lines of log."""
    monkeypatch.setattr(COMMAND, program("[print('line', i) for i in range(50)]; raise SystemExit(7)"))

    async def main() -> None:
        workers = workers_of(tiny_pool(), run_dir, Losses().note)
        with pytest.raises(DaemonFailure, match="default/0 ended with status 7 before it was ready") as caught:
            await workers.open()

        assert caught.value.message.splitlines()[1:] == [f"line {number}" for number in range(30, 50)]

    run(main())


def test_start_failure_tells_nothing_of_earlier_runs(
    run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is appended to, but an error shows what this run wrote."""
    Path(f"{run_dir}/worker-default-0.log").write_text("an old story\n")
    monkeypatch.setattr(COMMAND, program("raise SystemExit(7)"))

    async def main() -> None:
        workers = workers_of(tiny_pool(), run_dir, Losses().note)
        with pytest.raises(DaemonFailure, match="is empty"):
            await workers.open()

    run(main())
    assert Path(f"{run_dir}/worker-default-0.log").read_text() == "an old story\n"


def test_start_failure_of_one_ends_the_others(run: RunLoop, run_dir: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """When one of several workers cannot start, none is left: no process, no descriptor."""
    # The second worker finds its lock's place taken by a directory.
    Path(f"{run_dir}/worker-default-1.lock").mkdir()
    pool, losses = tiny_pool(2), Losses()
    before = open_descriptors()

    async def main() -> None:
        within = open_descriptors()
        workers = workers_of(pool, run_dir, losses.note)
        with pytest.raises(DaemonFailure, match=r"default/1 cannot be started: .*Is a directory"):
            await workers.open()

        assert open_descriptors() == within
        assert not process_exists(workers.pid(SHARD_0))

    run(main())
    assert open_descriptors() == before
    assert not losses.reasons
    assert names_in(run_dir) == ["worker-default-0.lock", "worker-default-0.log", "worker-default-1.lock"]


@pytest.mark.parametrize("name", ["../up", "", "a/b", ".hidden", "a" * 65, "a b"])
def test_start_refuses_names_that_are_no_file_names(run: RunLoop, run_dir: str, name: str) -> None:
    """A replica's name becomes part of paths, so that only plain names are taken."""

    async def main() -> None:
        with pytest.raises(BadRequest, match="replica name"):
            await workers_of(ReplicaPool(name, tiny_pool().layout, SLOTS, NAMESPACE, ()), run_dir, Losses().note).open()

    run(main())


def test_stop_leaves_logs_and_locks_only(run: RunLoop, run_dir: str) -> None:
    """After a stop no process and no descriptor is left, no loss is told, and a second stop does nothing."""
    losses = Losses()

    async def main() -> None:
        pool = tiny_pool(2)
        before = open_descriptors()
        workers = workers_of(pool, run_dir, losses.note)
        await workers.open()
        under_way = workers.submit(PROBE)
        await workers.close()
        await workers.close()

        assert under_way.done()
        assert under_way.exception() is None
        assert open_descriptors() == before
        with pytest.raises(DaemonFailure):
            workers.submit(PROBE)

    run(main())
    assert not losses.reasons
    assert names_in(run_dir) == [f"worker-default-{shard}.{kind}" for shard in (0, 1) for kind in ("lock", "log")]


def test_stop_kills_a_worker_that_does_not_react(run: RunLoop, run_dir: str) -> None:
    """A stopped process ignores messages and SIGTERM; the stop ends it all the same and fails what it had not done."""

    async def main() -> None:
        workers = workers_of(tiny_pool(), run_dir, Losses().note)
        await workers.open()
        os.kill(workers.pid(SHARD_0), signal.SIGSTOP)
        under_way = workers.submit(PROBE)
        await workers.close(0.2)

        assert not process_exists(workers.pid(SHARD_0))
        with pytest.raises(DaemonFailure):
            await under_way

    run(main())


def test_group_workers_have_a_session_of_their_own(run: RunLoop, run_dir: str) -> None:
    """A Ctrl-C at the daemon's terminal does not reach the workers."""

    async def main() -> None:
        async with running(tiny_pool(), run_dir) as (workers, _):
            assert os.getsid(workers.pid(SHARD_0)) == workers.pid(SHARD_0)

    run(main())
