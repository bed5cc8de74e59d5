"""A start where something is damaged, in the way, or too small: the daemon serves, or it says what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcached.recovery.run_dir import EPOCH_MAX
from kvcached.recovery.state_file import sealed
from kvcached_client import Admin, Client
from tests.daemon.conftest import CONFIG, started
from tests.daemon.few_descriptors import VARIABLE
from tests.daemon.starts import start
from tests.daemon.supervised import Supervised, supervised
from tests.daemon.test_offload import config
from tests.daemon.test_restart import Engine
from tests.project.daemon_process import STOP_TIMEOUT_S, running_daemon

SERVES, REFUSES, WRONG = 0, 3, 2
BLOCKS = 3
#: With an engine's two, as many connections as one process always has.
OPERATORS = 6


class Case(NamedTuple):
    """Something that is wrong with a start.

    Attributes:
        make: brings it about, in the run directory.
        status: how it ends; `SERVES` where it becomes ready.
        told: what the log has.
        prefix: a command that becomes the daemon.
        text: its configuration.
    """

    make: Callable[[Path], object]
    status: int
    told: str
    prefix: tuple[str, ...] = ()
    text: str = config()


WAIT_S = 60.0


def limit(*options: str) -> tuple[str, ...]:
    return ("prlimit", *options)


def nothing(_: Path) -> None:
    pass


def lock(content: str) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / "daemon.lock").write_text(content)


def ledger(content: str) -> Callable[[Path], object]:
    return lambda run_dir: (run_dir / "ledger.json").write_text(content)


CASES = {
    "lock of all nines": Case(lock("9" * 20), SERVES, "is damaged"),
    "lock above all epochs": Case(lock(str((1 << 63) - 1)), SERVES, "is damaged"),
    "long lock": Case(lock("9" * 5000), SERVES, "is damaged"),
    "lock of words": Case(lock("locked"), SERVES, "is damaged"),
    "lock is a folder": Case(lambda run_dir: (run_dir / "daemon.lock").mkdir(), REFUSES, "daemon.lock"),
    "lock is a pipe": Case(lambda run_dir: os.mkfifo(run_dir / "daemon.lock"), REFUSES, "daemon.lock is no file"),
    "ledger of nothing": Case(ledger(""), SERVES, "not used"),
    "ledger nested too deeply": Case(ledger("[" * 100_000), SERVES, "not used"),
    "ledger is a folder": Case(lambda run_dir: (run_dir / "ledger.json").mkdir(), SERVES, "not used"),
    "rpc.sock is a folder": Case(lambda run_dir: (run_dir / "rpc.sock").mkdir(), REFUSES, "rpc.sock is there, and"),
    "attach.sock is a file": Case(lambda run_dir: (run_dir / "attach.sock").touch(), REFUSES, "no socket; remove it"),
    "log is a pipe": Case(
        lambda run_dir: os.mkfifo(run_dir / "worker-default-0.log"), REFUSES, "log is no file; remove it", text=CONFIG
    ),
    "others may write": Case(lambda run_dir: run_dir.chmod(0o777), REFUSES, "chmod go-w"),
    "few descriptors": Case(nothing, REFUSES, "the limit of open files is 8", limit("--nofile=8:8")),
    "few descriptors for workers": Case(
        nothing, REFUSES, "the limit of open files is 64", limit("--nofile=64:64"), text=CONFIG
    ),
    "small files": Case(nothing, REFUSES, "the limit of the size of files is 300000", limit("--fsize=300000:300000")),
    "configuration nested too deeply": Case(nothing, WRONG, "nested too deeply", text="a = " + "[" * 5000),
}
#: The others take a while together.
QUICK = ("lock of all nines", "attach.sock is a file", "small files", "configuration nested too deeply")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_start_where_something_is_wrong(name: str, tmp_path: Path) -> None:
    """The daemon serves all the same, or ends with the documented status and one reason; never with a traceback."""
    case, path, run_dir = CASES[name], tmp_path / "kvcached.toml", tmp_path / "run"
    path.write_text(case.text)
    run_dir.mkdir(mode=0o750)
    case.make(run_dir)

    found = start(path, run_dir, prefix=case.prefix)

    assert "Traceback" not in found.log, found.log
    assert (found.is_ready, found.status) == (case.status == SERVES, case.status), found.log
    assert case.told in found.log


@pytest.mark.parametrize("shards", [1, pytest.param(8, marks=pytest.mark.slow)])
def test_lowest_limit_of_open_files_that_is_accepted_suffices(shards: int, tmp_path: Path) -> None:
    """A daemon that is ready has room for connections: one that may open fewer files does not start, and says so."""
    path = tmp_path / "kvcached.toml"
    path.write_text(CONFIG.replace("shards = 1", f"shards = {shards}"))
    refused = start(path, tmp_path / "run", prefix=limit("--nofile=8:8"))
    lowest = re.search(r"this configuration needs (\d+); raise it", refused.log)
    assert lowest is not None, refused.log

    few = "tests.daemon.few_descriptors"
    with ExitStack() as parts:
        parts.enter_context(running_daemon(path, tmp_path / "run", program=few, variables={VARIABLE: lowest[1]}))
        client = parts.enter_context(Client.connect(tmp_path / "run"))
        client.acquire("request", client.chain(range(8))).release()
        for _ in range(OPERATORS):
            assert parts.enter_context(Admin.connect(tmp_path / "run")).health().ok


def test_clients_accept_the_epoch_after_a_damaged_lock(tmp_path: Path) -> None:
    """Whatever stood in the lock file, the next epoch is one that clients take, and larger than those of before."""
    (tmp_path / "run").mkdir(mode=0o750)
    (tmp_path / "run" / "daemon.lock").write_text("9" * 20)
    epochs = []
    for _ in range(2):
        with started(tmp_path, config()) as daemon, Admin.connect(daemon.run_dir) as admin:
            epochs.append(admin.describe().daemon_epoch)
    assert 0 < epochs[0] < epochs[1] < EPOCH_MAX


def test_configuration_without_an_end_is_refused(tmp_path: Path) -> None:
    """A device in place of the file is not read until the memory is full."""
    found = start(Path("/dev/zero"), tmp_path / "run")

    assert found.status == WRONG
    assert "more than" in found.log


def test_nobody_waits_for_who_cannot_be_told(tmp_path: Path) -> None:
    """Where not a byte can be written, the exit status says that the start failed."""
    path = tmp_path / "kvcached.toml"
    path.write_text(config())

    assert start(path, tmp_path / "run", prefix=limit("--fsize=0:0")) == (False, REFUSES, "")


def test_failed_start_is_told_in_the_format_of_the_log(tmp_path: Path) -> None:
    """With `log_format = "json"`, each line of a start that fails is an object, the reason at its end, too."""
    path = tmp_path / "kvcached.toml"
    path.write_text(f'log_format = "json"\n{config()}')
    (tmp_path / "run").touch()

    found = start(path, tmp_path / "run")

    assert (found.is_ready, found.status) == (False, REFUSES)
    *_, last = [json.loads(line) for line in found.log.splitlines()]
    assert (last["level"], last["logger"]) == ("error", "kvcached.cli.serve")
    assert last["message"] == f"the start failed: {last['reason']}"
    assert f"run directory {tmp_path}/run: File exists" in last["reason"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a link of another user's")
def test_link_of_another_user_is_not_followed(tmp_path: Path) -> None:
    """A run directory that another user's link leads to is refused; one's own link is followed."""
    path, target, link = tmp_path / "kvcached.toml", tmp_path / "target", tmp_path / "run"
    path.write_text(config())
    target.mkdir(mode=0o750)
    link.symlink_to(target)
    assert start(path, link).is_ready
    os.lchown(link, 1001, 1001)

    found = start(path, link)

    assert found.status == REFUSES
    assert "is a link that user 1001 made" in found.log


_HUGE, _LARGEST = 1 << 62, (1 << 63) - 1
#: Of the ledger of a daemon with a replica, a namespace and an engine: which field says what instead.
DAMAGE: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "epoch": (("epoch",), _LARGEST),
    "first generation": (("first_generation",), _LARGEST),
    "generation of a namespace": (("namespaces", 0, "generation"), _LARGEST),
    "shards of a namespace": (("namespaces", 0, "shards"), _HUGE),
    "blocks of a namespace": (("namespaces", 0, "block_bytes"), _HUGE),
    "block size of a namespace": (("namespaces", 0, "block_size"), _HUGE),
    "slots of a namespace": (("namespaces", 0, "slots_per_slab"), _HUGE),
    "no slots of a namespace": (("namespaces", 0, "slots_per_slab"), 0),
    "root of a namespace": (("namespaces", 0, "root"), ""),
    "fingerprint of a namespace": (("namespaces", 0, "fingerprint"), ""),
    "label of a namespace": (("namespaces", 0, "label"), "x" * 100_000),
    "slabs of the host pool": (("host", "slabs"), _HUGE),
    "size of slabs": (("host", "slab_bytes"), _HUGE),
    "memory of a replica": (("replicas", 0, "memory", 0, 1), _LARGEST),
    "shards of a replica": (("replicas", 0, "memory"), [[0, 0]] * 800),
    "no memory of a replica": (("replicas", 0, "memory"), []),
    "generation of a replica": (("replicas", 0, "generation"), _LARGEST),
    "namespace of a replica": (("replicas", 0, "namespace"), ""),
    "slots of a replica": (("replicas", 0, "slots"), _HUGE),
    "id of a session": (("sessions", 0, "id"), _LARGEST),
    "epoch of a session": (("sessions", 0, "epoch"), _LARGEST),
    "place of a session": (("sessions", 0, "place"), "nowhere"),
    "shard of a member": (("sessions", 0, "members", 0, "shard"), _HUGE),
    "no members": (("sessions", 0, "members"), []),
}


#: A forged one of these makes another namespace of the same name, and its engines are told so.
LOCKS_OUT = (
    "shards of a namespace",
    "blocks of a namespace",
    "block size of a namespace",
    "fingerprint of a namespace",
)


def change_ledger(path: Path, field: tuple[str | int, ...], value: object, *, is_sealed: bool = False) -> None:
    """Have one field say something else; sealed, it looks as if a daemon had written that."""
    ledger = json.loads(path.read_text())
    *way, last = field
    place = ledger
    for each in way:
        place = place[each]
    place[last] = value
    if is_sealed:
        del ledger["checksum"]
        path.write_bytes(sealed(json.dumps(ledger).encode()))
    else:
        path.write_text(json.dumps(ledger))


def restart_with(daemon: Supervised, change: Callable[[], object]) -> str:
    """Kill the daemon, change something while there is none, and wait for the next one; what that one logged."""
    before = len(daemon.log)
    os.kill(daemon.process.pid, signal.SIGSTOP)
    daemon.kill()
    change()
    os.kill(daemon.process.pid, signal.SIGCONT)
    daemon.await_ready()
    return daemon.log[before:]


def restarts_with(tmp_path: Path, names: list[str], *, is_sealed: bool = False) -> None:
    """One restart after the other, each with a ledger that is damaged otherwise."""
    replica = CONFIG[CONFIG.index("[[replica]]") :]
    with supervised(tmp_path, config() + replica) as daemon:
        ledger_path = daemon.run_dir / "ledger.json"
        engine = Engine(daemon.run_dir)
        for number, name in enumerate(names):
            engine.store(f"prompt {number}", BLOCKS)
            log = restart_with(daemon, partial(change_ledger, ledger_path, *DAMAGE[name], is_sealed=is_sealed))
            assert "Traceback" not in log, (name, log)
            assert log.count("daemon ended") == 1, (name, log)  # the one that was killed
            engine.connect()
            engine.join()
            assert engine.load(f"prompt {number}", BLOCKS) in {0, BLOCKS}
            with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
                assert admin.check().violations == ()
                assert admin.health().ok
        engine.close()


def test_damaged_ledger_costs_no_start(tmp_path: Path) -> None:
    """A ledger that is damaged in a field costs the warm state at most: the next daemon is there at once, and sound."""
    restarts_with(tmp_path, ["memory of a replica", "shards of a namespace"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("is_sealed", [False, True], ids=["damaged", "forged"])
def test_no_damage_of_the_ledger_costs_a_start(tmp_path: Path, *, is_sealed: bool) -> None:
    """The same for each field that can say something else and still have its type, also where the checksum is right."""
    names = [name for name in DAMAGE if not is_sealed or name not in LOCKS_OUT]
    restarts_with(tmp_path, names, is_sealed=is_sealed)


def test_daemon_whose_directory_was_removed_harms_no_other(tmp_path: Path) -> None:
    """`rm -r` of a living daemon's run directory, and another daemon there: the first one's end leaves it reachable."""
    with started(tmp_path, config()) as first:
        shutil.rmtree(first.run_dir)
        other = tmp_path / "other"
        other.mkdir()
        (other / "kvcached.toml").write_text(config())
        with running_daemon(other / "kvcached.toml", first.run_dir) as second:
            first.process.terminate()
            assert first.process.wait(STOP_TIMEOUT_S) == 0
            with Admin.connect(first.run_dir) as admin:
                assert admin.describe().pid == second.pid
            engine = Engine(first.run_dir)
            engine.store("a", BLOCKS)
            assert engine.load("a", BLOCKS) == BLOCKS
            engine.close()


def test_engine_that_waits_may_be_started_before_the_daemon(tmp_path: Path) -> None:
    """An engine that is started first, where there is no run directory yet, gets its session when the daemon serves."""
    connect = partial(Client.connect, tmp_path / "run", wait_s=WAIT_S)
    with ThreadPoolExecutor(1) as engine:
        connecting = engine.submit(connect)
        with started(tmp_path), connecting.result() as client:
            assert client.slots == 16
