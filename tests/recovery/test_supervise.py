"""The supervisor with real processes: a small daemon that dies in every way."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvcached.process.identity import identity_of
from kvcached.recovery.supervise import FAILED_STARTS_MAX, PAUSE_MAX_S, PAUSE_MIN_S, START_FAILED
from tests.project.source_tree import ROOT
from tests.recovery.fake_daemon import PARTS, STOPPED_STATUS, UNREADY_STATUS

DEADLINE_S = 20
QUICK = {"pause_min_s": 0.01, "pause_max_s": 0.02}


class Supervised:
    """A supervisor with a fake daemon, seen from outside."""

    def __init__(self, process: subprocess.Popen[str], told: socket.socket, notices: socket.socket) -> None:
        self.process = process
        self._told = told
        self._notices = notices
        self.log: list[str] = []

    def event(self) -> dict[str, Any]:
        """What the daemon tells next."""
        found: dict[str, Any] = json.loads(self._told.recv(4096))
        return found

    def ready(self) -> dict[str, Any]:
        """The next daemon's first words, once it has passed on that it is ready."""
        started = self.event()
        assert started["event"] == "started"
        assert self.notice() == "READY=1"
        return started

    def notice(self) -> str:
        """What the supervisor tells its own manager next."""
        return self._notices.recv(4096).decode()

    def has_notice(self) -> bool:
        return bool(select.select([self._notices], [], [], 0)[0])

    def logged(self, pattern: str) -> re.Match[str]:
        """Wait until the supervisor logs something."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if (found := re.search(pattern, line)) is not None:
                return found
        raise AssertionError(f"{pattern!r} not logged:\n{''.join(self.log)}")

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def status(self) -> int:
        """Its exit status, once it has ended."""
        return self.process.wait(DEADLINE_S)


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts a supervisor with a fake daemon of some behaviours; ends both."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as told,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as up,
    ):
        for receiver, name in ((told, "told"), (up, "notices")):
            receiver.bind(str(tmp_path / name))
            receiver.settimeout(DEADLINE_S)
        environment = {**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notices"), "LISTEN_FDS": "1", "LISTEN_PID": "1"}
        environment |= {"WATCHDOG_USEC": "1", "WATCHDOG_PID": "4194304"}  # not this process: too large

        @contextmanager
        def start(
            *behaviours: str, command: list[str] | None = None, within: tuple[str, ...] = (), **policy: object
        ) -> Iterator[Supervised]:
            daemon = command or [
                sys.executable,
                "-m",
                "tests.recovery.fake_daemon",
                str(tmp_path / "told"),
                *behaviours,
            ]
            arguments = [
                *within,
                sys.executable,
                "-m",
                "tests.recovery.supervised",
                json.dumps({**QUICK, **policy}),
                *daemon,
            ]
            with subprocess.Popen(
                arguments, cwd=ROOT, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            ) as process:
                try:
                    yield Supervised(process, told, up)
                finally:
                    process.kill()  # which ends the daemon, too

        yield start


def test_memory_outlives_a_killed_daemon(supervised: Callable[..., Any]) -> None:
    """A daemon that is killed, by any signal, is started again and finds the bytes of the one before it, each time."""
    with supervised() as it:
        pids: list[str] = []
        for number in (signal.SIGKILL, signal.SIGSEGV, signal.SIGHUP, signal.SIGRTMIN + 3):
            started = it.ready()
            assert started["before"] == pids
            assert started["names"] == ({"pool": 1} if pids else {})
            assert started["left"] == []
            pids.append(str(started["pid"]))
            os.kill(started["pid"], number)
        assert it.ready()["before"] == pids


def test_memory_that_the_daemon_gives_up_is_not_kept(supervised: Callable[..., Any]) -> None:
    """What a daemon removes from the store is not given to the next one."""
    with supervised("forgetful") as it:
        os.kill(it.ready()["pid"], signal.SIGKILL)

        assert (it.event()["before"], it.notice()) == ([], "READY=1")


def test_low_soft_limit_of_open_files_costs_no_memory(supervised: Callable[..., Any]) -> None:
    """A supervisor keeps more descriptors than a shell's soft limit allows: the hard one counts."""
    with supervised("large", within=("prlimit", f"--nofile={PARTS // 2}:")) as it:
        os.kill(it.ready()["pid"], signal.SIGKILL)

        assert it.ready()["names"] == {"pool": 1, "part": PARTS}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_is_passed_on_and_the_status_is_the_daemons(
    number: signal.Signals, supervised: Callable[..., Any]
) -> None:
    """SIGTERM and SIGINT reach the daemon as they are; the supervisor ends after it, with its exit status."""
    with supervised() as it:
        started = it.ready()
        assert started["group"] == started["pid"]  # a terminal's Ctrl-C reaches the supervisor alone

        it.send(number)

        assert it.event() == {"event": "stopping", "pid": started["pid"], "signal": number.name}
        assert (it.notice(), it.status()) == ("STOPPING=1", STOPPED_STATUS)


