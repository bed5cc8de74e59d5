"""`kvcached demo`, whole, and what it says where it cannot run."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from examples.demo import run as demo
from examples.demo.programs import Program, SupervisedDaemon
from examples.demo.report import (
    COLD,
    DAEMON_BACK,
    DAEMON_KILLED,
    DEVICE,
    DISK,
    ENGINE_KILLED,
    HOST,
    OWN_COLD,
    OWN_HOST,
    REPLICA,
    Report,
    Round,
    Source,
    bars,
    print_report,
    sentence,
)


def test_demo_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torch is missing nothing is started, and the message says how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert demo.run_demo(json_output=True) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "make env, or pip install torch" in printed.err.replace("\n", " ")


def test_demo_never_imports_torch() -> None:
    """The demo's own process stays without torch: the engine is a program of its own."""
    code = "import sys, examples.demo.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_demo_in_too_deep_a_directory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where sockets would have paths too long for the kernel nothing is started, and the message names TMPDIR."""
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    assert demo.run_demo(json_output=True) == 3
    assert "set TMPDIR to a shorter path" in capsys.readouterr().err.replace("\n", " ")
    assert list(deep.iterdir()) == []


def test_demo_without_a_temporary_directory_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Where no temporary directory can be made nothing is started, and the message names TMPDIR."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: object())

    assert demo.run_demo(json_output=True) == 3
    assert "TMPDIR" in capsys.readouterr().err.replace("\n", " ")


KINDS = (COLD, DEVICE, HOST, ENGINE_KILLED, REPLICA, OWN_COLD, OWN_HOST, DAEMON_KILLED, DAEMON_BACK, DISK)


def report_of(*, outputs_identical: bool = True) -> Report:
    rounds = [
        msgspec.structs.replace(round_of("host", [1024, 1024], [1024, 1024]), name=kind.name, meaning=kind.meaning)
        for kind in KINDS
    ]
    return Report(2, [1025, 1025], 16, 1.0, rounds, outputs_identical)


def test_demo_report_fits_a_narrow_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With times of ten seconds and more, 80 columns show every cell of the table, and every bar, in a line each."""
    monkeypatch.setenv("COLUMNS", "80")

    print_report(report_of(outputs_identical=False))

    lines = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 80 for line in lines)
    for kind in KINDS:
        (row,) = [line for line in lines if line.startswith(f"│ {kind.name} ")]
        assert "12346 ms  23457 ms" in row
        assert (row.count("1024  1024"), row.count("differ")) == (2, 1)
        assert any(line.startswith(kind.meaning) and "17901 ms" in line for line in lines)


def test_demo_bars_are_as_long_as_their_times() -> None:
    """The longest time has the longest bar, a time of a quarter a quarter of it, and the shortest one is still seen."""
    times = (1000.0, 250.0, 0.1)
    rounds = [msgspec.structs.replace(round_of("host", [1], [1]), first_token_ms=[time]) for time in times]

    lengths = [line.partition(" ms  ")[2] for line in bars(rounds)]

    assert (len(lengths[0]), lengths[0].count("█"), lengths[2]) == (26, 26, "▏")
    assert lengths[1] == "█" * 6 + "▌"


def test_demo_ends_with_one_sentence_of_what_it_showed() -> None:
    """The sentence names the time of each thing that was survived, and whether the outputs are the same."""
    report = report_of()
    rounds = {each.name: each for each in report.rounds}
    rounds[DISK.name] = msgspec.structs.replace(rounds[DISK.name], first_token_ms=[80.0, 88.0])

    told = sentence(msgspec.structs.replace(report, rounds=list(rounds.values())))

    assert told.startswith("First token 17901 ms → 17901 ms from the cache; after SIGKILL of the engine 17901 ms;")
    assert told.endswith("from disk after a restart of everything 84 ms; all outputs are identical.")
    assert sentence(report_of(outputs_identical=False)).endswith("OUTPUTS DIFFER.")


def test_demo_keeps_a_killed_daemon_down(tmp_path: Path) -> None:
    """While its supervisor is held it is stopped, so that it starts nothing; afterwards it goes on."""
    program = Program("any", ["code"], tmp_path)  # any program will do: this one ends with its input
    with SupervisedDaemon.kept_down(program):  # type: ignore[arg-type]
        assert Path(f"/proc/{program.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    program.process.communicate(timeout=30)
    assert program.process.returncode == 0


def test_killed_group_is_dead_when_kill_returns(tmp_path: Path) -> None:
    """Not only the program itself: while a child of it dies, a successor would be refused the child's device pool."""
    program = Program("any", ["tests.engine.large_child"], tmp_path)
    pidfd = os.pidfd_open(int(program.stdout.readline()))
    try:
        program.kill()
        assert select.select([pidfd], [], [], 0)[0]
    finally:
        os.close(pidfd)


