"""Workers that are killed, stopped, or fail at each of their failpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.daemon.conftest import RunningDaemon, pool_stats
from tests.daemon.test_host_tier import worker_of
from tests.faults.cases import WORKER_CASES, Case, parameters
from tests.faults.harness import (
    Armed,
    Engine,
    armed,
    assert_others_go_on,
    assert_sound,
    daemon_with,
    engine_process,
    footprint,
    going_on,
    read_back,
    until,
    wait_footprint,
    wait_nothing_held,
)


@pytest.mark.parametrize(("case", "action", "name"), parameters(WORKER_CASES))
def test_worker_faults(tmp_path: Path, case: Case, action: str, name: str) -> None:
    """Whatever befalls a worker at any step, others go on, its replica serves again, and no byte is wrong."""
    faults = armed(tmp_path, case.failpoint, action, case.at)
    befalls: dict[str, Callable[[RunningDaemon, Engine, Armed], None]] = {
        "kill": lost,
        "stop": stopped,
        # Nothing can be said about a command whose ack cannot be sent: the worker ends.
        "raise": lost if case.failpoint == "worker.ack" else failed,
    }
    with daemon_with(tmp_path, faults) as daemon:
        before = footprint(daemon.process.pid)
        with engine_process(case.kind, daemon.run_dir, tmp_path / "record") as engine:
            befalls[action](daemon, engine, faults)
            assert engine.ask(f"again {name}") == "done 4"
            assert engine.ask("end") == "ended"
        wait_nothing_held(daemon.run_dir)
        assert read_back("managed", daemon.run_dir, ["a", name])[1] == 4
        assert_sound(daemon.run_dir)
        wait_nothing_held(daemon.run_dir)
        wait_footprint(daemon.process.pid, before)
    assert faults.reached() == [case.failpoint]


def lost(daemon: RunningDaemon, engine: Engine, faults: Armed) -> None:
    """The replica goes on in the same memory, and so does its engine; meanwhile everybody is answered."""
    epoch = pool_stats(daemon.run_dir).epoch
    engine.say("work a")
    faults.wait()
    assert_others_go_on(daemon.run_dir, ["o"])
    assert engine.hear() in {f"done {hits}" for hits in range(5)}
    until(lambda: pool_stats(daemon.run_dir).healthy, "no next worker")
    assert pool_stats(daemon.run_dir).epoch == epoch


def stopped(daemon: RunningDaemon, engine: Engine, faults: Armed) -> None:
    """Whoever waits for it waits; when it goes on, so do they."""
    engine.say("work a")
    faults.wait()
    with going_on(worker_of(daemon)):
        assert_others_go_on(daemon.run_dir, ["o"])
    assert engine.hear() == "done 4"


def failed(daemon: RunningDaemon, engine: Engine, _: Armed) -> None:
    """A command fails and the worker lives: the hit is shorter, or there is none."""
    epoch = pool_stats(daemon.run_dir).epoch
    assert engine.ask("work a") in {f"done {hits}" for hits in range(5)}
    assert_others_go_on(daemon.run_dir, ["o"])
    assert pool_stats(daemon.run_dir).epoch == epoch