def test_second_signal_is_passed_on(supervised: Callable[..., Any]) -> None:
    """A daemon that takes its time hears of a second signal."""
    with supervised("stubborn") as it:
        it.ready()
        it.send(signal.SIGTERM)
        assert it.event()["signal"] == "SIGTERM"

        it.send(signal.SIGINT)

        assert it.event()["signal"] == "SIGINT"
        assert it.status() == STOPPED_STATUS


def test_daemon_that_is_killed_while_it_stops_is_not_started_again(supervised: Callable[..., Any]) -> None:
    """Once asked to stop, the supervisor ends however the daemon does: with 128 and the signal's number."""
    with supervised("stubborn") as it:
        started = it.ready()
        it.send(signal.SIGTERM)
        it.event()

        os.kill(started["pid"], signal.SIGKILL)

        assert it.status() == 128 + signal.SIGKILL


def test_daemon_that_somebody_stops_is_not_started_again(supervised: Callable[..., Any]) -> None:
    """A daemon that says that it stops, by itself or by a signal to it alone, ends the supervisor with its status."""
    with supervised() as it:
        os.kill(it.ready()["pid"], signal.SIGTERM)

        assert (it.notice(), it.status()) == ("STOPPING=1", STOPPED_STATUS)


def test_daemon_that_somebody_stops_while_it_starts_is_not_started_again(supervised: Callable[..., Any]) -> None:
    """A signal to a daemon that is not ready yet kills it, and ends the supervisor with the signal's status."""
    with supervised("starting") as it:
        os.kill(it.event()["pid"], signal.SIGTERM)

        assert it.status() == 128 + signal.SIGTERM


def test_restart_of_a_daemon_that_starts_is_no_failed_start(supervised: Callable[..., Any]) -> None:
    """SIGHUP to the supervisor ends a daemon that is not ready yet, and the next one is started at once."""
    with supervised("starting", failed_starts_max=1, pause_min_s=60.0) as it:
        first = it.event()
        it.send(signal.SIGHUP)

        assert it.ready()["before"] == [str(first["pid"])]


def test_daemon_that_ends_without_a_word_is_started_again(supervised: Callable[..., Any]) -> None:
    """An exit that nobody asked for is a death like any other."""
    with supervised() as it:
        first = it.ready()
        os.kill(first["pid"], signal.SIGUSR1)
        assert it.event()["event"] == "stopping"

        assert it.ready()["before"] == [str(first["pid"])]
        assert it.logged(rf"ended with status {STOPPED_STATUS};")


def test_restart_keeps_the_memory(supervised: Callable[..., Any]) -> None:
    """SIGHUP stops the daemon and starts it with its memory; whoever manages the supervisor hears of no stop."""
    with supervised(pause_min_s=3600.0) as it:
        first = it.ready()

        it.send(signal.SIGHUP)

        assert it.event() == {"event": "stopping", "pid": first["pid"], "signal": "SIGTERM"}
        assert it.ready()["before"] == [str(first["pid"])]
        assert not it.has_notice()


def test_restart_of_a_dead_daemon_does_not_wait(supervised: Callable[..., Any]) -> None:
    """SIGHUP in the pause after a death starts the next daemon at once."""
    with supervised(pause_min_s=3600.0) as it:
        first = it.ready()
        os.kill(first["pid"], signal.SIGKILL)
        it.logged("starts in 3600")

        it.send(signal.SIGHUP)

        assert it.ready()["before"] == [str(first["pid"])]


def test_stop_in_a_pause_ends_at_once(supervised: Callable[..., Any]) -> None:
    """With no daemon to stop, SIGTERM ends the supervisor with 0."""
    with supervised(pause_min_s=3600.0) as it:
        os.kill(it.ready()["pid"], signal.SIGKILL)
        it.logged(r"by signal 9, Killed; the next one starts in 3600")

        it.send(signal.SIGTERM)

        assert it.status() == 0


def test_daemon_that_never_gets_ready_is_given_up(supervised: Callable[..., Any]) -> None:
    """After so many deaths in a row before READY the supervisor ends, with the exit code for failed starts."""
    with supervised("unready", failed_starts_max=3) as it:
        assert [it.event()["event"] for _ in range(3)] == ["started"] * 3
        assert it.status() == START_FAILED
        assert it.logged(f"ended with status {UNREADY_STATUS}")
        assert it.logged("3 times in a row before it was ready")