def round_of(source: Source, hit_tokens: list[int], loaded_tokens: list[int]) -> Round:
    return Round(
        name="engine killed",
        meaning="engine killed",
        replica="a",
        source=source,
        first_token_ms=[12345.6, 23456.7],
        hit_tokens=hit_tokens,
        loaded_tokens=loaded_tokens,
        tokens_equal=False,
        logits_equal=False,
    )


@pytest.mark.parametrize(
    ("source", "hit_tokens", "loaded_tokens", "hits"),
    [
        ("computed", [0, 0], [0, 0], True),
        ("computed", [0, 1024], [0, 1024], False),
        ("device", [1024, 1024], [0, 0], True),
        ("device", [1024, 0], [0, 0], False),
        ("device", [1024, 1024], [0, 16], False),
        ("host", [1024, 1024], [1024, 16], True),
        ("host", [1024, 1024], [1024, 0], False),
        ("disk", [1024, 1024], [1024, 1024], True),
        ("disk", [0, 0], [0, 0], False),
    ],
)
def test_demo_knows_a_round_that_missed(
    source: Source, hit_tokens: list[int], loaded_tokens: list[int], hits: bool
) -> None:
    """A round hits only if every one of its prompts was found in the tier that the round is about."""
    assert round_of(source, hit_tokens, loaded_tokens).hits is hits


@contextmanager
def demo_with_daemon() -> Iterator[tuple[subprocess.Popen[str], int, Path]]:
    """A demo whose daemon is ready: the demo, the daemon's pid, and the folder that holds its temporary directory."""
    pytest.importorskip("torch")
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a nohup around these tests is not meant for the demo
    with (
        tempfile.TemporaryDirectory() as directory,  # a short path, for the sockets
        subprocess.Popen(
            [sys.executable, "-m", "kvcached", "demo", "--tp", "1", "--json"],
            env={**os.environ, "TMPDIR": directory},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        ) as process,
    ):
        signal.signal(signal.SIGHUP, before)
        assert process.stderr is not None
        try:
            said = process.stderr.readline()
            ready = re.match(r"daemon ready, pid (\d+): replicas a and b", said)
            assert ready is not None, said
            yield process, int(ready[1]), Path(directory)
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("number", "status"),
    [
        (signal.SIGTERM, 143),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 129, marks=pytest.mark.slow),
    ],
    ids=lambda value: value,
)
def test_demo_ended_by_a_signal_leaves_nothing(number: signal.Signals, status: int) -> None:
    """A signal that ends the demo ends its daemon and workers first and removes its files; the status names it."""
    with demo_with_daemon() as (process, daemon, directory):
        family = [daemon, *map(int, Path(f"/proc/{daemon}/task/{daemon}/children").read_text().split())]
        assert len(family) == 4  # the daemon, two workers, the storage process

        process.send_signal(number)
        _, said = process.communicate(timeout=30)

        assert (process.returncode, [pid for pid in family if Path(f"/proc/{pid}").exists()]) == (status, [])
        assert list(directory.iterdir()) == []
        assert "Traceback" not in said


def test_demo_that_is_killed_takes_its_daemon_along() -> None:
    """A demo that gets a SIGKILL leaves no daemon behind: the kernel tells the daemon to end."""
    with demo_with_daemon() as (process, daemon, _):
        pidfd = os.pidfd_open(daemon)
        process.kill()
        readable, _, _ = select.select([pidfd], [], [], 30)
        os.close(pidfd)

        assert readable


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_demo_outputs_are_identical() -> None:
    """Hits in all tiers, for whoever comes next, after the daemon's SIGKILL and its stop, give the cold outputs."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "kvcached", "demo", "--json", "--tp", "1"]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report = json.loads(finished.stdout)
    assert report["outputs_identical"] is True
    cold, *warm = report["rounds"]
    assert cold["hit_tokens"] == [0, 0]
    rounds = {each["name"]: each for each in warm}
    computed = [name for name, each in rounds.items() if each["hit_tokens"] == [0, 0]]
    assert computed == ["own memory, cold", "daemon killed"]
    assert [name for name, each in rounds.items() if each["hit_tokens"] != [1024, 1024]] == computed
    assert {name: each["loaded_tokens"] for name, each in rounds.items()} == {
        "again": [0, 0],
        "evicted": [1024, 1024],
        "engine killed": [0, 0],
        "second replica": [1024, 1024],
        "own memory, cold": [0, 0],
        "own memory, again": [1024, 1024],
        "daemon killed": [0, 0],
        "daemon back": [1024, 1024],
        "all restarted": [1024, 1024],
    }
