"""Engine processes that are killed, stopped, or fail at each of the client's failpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.daemon.conftest import RunningDaemon
from tests.faults.cases import ENGINE_CASES, Case, parameters
from tests.faults.harness import (
    PROMISE_S,
    Armed,
    Engine,
    armed,
    assert_others_go_on,
    assert_sound,
    daemon_with,
    engine_process,
    expired,
    going_on,
    no_leaks,
    read_back,
    until,
    wait_nothing_held,
    warm_up,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningDaemon]:
    """One for all engines: none of them can harm it."""
    directory = tmp_path_factory.mktemp("daemon")
    with daemon_with(directory) as running:
        warm_up(running, directory)
        yield running


@pytest.mark.parametrize(("case", "action", "name"), parameters(ENGINE_CASES))
def test_engine_faults(daemon: RunningDaemon, tmp_path: Path, case: Case, action: str, name: str) -> None:
    """Whatever befalls an engine at any step, others go on, what is read later is right, and nothing stays behind."""
    faults = armed(tmp_path, case.failpoint, action, case.at)
    befalls: dict[str, Callable[[RunningDaemon, Engine, Armed, str], None]] = {
        "kill": killed,
        "stop": stopped,
        "raise": raised,
    }
    with no_leaks(daemon):
        with engine_process(case.kind, daemon.run_dir, tmp_path / "record", faults) as engine:
            befalls[action](daemon, engine, faults, name)
        assert faults.reached() == [case.failpoint]
        wait_nothing_held(daemon.run_dir)
        read_back(case.kind, daemon.run_dir, [name, *engine.stored()])
        assert_sound(daemon.run_dir)


def killed(daemon: RunningDaemon, engine: Engine, _: Armed, name: str) -> None:
    """Its slots are free within a second; what was committed is hit."""
    engine.say(f"work {name}")
    engine.wait_killed()
    assert wait_nothing_held(daemon.run_dir) <= PROMISE_S
    assert all(read_back(engine.kind, daemon.run_dir, engine.stored()))
    assert_others_go_on(daemon.run_dir, [f"{name}o"])


def stopped(daemon: RunningDaemon, engine: Engine, _: Armed, name: str) -> None:
    """Its session expires meanwhile; then it goes on writing, is told when it goes on, and connects anew."""
    before = expired(daemon.run_dir)
    others = [f"{name}o{number}" for number in range(4)]
    engine.say(f"work {name}")
    with going_on(engine.process.pid):
        until(lambda: expired(daemon.run_dir) > before, "its session never expired")
        assert_others_go_on(daemon.run_dir, others)
        assert_sound(daemon.run_dir)
    answer = engine.hear()
    if answer.startswith("done"):  # it waits for no answer to a heartbeat, or to the report of a load
        answer = engine.ask(f"work {name}b")
    assert answer.startswith("Stale"), answer
    assert_goes_on(engine, f"{name}a")
    read_back("offload", daemon.run_dir, others)


def raised(daemon: RunningDaemon, engine: Engine, faults: Armed, name: str) -> None:
    """It gives its session up, and goes on with the next one."""
    before = expired(daemon.run_dir)
    answer = engine.ask(f"work {name}")
    if faults.text.startswith("client.heartbeat"):
        faults.wait()  # in a thread of its own: nobody else hears of it
        until(lambda: expired(daemon.run_dir) > before, "its session never expired")
        answer = engine.ask(f"work {name}")
        assert answer.startswith("Stale")
    else:
        assert answer.startswith("FailpointReached")
    assert_others_go_on(daemon.run_dir, [f"{name}o"])
    assert_goes_on(engine, f"{name}a")


def assert_goes_on(engine: Engine, name: str) -> None:
    """It works on a new session as if nothing had happened."""
    answer = engine.ask(f"again {name}")
    assert answer.startswith("done "), answer
    assert int(answer.split()[1]) > 0
    assert engine.ask("end") == "ended"
