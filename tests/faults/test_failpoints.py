"""The failpoints themselves: what there is, what it costs, and that each is reached."""

from __future__ import annotations

import ast
import signal
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from timeit import repeat

import pytest

from kvcached_client import Admin, failpoints
from kvcached_client.failpoints import FAILPOINTS, failpoint
from tests.faults.cases import DAEMON_CASES, ENGINE_CASES, RENEWAL_CASES, SLEEP_CASES, WORKER_CASES
from tests.faults.engine import ENGINES
from tests.faults.harness import PATIENCE_S, all_noted, daemon_with, engine_process, put_to_sleep, until, wait_stopped
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT, modules

PROGRAM = "from kvcached_client.failpoints import failpoint; {}"


def run(text: str, program: str, log: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A process with armed failpoints, from start to end."""
    variables = {failpoints.VARIABLE: text, **({failpoints.LOG_VARIABLE: str(log)} if log else {})}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(program)],
        cwd=ROOT,
        env={**clean_environment(), **variables},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def test_every_failpoint_of_the_code_is_in_the_table() -> None:
    """Calls in shipped code name what the table has, each once, and the table has nothing else."""
    called = [
        ast.literal_eval(node.args[0])
        for _, tree in modules("kvcached", "kvcached_client")
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "failpoint"
    ]

    assert sorted(called) == sorted(FAILPOINTS)


def test_every_failpoint_has_a_case() -> None:
    """The crash harness lets something happen at each of them."""
    cases = (*ENGINE_CASES, *WORKER_CASES, *DAEMON_CASES, *RENEWAL_CASES, *SLEEP_CASES)

    assert {case.failpoint for case in cases} == set(FAILPOINTS)


def test_every_failpoint_is_reached(tmp_path: Path) -> None:
    """One engine of each kind, a clear and a sleep pass all of them: in engines, in the daemon, in a worker."""
    noted = all_noted(tmp_path)
    with daemon_with(tmp_path, noted) as daemon, ExitStack() as parts:
        for kind in ENGINES:
            engine = parts.enter_context(engine_process(kind, daemon.run_dir, tmp_path / kind, noted))
            answer = engine.ask("work a")
            assert answer.startswith("done ")
            assert answer != "done 0"
        until(lambda: "client.heartbeat" in noted.reached(), "no heartbeat")
        with Admin.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
            admin.clear("default")
        parts.close()
        put_to_sleep(daemon.run_dir)
        with Admin.connect(daemon.run_dir, deadline_ms=PATIENCE_S * 1000) as admin:
            admin.wake("default")

    assert sorted(noted.reached()) == sorted(FAILPOINTS)


def test_failpoint_that_is_not_armed_costs_next_to_nothing() -> None:
    """A call takes no longer than four calls of an empty function, about a hundred nanoseconds."""

    def nothing(_: str) -> None:
        pass

    best = {
        name: min(repeat("call('worker.ack')", globals={"call": call}, number=10_000, repeat=50))
        for name, call in {"failpoint": failpoint, "empty": nothing}.items()
    }

    assert best["failpoint"] <= 4 * best["empty"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("worker.nap=kill", "worker.ack"),
        ("worker.ack=explode", "kill, stop, raise, pass"),
        ("worker.ack", "kill, stop, raise, pass"),
        ("worker.ack=kill@0", "worker.ack=kill@2"),
        ("worker.ack=kill@x", "worker.ack=kill@2"),
    ],
)
def test_what_is_no_failpoint_is_refused_at_the_start(text: str, told: str) -> None:
    """A process does not start with an unknown name, action or pass, and says which there are."""
    done = run(text, "print('started')")

    assert (done.returncode, done.stdout) == (1, "")
    assert f"ValueError: {failpoints.VARIABLE}" in done.stderr
    assert told in done.stderr


@pytest.mark.parametrize(("at", "printed"), [("", ""), ("@1", ""), ("@3", "1\n2\n")])
def test_action_happens_at_its_pass(tmp_path: Path, at: str, printed: str) -> None:
    """The n-th pass raises, those before do nothing; the name is in the log by then."""
    loop = "[(failpoint('worker.ack'), print(n + 1)) for n in range(5)]"
    done = run(f"daemon.reply=kill,worker.ack=raise{at}", loop, tmp_path / "log")

    assert (done.returncode, done.stdout) == (1, printed)
    assert "FailpointReached: failpoint worker.ack" in done.stderr
    assert (tmp_path / "log").read_text() == "worker.ack\n"


def test_kill_leaves_no_time_for_anything(tmp_path: Path) -> None:
    """The process is dead by SIGKILL, its name in the log."""
    done = run(
        "worker.ack=kill", "print('before', flush=True); failpoint('worker.ack'); print('after')", tmp_path / "log"
    )

    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "before\n")
    assert (tmp_path / "log").read_text() == "worker.ack\n"


def test_stop_waits_for_a_signal_to_go_on() -> None:
    """The process stands still in the call, and goes on behind it after SIGCONT."""
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format("failpoint('worker.ack'); print('after')")],
        cwd=ROOT,
        env={**clean_environment(), failpoints.VARIABLE: "worker.ack=stop"},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        wait_stopped(process.pid)
        process.send_signal(signal.SIGCONT)
        assert process.communicate()[0] == "after\n"


def test_fault_befalls_one_process_only(tmp_path: Path) -> None:
    """A name that is in the log already does nothing, in whichever process: a worker's successor lives."""
    log = tmp_path / "log"
    first, second = (run("worker.ack=raise", "failpoint('worker.ack')", log) for _ in range(2))

    assert (first.returncode, second.returncode) == (1, 0)
    assert log.read_text() == "worker.ack\n"


def test_daemon_does_not_take_failpoints_for_configuration(tmp_path: Path) -> None:
    """The variables are no keys of the configuration, whose variables begin in the same way."""
    done = subprocess.run(
        [sys.executable, "-m", "kvcached", "check-config", "--config", "configs/cpu-tp1.toml"],
        cwd=ROOT,
        env={**clean_environment(), failpoints.VARIABLE: "worker.ack=pass", failpoints.LOG_VARIABLE: str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 0, done.stderr
