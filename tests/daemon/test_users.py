"""Processes of several users at one daemon, by the roles of its table [access]: real users, real sockets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin, Client, Refused
from kvcached_client.doctor.checks import examine
from tests.daemon.conftest import CONFIG as IMPATIENT
from tests.daemon.conftest import started
from tests.daemon.supervised import supervised
from tests.line_process import LineProcess
from tests.project.source_tree import ROOT

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become other users")

ENGINE, LOOKER, OPERATOR, STRANGER, DAEMON = 12_001, 12_002, 12_003, 12_004, 12_005
GROUP = 12_100
#: Sessions outlive their engine's silence for longer than a busy machine keeps a process waiting.
CONFIG = IMPATIENT.replace("session_ttl_ms = 600", "session_ttl_ms = 20_000")
ACCESS = f"""
[access]
operate = ["{OPERATOR}"]
look = ["@{GROUP}"]

[[access.engine]]
users = ["{ENGINE}"]
replicas = ["default"]
namespaces = []
"""
OTHER_REPLICA = CONFIG[CONFIG.index("[[replica]]") :].replace('"default"', '"other"')
HOST = "[host]\nsize_bytes = 4194304\nslab_bytes = 1048576\n"


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may pass, and only root may write to, all the way up."""
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@contextlib.contextmanager
def process(uid: int, module: str, *arguments: str, gid: int | None = None) -> Iterator[LineProcess]:
    """A program of the tests as another user."""
    child = LineProcess("tests.daemon.as_user", str(uid), str(gid or uid), module, *arguments)
    try:
        yield child
    finally:
        child.end()


@contextlib.contextmanager
def admin(uid: int, run_dir: Path, gid: int | None = None) -> Iterator[LineProcess]:
    with process(uid, "tests.daemon.admin_process", str(run_dir), gid=gid) as child:
        assert child.hear() == "ready"
        yield child


def engine_on(run_dir: Path, uid: int) -> contextlib.AbstractContextManager[LineProcess]:
    return process(uid, "tests.daemon.engine_process", str(run_dir))


def attaching(run_dir: Path, uid: int, *grants: str) -> contextlib.AbstractContextManager[LineProcess]:
    return process(uid, "tests.daemon.attach_process", str(run_dir), *grants)


def no_session_within(own: Admin, limit_s: float) -> bool:
    end = time.monotonic() + limit_s
    while own.stats().sessions:
        if time.monotonic() > end:
            return False
    return True


def free_slots(run_dir: Path) -> int:
    with Admin.connect(run_dir) as own:
        return next(pool.states["free"] for pool in own.stats().pools if pool.replica == "default")


def test_slots_of_another_users_killed_engine_are_free_within_a_second(place: Path) -> None:
    """An engine of another user acquires, writes and commits; when it is SIGKILLed its other slots are free at once."""
    with started(place, CONFIG + ACCESS) as daemon, engine_on(daemon.run_dir, ENGINE) as engine:
        assert engine.hear() == "holds 4"
        assert (engine.ask("write"), free_slots(daemon.run_dir)) == ("written", 12)

        engine.process.kill()
        with Admin.connect(daemon.run_dir) as own:
            assert no_session_within(own, 1.0)
        with Client.connect(daemon.run_dir) as successor:
            assert successor.match(successor.chain(range(16))) == 3


def test_each_role_does_its_own_and_nothing_else(place: Path) -> None:
    """A looker looks and cannot clear, an operator does both and opens no session, a stranger does not get in."""
    with started(place, CONFIG + ACCESS) as daemon:
        run_dir = daemon.run_dir
        with admin(LOOKER, run_dir, gid=GROUP) as looker:
            assert (looker.ask("health"), looker.ask("stats")) == ("True", "0")
            said = looker.ask("clear")
            assert "forbidden: clear needs the role operate, and user 12002 has look" in said
            assert "access.operate" in said
        with admin(OPERATOR, run_dir) as operator:
            done = [operator.ask(each) for each in ("health", "pause", "resume", "clear")]
            assert done == ["True", "True", "serving", "0"]
        with attaching(run_dir, OPERATOR) as engine:
            assert "forbidden: identify needs the role engine, and user 12003 has operate" in engine.hear()
        with admin(STRANGER, run_dir) as stranger, attaching(run_dir, STRANGER) as engine:
            assert "may not pass" in stranger.ask("health")
            assert "Refused: unauthenticated" in engine.hear()


