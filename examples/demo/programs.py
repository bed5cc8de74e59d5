"""The programs that `kvcached demo` runs: a daemon and the example engine, from ready to ended."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, cast

import msgspec

from kvcached.process import notify
from kvcached.process.seqpacket import peer_credentials
from kvcached_client.transport.run_dir import ATTACH_SOCKET_NAME

#: The checkout.
_ROOT: Final = Path(__file__).resolve().parents[2]
_START_TIMEOUT_S: Final = 60
_ANSWER_TIMEOUT_S: Final = 60
_STOP_TIMEOUT_S: Final = 10
#: In /proc/PID/stat, counted behind the name.
_GROUP_FIELD: Final = 2
#: Runs a module as ``python -m`` does, after it has asked the kernel (PR_SET_PDEATHSIG) for a signal at the end of the
#: process that started it. A demo that gets a SIGKILL can end nothing itself.
_BOUND_TO_PARENT: Final = (
    "import ctypes, runpy, sys;"
    "ctypes.CDLL(None).prctl(1, int(sys.argv[1]));"
    "del sys.argv[:2];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class DemoError(Exception):
    """The demo cannot run; the message says what to do."""


class Answer(msgspec.Struct, frozen=True):
    """One result line of the engine, as far as it is used here."""

    tokens: list[int]
    hit_tokens: int
    loaded_tokens: int
    first_token_ms: float
    logits_digest: str


class Program:
    """A program that the demo runs, in a process group of its own. It writes to a log; its end is an error.

    Attributes:
        bound_by: the signal that it gets where the demo itself is killed.
    """

    bound_by = signal.SIGTERM

    def __init__(self, name: str, arguments: list[str], directory: Path, **environment: str) -> None:
        self._name = name
        # settings meant for a real daemon must not reach this one
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHED_")}
        self._log_path = directory / f"{name}.log"
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOUND_TO_PARENT, str(int(self.bound_by)), *arguments],
                cwd=_ROOT,
                env={**inherited, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.stdin = cast("IO[bytes]", self.process.stdin)
        self.stdout = cast("IO[bytes]", self.process.stdout)

    def wait_readable(self, source: int, timeout_s: float) -> None:
        """Until the descriptor `source` has data.

        Raises:
            DemoError: the program ended, or said nothing in time.
        """
        pidfd = os.pidfd_open(self.process.pid)
        try:
            readable, _, _ = select.select([source, pidfd], [], [], timeout_s)
        finally:
            os.close(pidfd)
        if pidfd in readable or not readable:
            raise self.failure("ended" if readable else f"said nothing for {timeout_s:.0f} s")

    def failure(self, what: str) -> DemoError:
        """What happened, and the end of the log."""
        log_end = self._log_path.read_text(errors="replace")[-2000:]
        return DemoError(f"the {self._name} {what}; the end of its log:\n{log_end}")

    def stop(self) -> None:
        """Ask the program to end, and wait until it has; kill its group if it does not."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait until all of it is dead: until then nobody else gets its device pool."""
        with contextlib.ExitStack() as stack:
            members = [pidfd for pid in _members(self.process.pid) if (pidfd := _watched(pid, stack)) is not None]
            with contextlib.suppress(ProcessLookupError):  # nobody of it is left
                os.killpg(self.process.pid, signal.SIGKILL)
            for pidfd in members:
                select.select([pidfd], [], [], _STOP_TIMEOUT_S)
        self.process.communicate()


def _members(group: int) -> Iterator[int]:
    """The processes of a process group."""
    for status in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # one that has just ended
            pid, _, fields = status.read_text().partition(" ")
            if int(fields.rpartition(")")[2].split()[_GROUP_FIELD]) == group:
                yield int(pid)


def _watched(pid: int, stack: contextlib.ExitStack) -> int | None:
    """A descriptor that is readable when a process is dead, until the stack ends; None if it is gone."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    stack.callback(os.close, pidfd)
    return pidfd


class SupervisedDaemon(Program):
    """`kvcached supervise`, and the daemon that it keeps running, which ends with it."""

    bound_by = signal.SIGKILL  # `kept_down` stops it: a SIGTERM would wait for it to go on

    def __init__(self, configuration: Path, directory: Path, notices: socket.socket) -> None:
        self._notices = notices
        self._attach = str(directory / "run" / ATTACH_SOCKET_NAME)
        arguments = ["kvcached", "supervise", "--config", str(configuration)]
        super().__init__("daemon", arguments, directory, **{notify.NOTIFY_VARIABLE: notices.getsockname()})

    @property
    def daemon_pid(self) -> int:
        """Whoever serves the attach socket."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(self._attach)
            return peer_credentials(connection).pid

    def kill_daemon(self) -> int:
        """SIGKILL to the daemon alone; returns its pid when it is dead."""
        pid = self.daemon_pid
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            select.select([pidfd], [], [], _STOP_TIMEOUT_S)
        finally:
            os.close(pidfd)
        return pid

    @contextlib.contextmanager
    def kept_down(self) -> Iterator[None]:
        """In this block a daemon that is killed is not started again: its supervisor is stopped meanwhile (SIGSTOP)."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def wait_ready(self) -> None:
        """Until a daemon says that it is ready.

        Raises:
            DemoError: none did in time, or the supervisor gave up.
        """
        notice = b""
        while notice != notify.READY.encode():
            self.wait_readable(self._notices.fileno(), _START_TIMEOUT_S)
            notice = self._notices.recv(4096)


@contextlib.contextmanager
def daemon(directory: Path, configuration: str) -> Iterator[SupervisedDaemon]:
    """A supervised daemon whose sockets are in `directory`/run, from ready to stopped. May be had again after that."""
    (directory / "run").mkdir(mode=0o750, exist_ok=True)
    (directory / "notify.sock").unlink(missing_ok=True)
    path = directory / "kvcached.toml"
    path.write_text(configuration)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(directory / "notify.sock"))
        program = SupervisedDaemon(path, directory, notices)
        try:
            program.wait_ready()
            yield program
        finally:
            program.stop()


@contextlib.contextmanager
def engine(directory: Path, options: list[str]) -> Iterator[Program]:
    """The example engine, from ready to killed."""
    program = Program("engine", ["examples.llama_engine", "serve", *options], directory)
    try:
        _receive(program, _START_TIMEOUT_S)
        yield program
    finally:
        program.kill()


def send(program: Program, prompt: list[int], *, output_tokens: int) -> None:
    """Give an engine a prompt, and do not wait for its answer."""
    line = msgspec.json.encode([{"prompt": prompt, "max_tokens": output_tokens, "logits": True}])
    try:
        program.stdin.write(line + b"\n")
        program.stdin.flush()
    except BrokenPipeError:
        raise program.failure("ended") from None


def ask(program: Program, prompts: list[list[int]], *, output_tokens: int) -> list[Answer]:
    """An engine's answers. One prompt at a time, so that a step holds the same rows whenever they are asked.

    Raises:
        DemoError: the engine ended, or its answer cannot be read.
    """
    answers = []
    for prompt in prompts:
        send(program, prompt, output_tokens=output_tokens)
        line = _receive(program, _ANSWER_TIMEOUT_S)
        try:
            answers += msgspec.json.decode(line, type=list[Answer])
        except msgspec.DecodeError as error:
            raise DemoError(f"the engine answered {line[:200]!r}: {error}") from None
    return answers


def _receive(program: Program, timeout_s: float) -> bytes:
    program.wait_readable(program.stdout.fileno(), timeout_s)
    line = program.stdout.readline()
    if not line:
        raise program.failure("ended")
    return line
