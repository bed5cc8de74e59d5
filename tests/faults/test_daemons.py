"""Daemons that are killed, stopped, or fail at each of their failpoints."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.errors import DaemonUnreachable, KvcachedError
from tests.daemon.conftest import RunningDaemon
from tests.faults.cases import DAEMON_CASES, RENEWAL_CASES, SLEEP_CASES, SUPERVISED_CASES, Case, parameters
from tests.faults.engine import OFFLOAD_BLOCKS, ManagedEngine, OffloadEngine
from tests.faults.harness import (
    PATIENCE_S,
    PROMISE_S,
    Armed,
    Engine,
    armed,
    assert_others_go_on,
    assert_sound,
    daemon_with,
    engine_process,
    footprint,
    going_on,
    put_to_sleep,
    read_back,
    stats_of,
    until,
    wait_footprint,
    wait_nothing_held,
)


@pytest.mark.parametrize(("case", "action", "name"), parameters(DAEMON_CASES))
def test_daemon_faults(tmp_path: Path, case: Case, action: str, name: str) -> None:
    """Whatever befalls the daemon at any step, no engine hangs, and each goes on with it or with the next one."""
    faults = armed(tmp_path, case.failpoint, action, case.at)
    befalls: dict[str, Callable[[RunningDaemon, Engine, Armed], None]] = {
        "kill": killed,
        "stop": stopped,
        "raise": failed,
    }
    with engine_process(case.kind, tmp_path / "run", tmp_path / "record") as engine:
        with daemon_with(tmp_path, faults) as daemon:
            before = footprint(daemon.process.pid)
            befalls[action](daemon, engine, faults)
            assert faults.reached() == [case.failpoint]
            if action != "kill":
                serves_on(daemon, engine, name)
                wait_footprint(daemon.process.pid, before)
        if action == "kill":
            with daemon_with(tmp_path) as daemon:
                serves_on(daemon, engine, name)


@pytest.mark.parametrize(("case", "action", "name"), parameters(SUPERVISED_CASES, ["kill"]))
def test_supervised_daemon_comes_back_with_what_it_had(tmp_path: Path, case: Case, action: str, name: str) -> None:
    """Killed at any step, a supervised daemon comes back, and every block that an engine knew to be stored is hit."""
    faults = armed(tmp_path, case.failpoint, action, case.at)
    with (
        engine_process(case.kind, tmp_path / "run", tmp_path / "record") as engine,
        daemon_with(tmp_path, faults, supervised=True) as supervisor,
    ):
        store("z", supervisor.run_dir)
        assert not engine.ask("work a").startswith("Wrong")
        assert faults.reached() == [case.failpoint]
        until(lambda: engine.ask(f"again {name}").startswith("done"), "the daemon never came back")
        assert engine.ask("end") == "ended"
        wait_nothing_held(supervisor.run_dir)
        assert read_back("offload", supervisor.run_dir, ["z"]) == [OFFLOAD_BLOCKS]
        assert all(read_back(engine.kind, supervisor.run_dir, engine.stored()))
        assert_others_go_on(supervisor.run_dir, ["o"])
        assert_sound(supervisor.run_dir)
        wait_nothing_held(supervisor.run_dir)


@pytest.mark.parametrize(
    "weights", ["", pytest.param("step 2000", marks=pytest.mark.slow)], ids=["clear", "set-weights"]
)
def test_what_was_cleared_stays_cleared_though_nobody_was_told(tmp_path: Path, weights: str) -> None:
    """Killed before the answer, a daemon comes back cleared and with the weights: no block of before is hit."""
    (case,) = RENEWAL_CASES
    faults = armed(tmp_path, case.failpoint, "kill", case.at)
    with daemon_with(tmp_path, faults, supervised=True) as supervisor:
        with closing(ManagedEngine(supervisor.run_dir)) as engine:
            engine.store("a")
        with Admin.connect(supervisor.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
            (before,) = admin.describe().replicas
            renew = partial(admin.set_weights, "default", weights) if weights else partial(admin.clear, "default")
            with pytest.raises(DaemonUnreachable, match="before it replied"):
                renew()
        assert faults.reached() == [case.failpoint]
        until(lambda: can_work(supervisor.run_dir), "the daemon never came back")
        with Admin.connect(supervisor.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
            (replica,) = admin.describe().replicas
        assert (replica.generation > before.generation, replica.weights_version) == (True, weights)
        assert read_back("managed", supervisor.run_dir, ["a"]) == [0]
        assert_sound(supervisor.run_dir)


@pytest.mark.parametrize("case", SLEEP_CASES, ids=lambda case: case.failpoint)
def test_death_between_sleep_and_wake_leaves_a_whole_pool_or_none(tmp_path: Path, case: Case) -> None:
    """Killed while a pool falls asleep or wakes, a daemon comes back with the pool as it was, or asleep."""
    faults = armed(tmp_path, case.failpoint, "kill", case.at)
    with daemon_with(tmp_path, faults, supervised=True) as supervisor:
        with closing(ManagedEngine(supervisor.run_dir)) as engine:
            engine.store("a")
        is_waking = case.failpoint == "daemon.made"
        if is_waking:
            put_to_sleep(supervisor.run_dir)
        with pytest.raises(DaemonUnreachable, match="before it replied"):
            (wake if is_waking else put_to_sleep)(supervisor.run_dir)
        assert faults.reached() == [case.failpoint]
        until(lambda: is_there(supervisor.run_dir), "the daemon never came back")
        (pool,) = stats_of(supervisor.run_dir).pools
        is_awake = case.failpoint == "daemon.emptied"
        assert (pool.state, can_work(supervisor.run_dir)) == (("awake", True) if is_awake else ("asleep", False))
        if not is_awake:
            wake(supervisor.run_dir)
            assert can_work(supervisor.run_dir)
        assert read_back("managed", supervisor.run_dir, ["a"])[0] > 0
        assert_sound(supervisor.run_dir)
        wait_nothing_held(supervisor.run_dir)


def wake(run_dir: Path) -> None:
    with Admin.connect(run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
        admin.wake("default")


def is_there(run_dir: Path) -> bool:
    try:
        return bool(stats_of(run_dir).pools)
    except KvcachedError:
        return False


def can_work(run_dir: Path) -> bool:
    """Whether an engine can come, store and read back."""
    try:
        with closing(ManagedEngine(run_dir)) as engine:
            engine.store("b")
            return engine.read("b") > 0
    except KvcachedError:
        return False


def store(name: str, run_dir: Path) -> None:
    """Store a prompt in peace."""
    with closing(OffloadEngine(run_dir)) as engine:
        engine.store(name)


def serves_on(daemon: RunningDaemon, engine: Engine, name: str) -> None:
    """The engine works on a new session, reads nothing wrong, and leaves nothing behind."""
    answer = engine.ask(f"again {name}")
    assert answer.startswith("done "), answer
    assert int(answer.split()[1]) > 0
    assert engine.ask("end") == "ended"
    wait_nothing_held(daemon.run_dir)
    assert read_back(engine.kind, daemon.run_dir, ["a", name])[1] > 0
    assert_others_go_on(daemon.run_dir, ["o"])
    assert_sound(daemon.run_dir)
    wait_nothing_held(daemon.run_dir)


def killed(daemon: RunningDaemon, engine: Engine, _: Armed) -> None:
    """Whoever waits for an answer knows within a second that there will be none."""
    engine.say("work a")
    daemon.process.wait(PATIENCE_S)
    start = time.monotonic()
    assert engine.hear().startswith("DaemonUnreachable")
    assert time.monotonic() - start <= PROMISE_S


def stopped(daemon: RunningDaemon, engine: Engine, _: Armed) -> None:
    """Whoever waits for an answer gives up at its deadline; what the daemon grants later is given back."""
    engine.say("work a")
    with going_on(daemon.process.pid):
        assert engine.hear().startswith(("DeadlineExceeded", "DaemonSilent"))  # the latter where a process joins


def failed(daemon: RunningDaemon, engine: Engine, _: Armed) -> None:
    """The request that met the bug may fail, nothing else does."""
    assert not engine.ask("work a").startswith("Wrong")
    assert_others_go_on(daemon.run_dir, ["p"])
