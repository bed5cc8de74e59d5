"""A daemon and a supervisor whose log nobody reads any more: a stuck log driver, Ctrl-S in a terminal."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached.cli.main import ExitCode
from kvcached.recovery.supervise import serve_command
from kvcached_client import Admin, Client
from tests.daemon.conftest import CONFIG
from tests.daemon.supervised import Supervised
from tests.project.daemon_process import STOP_TIMEOUT_S, clean_environment
from tests.project.source_tree import ROOT
from tests.project.test_log_reader import fill

#: Lines of more than one mebibyte and a pipe, at level debug.
REQUESTS = 2400


@contextmanager
def running(directory: Path, command: list[str], log: int, terminal: int | None = None) -> Iterator[Supervised]:
    """A daemon or its supervisor from READY on, which logs to this descriptor."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(directory / "notify"))
        environment = {**clean_environment(), "NOTIFY_SOCKET": str(directory / "notify")}
        with subprocess.Popen(command, cwd=ROOT, env=environment, stdin=terminal, stderr=log) as process:
            told = Supervised(directory / "run", process, notices, Path(os.devnull))
            try:
                told.await_ready()
                yield told
            finally:
                process.terminate()
                try:
                    process.wait(STOP_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    process.kill()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """A pipe that nobody reads."""
    read, written = os.pipe()
    yield read, written
    os.close(read)
    os.close(written)


@pytest.fixture
def options(tmp_path: Path) -> list[str]:
    """Options of `serve`."""
    (tmp_path / "kvcached.toml").write_text(CONFIG)
    return ["--config", str(tmp_path / "kvcached.toml"), "--run-dir", str(tmp_path / "run")]


def health(run_dir: Path) -> int:
    """The exit status of `kvcached health`."""
    command = [sys.executable, "-m", "kvcached", "health", "--run-dir", str(run_dir)]
    return subprocess.run(
        command, cwd=ROOT, env=clean_environment(), capture_output=True, timeout=60, check=False
    ).returncode


def read_soon(descriptor: int, pattern: bytes) -> bytes:
    """What is read until the pattern has come."""
    read, end_s = b"", time.monotonic() + STOP_TIMEOUT_S
    while re.search(pattern, read) is None:
        assert select.select([descriptor], [], [], end_s - time.monotonic())[0], read[-1000:]
        read += os.read(descriptor, 1 << 20)
    return read


def test_daemon_serves_without_a_reader_of_its_log(tmp_path: Path, pipe: tuple[int, int], options: list[str]) -> None:
    """At debug, requests fill the log and are answered; who reads again is told how many lines are missing."""
    read, written = pipe
    with running(tmp_path, serve_command([*options, "--log-level", "debug"]), written) as daemon:
        with Client.connect(daemon.run_dir) as client:
            chain = client.chain(range(8))
            for number in range(REQUESTS):
                client.acquire(f"request-{number:0200}", chain).release()
        assert health(daemon.run_dir) == ExitCode.OK

        assert int(re.findall(rb"(\d+) lines were dropped here", read_soon(read, rb"lines were dropped here"))[-1]) > 0


@pytest.mark.slow
def test_hung_daemon_is_replaced_without_a_reader_of_the_log(
    tmp_path: Path, pipe: tuple[int, int], options: list[str]
) -> None:
    """With a log that is full, engines connect, a daemon that hangs is replaced, and SIGTERM ends both in order."""
    policy = json.dumps({"silence_max_s": 4.0, "kill_after_s": 0.2})
    command = [sys.executable, "-m", "tests.recovery.supervised", policy, *serve_command(options)]
    with running(tmp_path, command, pipe[1]) as daemon:
        fill(pipe[1])
        for _ in range(2):  # each says so in the log
            with Client.connect(daemon.run_dir) as client:
                assert client.acquire("request", client.chain(range(8))).granted
        assert health(daemon.run_dir) == ExitCode.OK
        hung = daemon.daemon_pid
        os.kill(hung, signal.SIGSTOP)

        daemon.await_ready()

        assert daemon.daemon_pid != hung
        assert health(daemon.run_dir) == ExitCode.OK
        daemon.process.terminate()
        assert daemon.process.wait(STOP_TIMEOUT_S) == 0


def test_terminal_that_stops_background_output_stops_no_daemon(tmp_path: Path, options: list[str]) -> None:
    """Under `stty tostop`, a supervised daemon starts and logs, though it is in the background of the terminal."""
    ours, theirs = os.openpty()
    attributes = termios.tcgetattr(theirs)
    attributes[3] |= termios.TOSTOP
    termios.tcsetattr(theirs, termios.TCSANOW, attributes)
    command = [sys.executable, "-m", "kvcached", "supervise", *options]
    try:
        with running(
            tmp_path, [sys.executable, "-m", "tests.recovery.on_terminal", *command], theirs, theirs
        ) as daemon:
            with Admin.connect(daemon.run_dir) as admin:
                assert admin.health().ok
            read_soon(ours, rb"kvcached.daemon: ready")
    finally:
        os.close(ours)
        os.close(theirs)
