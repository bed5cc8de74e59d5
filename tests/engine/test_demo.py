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

import pytest

from kvcached import demo


def test_demo_without_torch_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where torch is missing nothing is started, and the message says how to get it."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else object())
    assert demo.run_demo(json_output=True) == 3
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "make env, or pip install torch" in printed.err.replace("\n", " ")


def test_demo_without_the_examples_says_where_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """An installed daemon has no examples beside it; the message says to use a checkout."""
    monkeypatch.setattr(demo, "_ROOT", tmp_path)
    assert demo.run_demo(json_output=False) == 3
    assert "checkout" in capsys.readouterr().err


def test_demo_never_imports_torch() -> None:
    """The demo's own process stays without torch: the engine is a program of its own."""
    code = "import sys, kvcached.demo; sys.exit('torch' in sys.modules)"
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


def test_demo_table_fits_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With times of ten seconds and more, 80 columns show every cell of the final table in one line per round."""
    monkeypatch.setenv("COLUMNS", "80")
    rounds = [round_of("host", [1024, 1024], [1024, 1024])] * 3

    demo._print_table(demo.Report(2, [1025, 1025], 16, 1.0, rounds, outputs_identical=False))

    lines = [line for line in capsys.readouterr().out.splitlines() if "A restarted" in line]
    assert len(lines) == 3
    assert all("12346 ms  23457 ms" in line and line.count("1024  1024") == 2 for line in lines)
    assert all(len(line) <= 80 and line.count("differ") == 2 for line in lines)


def round_of(source: demo.Source, hit_tokens: list[int], loaded_tokens: list[int]) -> demo.Round:
    return demo.Round(
        name="A restarted",
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
    source: demo.Source, hit_tokens: list[int], loaded_tokens: list[int], hits: bool
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
@pytest.mark.parametrize("tp", [1, 2])
def test_demo_outputs_are_identical(tp: int) -> None:
    """Hits in all tiers, for whoever comes next, after the daemon's SIGKILL and its stop, give the cold outputs."""
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "kvcached", "demo", "--json", "--tp", str(tp)]
    finished = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    report = json.loads(finished.stdout)
    assert report["outputs_identical"] is True
    cold, *warm = report["rounds"]
    assert cold["hit_tokens"] == [0, 0]
    rounds = {each["name"]: each for each in warm}
    assert rounds.pop("no daemon")["hit_tokens"][0] == 0  # it may be back for the second prompt
    assert [name for name, each in rounds.items() if each["hit_tokens"] != [1024, 1024]] == ["own memory"]
    assert {name: each["loaded_tokens"] for name, each in rounds.items()} == {
        "device hit": [0, 0],
        "host hit": [1024, 1024],
        "A restarted": [0, 0],
        "replica B": [1024, 1024],
        "own memory": [0, 0],
        "its host hit": [1024, 1024],
        "daemon back": [1024, 1024],
        "from disk": [1024, 1024],
    }