def test_ready_daemon_begins_a_new_count(supervised: Callable[..., Any]) -> None:
    """Deaths after READY are never too many."""
    with supervised(failed_starts_max=1) as it:
        for _ in range(3):
            os.kill(it.ready()["pid"], signal.SIGKILL)
        it.ready()


def test_wrong_usage_is_not_tried_twice(supervised: Callable[..., Any]) -> None:
    """A first start that ends as wrong usage does not get better by itself: the supervisor ends with the same code."""
    with supervised("usage") as it:
        assert it.status() == 2
        assert it.event()["event"] == "started"


def test_pauses_grow_to_their_limit(supervised: Callable[..., Any]) -> None:
    """Each pause between a death and the next start is twice as long, up to the longest."""
    with supervised("unready", failed_starts_max=5, pause_min_s=0.1, pause_max_s=0.3) as it:
        pauses = [it.logged(r"starts in ([\d.]+) s")[1] for _ in range(4)]

        assert pauses == ["0.1", "0.2", "0.3", "0.3"]
        assert it.status() == START_FAILED


def test_daemon_that_lived_long_is_started_soon(supervised: Callable[..., Any]) -> None:
    """A daemon that had lived for long enough begins anew with the shortest pause."""
    with supervised(stable_after_s=0.0, pause_min_s=0.1, pause_max_s=100.0) as it:
        pauses = []
        for _ in range(3):
            os.kill(it.ready()["pid"], signal.SIGKILL)
            pauses.append(it.logged(r"starts in ([\d.]+) s")[1])

        assert pauses == ["0.1"] * 3


def test_defaults_are_those_of_the_document() -> None:
    """docs/cli.md tells the pauses and the number of failed starts that are in effect."""
    assert (PAUSE_MIN_S, PAUSE_MAX_S, FAILED_STARTS_MAX) == (0.1, 10.0, 8)


def test_forged_notifications_are_refused(supervised: Callable[..., Any]) -> None:
    """What other processes of the same user send is neither believed nor passed on nor kept."""
    with supervised() as it:
        first = it.ready()
        memory = os.memfd_create("forged")
        address = first["notify"]
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as forger:
            with_memory = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [memory]))]
            forger.sendmsg([b"FDSTORE=1\nFDNAME=forged"], with_memory, 0, address)
            forger.sendto(b"FDSTOREREMOVE=1\nFDNAME=pool", address)
            forger.sendto(b"STOPPING=1", address)
        os.close(memory)
        os.kill(first["pid"], signal.SIGKILL)

        second = it.ready()

        assert (second["before"], second["names"]) == ([str(first["pid"])], {"pool": 1})
        assert it.logged(f"not believed .*: it is of process {os.getpid()}, not of the daemon")


def test_flood_of_notifications_fills_no_disk(supervised: Callable[..., Any]) -> None:
    """Whoever floods the notification socket gets one log line, and the daemon under it is restarted as ever."""
    with supervised() as it:
        first = it.ready()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as forger:
            for _ in range(5000):
                forger.sendto(b"READY=1", first["notify"])
        os.kill(first["pid"], signal.SIGKILL)

        assert it.ready()["before"] == [str(first["pid"])]
        it.logged("daemon [0-9]+ started, with 1 descriptors")
    assert sum("not believed" in line for line in it.log) == 1


def test_stopped_daemon_is_replaced_with_its_memory(supervised: Callable[..., Any]) -> None:
    """A daemon under SIGSTOP is silent: SIGABRT does not reach it, SIGKILL does, and the next one has its memory."""
    with supervised(silence_max_s=0.3, kill_after_s=0.1) as it:
        first = it.ready()
        os.kill(first["pid"], signal.SIGSTOP)

        assert it.logged(rf"daemon {first['pid']} has not said for ([\d.]+) s that it lives")
        assert it.logged(r"ended by signal 9, Killed; the next one starts")
        assert it.ready()["before"] == [str(first["pid"])]


def test_silent_daemon_is_told_by_sigabrt(supervised: Callable[..., Any]) -> None:
    """A daemon that hangs without being stopped ends by SIGABRT, which lets it log where it hangs."""
    with supervised(silence_max_s=0.3, kill_after_s=60.0) as it:
        first = it.ready()

        assert it.logged(r"ended by signal 6, Aborted; the next one starts")
        assert it.ready()["before"] == [str(first["pid"])]