def command(uid: int, *arguments: str, gid: int | None = None) -> tuple[int, str]:
    """The command `kvcached` as another user: its exit code, and both outputs."""
    who = (str(uid), str(gid or uid))
    done = subprocess.run(
        [sys.executable, "-m", "tests.daemon.as_user", *who, "kvcached.cli.main", *arguments],
        cwd=ROOT, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


def test_commands_of_each_role_find_the_run_directory_that_they_may_only_pass(place: Path) -> None:
    """`kvcached --run-dir` serves operators and lookers, who may pass the directory and not list it; no stranger."""
    with started(place, CONFIG + ACCESS) as daemon:
        where = ("--run-dir", str(daemon.run_dir))
        looked = command(LOOKER, "health", *where, gid=GROUP)
        paused, drained = command(OPERATOR, "pause", *where), command(LOOKER, "drain", *where, gid=GROUP)
        refused = command(STRANGER, "health", *where)

    assert (looked[0], "the daemon runs as user root (0)" in looked[1]) == (0, True), looked
    assert (paused[0], "paused" in paused[1]) == (0, True), paused
    assert (drained[0], "needs the role operate" in drained[1]) == (2, True), drained
    assert (refused[0], "belongs to user root (0)" in refused[1]) == (2, True), refused


def test_stranger_whom_the_modes_let_in_is_refused_by_the_daemon(place: Path) -> None:
    """Where everybody may connect, as on a file system without access control lists, the daemon refuses a stranger."""
    with started(place, CONFIG + ACCESS) as daemon:
        daemon.run_dir.chmod(0o755)
        for name in ("rpc.sock", "attach.sock"):
            (daemon.run_dir / name).chmod(0o777)
        with admin(STRANGER, daemon.run_dir) as stranger, attaching(daemon.run_dir, STRANGER) as engine:
            assert "user 12004 has no role here; the daemon runs as user root (0)" in stranger.ask("health")
            assert "unauthenticated: user 12004 has no role here" in engine.hear()


def test_engine_gets_only_the_namespaces_that_it_may_use(place: Path) -> None:
    """An engine of one replica is refused the memory of a session on another one, though it has its token."""
    config = CONFIG + OTHER_REPLICA + ACCESS
    with (
        started(place, config) as daemon,
        Client.connect(daemon.run_dir, replica="other") as own,
        attaching(daemon.run_dir, ENGINE, own.session.to_bytes().hex()) as engine,
    ):
        assert engine.hear() == "identified"
        assert "forbidden: user 12001 may be an engine on replicas 'default', not 'other'" in engine.hear()


def test_engine_of_another_user_goes_on_after_a_restart(place: Path) -> None:
    """The next daemon keeps the slots of an engine of another user, lets it rejoin, and frees them once it is dead."""
    with supervised(place, CONFIG + HOST + ACCESS) as daemon:
        with engine_on(daemon.run_dir, ENGINE) as engine:
            assert engine.hear() == "holds 4"
            daemon.kill_and_wait()
            assert free_slots(daemon.run_dir) < 16
            assert "1 living engines" in daemon.log
            assert (engine.ask("rejoin"), engine.ask("write")) == ("done", "written")
            daemon.kill_and_wait()
            assert free_slots(daemon.run_dir) < 16
            engine.process.kill()
            with Admin.connect(daemon.run_dir) as own:
                assert no_session_within(own, 1.0)
                (pool,) = own.stats().pools
        assert (pool.states["free"], pool.states["cached"], pool.states["quarantined"]) == (12, 4, 0)


ROOT_ENGINE = '[[access.engine]]\nusers = ["root"]\n'
OFFLOAD = """
heartbeat_interval_ms = 100
session_ttl_ms = 20_000
[host]
size_bytes = 4194304
slab_bytes = 1048576
[offload]
"""


@contextlib.contextmanager
def daemon_of(uid: int, place: Path, config: str) -> Iterator[Path]:
    """A daemon of another user in a directory that root has given it."""
    run_dir, path = place / "run", place / "kvcached.toml"
    path.write_text(config)
    run_dir.mkdir(mode=0o750)
    os.chown(run_dir, uid, uid)
    arguments = ("serve", "--config", str(path), "--run-dir", str(run_dir), "--log-format", "plain")
    with process(uid, "tests.daemon.serve_process", *arguments) as daemon:
        assert daemon.hear() == "ready"
        yield run_dir


def test_root_is_the_engine_of_a_daemon_that_is_not_roots(place: Path) -> None:
    """The image of vLLM runs as root, the daemon's does not: root stores and hits where it is named as an engine."""
    with daemon_of(DAEMON, place, OFFLOAD + ROOT_ENGINE) as run_dir:
        engine = LineProcess("tests.daemon.offload_process", "scheduler", str(run_dir), "ab" * 16, "1", "4096", "0")
        try:
            assert engine.hear()  # its grant
            assert (engine.ask("prepare prompt 4") != "", engine.ask("copy"), engine.hear()) == (True, "begins", "done")
            assert engine.ask("hit prompt 4") == "4"
        finally:
            engine.end()


def test_doctor_of_an_engine_says_what_its_user_lacks(place: Path) -> None:
    """A user who may be an engine and not look has good sockets and credentials, and is told why no block was tried."""
    access = "[access]\nlook = []\n" + ROOT_ENGINE
    with daemon_of(DAEMON, place, OFFLOAD + access) as run_dir:
        findings = {each.check: each for each in examine(str(run_dir))}

    assert [findings[check].level for check in ("sockets", "daemon", "credentials")] == ["ok"] * 3
    assert findings["round trip"].level == "warn"
    assert "stats needs the role operate or look, and user root (0) has engine" in findings["round trip"].text


def test_doctor_of_an_engine_that_only_loads_says_so(place: Path) -> None:
    """A user whose engines only load cannot try a block, and nothing of it is a fault."""
    with daemon_of(DAEMON, place, OFFLOAD + ROOT_ENGINE + "read_only = true\n") as run_dir:
        (found,) = [each for each in examine(str(run_dir)) if each.check == "round trip"]

    assert (found.level, "only load" in found.text) == ("warn", True)


def test_root_looks_at_a_daemon_of_another_user(place: Path) -> None:
    """`sudo kvcached health` works by default; whatever changes something says which key would allow it."""
    with daemon_of(DAEMON, place, OFFLOAD) as run_dir, Admin.connect(run_dir) as root:
        assert root.health().ok
        with pytest.raises(Refused, match=r"pause needs the role operate, and user root \(0\) has look") as caught:
            root.pause("")
        assert "access.operate" in caught.value.fix
        with pytest.raises(Refused, match=r"identify needs the role engine, and user root \(0\) has look"):
            Client.connect(run_dir)