@pytest.mark.slow
def test_start_that_hangs_is_ended(supervised: Callable[..., Any]) -> None:
    """A daemon that is not ready in time, and does not ask for more, is ended; the next one gets ready."""
    with supervised("stuck", start_max_s=5.0, silence_max_s=60.0) as it:
        first = it.event()

        assert it.logged(rf"daemon {first['pid']} has not said for")
        assert it.ready()["before"] == [str(first["pid"])]


def test_daemon_that_hangs_while_it_stops_is_ended(supervised: Callable[..., Any]) -> None:
    """The supervisor ends also where its daemon hangs at the stop: with 128 and the number of SIGABRT."""
    with supervised("stubborn", silence_max_s=0.5) as it:
        it.ready()
        it.send(signal.SIGTERM)

        assert it.status() == 128 + signal.SIGABRT


def test_orphans_are_reaped(supervised: Callable[..., Any]) -> None:
    """A process that a killed daemon leaves behind lives on as the supervisor's child, and is reaped at its end."""
    with supervised("orphan") as it:
        first = it.ready()
        orphan = first["orphan"]
        pidfd = os.pidfd_open(orphan)
        os.kill(first["pid"], signal.SIGKILL)
        second = it.ready()
        assert parent_of(orphan) == it.process.pid

        os.kill(orphan, signal.SIGKILL)
        select.select([pidfd], [], [], DEADLINE_S)
        os.close(pidfd)
        it.send(signal.SIGHUP)  # by the time that its order is carried out, the signal before it is, too
        assert it.event()["pid"] == second["pid"]
        it.ready()

        assert identity_of(orphan) is None


NAMESPACE = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.mark.skipif(
    subprocess.run([*NAMESPACE, "true"], check=False, capture_output=True).returncode != 0,
    reason="this machine lets nobody make a pid namespace",
)
def test_supervisor_is_a_containers_first_process(supervised: Callable[..., Any]) -> None:
    """As process 1 of a pid namespace it restarts its daemon with its memory, and ends by SIGTERM with its status."""
    with supervised("container", within=NAMESPACE) as it:
        first = it.ready()
        second = it.ready()

        assert second["before"] == [str(first["pid"])]
        assert it.event()["signal"] == "SIGTERM"
        assert it.status() == STOPPED_STATUS


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_daemon_ends_with_its_supervisor(supervised: Callable[..., Any]) -> None:
    """A supervisor that is killed leaves no daemon behind that nobody would restart."""
    with supervised() as it:
        started = it.ready()

        it.send(signal.SIGKILL)

        assert it.event() == {"event": "stopping", "pid": started["pid"], "signal": "SIGTERM"}


def test_daemon_starts_with_signals_as_they_come(supervised: Callable[..., Any]) -> None:
    """Nothing of the supervisor's signal handling is left in the daemon: no signal is blocked.

    None is ignored besides what a terminal sends to whoever writes to it from the background.
    """
    from_outside = ignored_here()  # as SIGQUIT is in what a shell without job control runs in the background
    with supervised(command=["grep", "-E", "Sig(Blk|Ign)", "/proc/self/status"], failed_starts_max=1) as it:
        assert it.status() == START_FAILED
        _, blocked, _, ignored = it.process.stdout.read().split()
        ours = from_outside | 1 << (signal.SIGTTOU - 1)
        assert (int(blocked, 16), int(ignored, 16) | from_outside) == (0, ours)


def ignored_here() -> int:
    """Signals that this process was started with as ignored, as a mask; Python itself ignores two more."""
    status = Path("/proc/self/status").read_text()
    mask = int(status.partition("SigIgn:")[2].split()[0], 16)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        mask &= ~(1 << (number - 1))
    return mask


def test_daemon_has_no_other_descriptors(supervised: Callable[..., Any]) -> None:
    """Beside the standard streams the daemon has what was stored, and nothing of the supervisor's own."""
    with supervised(command=["ls", "/proc/self/fd"], failed_starts_max=1) as it:
        assert it.status() == START_FAILED
        assert it.process.stdout.read().split() == ["0", "1", "2", "3"]  # 3 is the folder that ls reads


def test_program_that_is_not_there_is_a_failed_start(supervised: Callable[..., Any]) -> None:
    """A command that cannot be run is told on stderr and counts as a daemon that died before it was ready."""
    with supervised(command=["/no/such/daemon"], failed_starts_max=2) as it:
        assert it.status() == START_FAILED
        assert it.logged("/no/such/daemon cannot be run: .*No such file")
        assert it.logged("ended with status 127")
