"""The commands that change what a daemon does, against an `Admin` that answers as told."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached.cli.main import ExitCode, main
from kvcached_client import DaemonFailure, ErrorCode
from kvcached_client.protocol.admin import LocalDisk, StorageReport
from kvcached_client.protocol.engine import (
    CheckReport,
    Drained,
    HealthPart,
    HealthReport,
    LogLevelSet,
    NamespaceCleared,
    Paused,
    PolicySet,
    Resumed,
    Slept,
    Woken,
)
from kvcached_client.types import WritePolicy
from tests.project.admins import FakeAdmin
from tests.project.test_cli import REPLIES

CLEARED = NamespaceCleared(
    id=1, replicas=("a", "b"), generation=3, namespace=b"n" * 32, label="", weights_version="step 9", blocks=40
)
CLEARED_SPACE = NamespaceCleared(
    id=1, replicas=(), generation=4, namespace=b"n" * 32, label="tiny\n", weights_version="", blocks=7
)
POLICY = PolicySet(
    id=1,
    replicas=("a", "b"),
    namespace="0011223344556677",
    label="",
    policy=WritePolicy.WRITE_BACK,
    before=WritePolicy.NEVER,
)
PAUSED = Paused(id=1, under_way=0, holds=True)
DRAINED = Drained(id=1, leases=0, copies=0, requests=0, holds=True)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake = FakeAdmin()
    monkeypatch.setattr(kvcached_client, "Admin", fake)
    return fake


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize(
    ("arguments", "reply", "asked", "printed"),
    [
        (["pause"], PAUSED, ("pause", ("",), {"deadline_ms": 5000}), "paused; copies in flight: 0"),
        (
            ["pause", "--replica", "a", "--deadline-ms", "70"],
            PAUSED,
            ("pause", ("a",), {"deadline_ms": 70}),
            "paused; copies in flight: 0",
        ),
        (["resume"], Resumed(id=1, state="serving"), ("resume", ("",), {}), "resumed; the daemon is serving"),
        (
            ["drain"],
            DRAINED,
            ("drain", (), {"deadline_ms": 5000}),
            "draining; left: 0 leases, 0 copies, 0 waiting requests",
        ),
        (["clear", "a"], CLEARED, ("clear", ("a",), {"deadline_ms": 60_000}), "40 blocks of a, b; generation 3"),
        (
            ["clear", "tiny"],
            CLEARED_SPACE,
            ("clear", ("tiny",), {"deadline_ms": 60_000}),
            f"7 blocks of tiny\\n ({'6e' * 8}); generation 4",
        ),
        (
            ["set-weights", "a", "step 9"],
            CLEARED,
            ("set_weights", ("a", "step 9"), {"deadline_ms": 60_000}),
            "weights step 9 of a, b; 40 blocks; generation 3",
        ),
        (
            ["set-policy", "a", "write_back"],
            POLICY,
            ("set_policy", ("a", WritePolicy.WRITE_BACK), {}),
            "write policy of a, b (0011223344556677): write_back, was never",
        ),
        (
            ["sleep", "a", "--deadline-ms", "0"],
            Slept(id=1, replicas=("a", "b"), blocks=7, dropped=2),
            ("sleep", ("a",), {"deadline_ms": 0}),
            "asleep: a, b; of 7 blocks 2 are dropped",
        ),
        (
            ["set-log-level", "debug"],
            LogLevelSet(id=1, level="debug", before="info"),
            ("set_log_level", ("debug",), {}),
            "log level: debug, was info",
        ),
        (["wake", "a"], Woken(id=1, replicas=("a",)), ("wake", ("a",), {"deadline_ms": 120_000}), "awake: a"),
    ],
    ids=lambda value: "-".join(value[:3]) if isinstance(value, list) else "",
)
def test_cli_asks_and_tells_what_was_done(
    arguments: list[str], reply: Any, asked: object, printed: str, admin: FakeAdmin
) -> None:
    """Each command asks for what it says, prints it in a line, and with --json prints the reply."""
    admin.reply = reply
    result, as_json = run(*arguments), run(*arguments, "--json")

    assert admin.asked == [asked, asked]
    assert (result.exit_code, result.stdout) == (ExitCode.OK, f"{printed}\n")
    assert set(json.loads(as_json.stdout)) == set(reply.__struct_fields__) - {"id"}


@pytest.mark.parametrize("output", [[], ["--json"]])
@pytest.mark.parametrize(
    ("command", "reply"),
    [
        ("pause", Paused(id=1, under_way=2, holds=True)),
        ("pause", Paused(id=1, under_way=0, holds=False)),
        ("drain", Drained(id=1, leases=1, copies=0, requests=0, holds=True)),
        ("drain", Drained(id=1, leases=0, copies=0, requests=0, holds=False)),
    ],
)
def test_cli_exit_code_tells_that_something_is_left(
    command: str, reply: Any, output: list[str], admin: FakeAdmin
) -> None:
    """What is still held at the deadline, and a pause or drain that somebody has ended, make the exit code 1."""
    admin.reply = reply

    assert run(command, *output).exit_code == ExitCode.UNHEALTHY


@pytest.mark.parametrize(
    ("blocks", "size_bytes", "capacity_bytes", "line"),
    [
        (49, 3 << 20, 8 << 20, "49 blocks, 3 of 8 MiB"),
        (49, -1, -1, "49 blocks"),
        (-1, 3 << 20, -1, "3 MiB"),
        (49, -1, 8 << 20, "49 blocks, 8 MiB at most"),
        (-1, -1, -1, "counted 1"),
    ],
)
def test_cli_storage_leaves_out_what_the_backend_does_not_know(
    blocks: int, size_bytes: int, capacity_bytes: int, line: str, admin: FakeAdmin
) -> None:
    """How full storage is stands there as far as it is known, and no figure of -1."""
    admin.reply = StorageReport(
        id=1, backend="disk", state="ready", why="", backup="every", restarts=0,
        blocks=blocks, size_bytes=size_bytes, capacity_bytes=capacity_bytes, counters={"counted": 1},
    )  # fmt: skip
    printed = run("storage").stdout

    assert printed.splitlines()[1] == line
    assert "-1" not in printed


def test_cli_storage_says_when_clears_of_others_were_followed(admin: FakeAdmin) -> None:
    """Of storage that several machines share."""
    admin.reply = StorageReport(
        id=1, backend="redis", state="detached", why="", backup="every", restarts=0,
        blocks=-1, size_bytes=-1, capacity_bytes=-1, counters={}, record_age_ms=61_000,
    )  # fmt: skip

    assert "what they clear was last followed 61 s ago" in run("storage").stdout


def test_cli_storage_tells_of_the_local_disk(admin: FakeAdmin) -> None:
    """How full it is, beside the service, and what it was good for."""
    admin.reply = StorageReport(
        id=1, backend="s3", state="ready", why="", backup="every", restarts=0,
        blocks=-1, size_bytes=-1, capacity_bytes=-1, counters={},
        local_disk=LocalDisk(blocks=5, size_bytes=3 << 20, capacity_bytes=8 << 20, read_blocks=7),
    )  # fmt: skip

    (_, line) = run("storage").stdout.splitlines()
    assert line == "local disk: 5 blocks, 3 of 8 MiB; 7 blocks read from it and not from s3"


def test_cli_set_weights_says_why_it_was_refused(admin: FakeAdmin) -> None:
    """A refusal is on stderr with what to do, and the exit code is 1: the same command again may work."""
    admin.reply = DaemonFailure(ErrorCode.CLEARING, "the namespace is being cleared", "try again in a moment")
    result = run("set-weights", "a", "step 9")

    assert (result.exit_code, result.stdout) == (ExitCode.UNHEALTHY, "")
    assert "try again in a moment" in result.stderr


HOSTILE = "v\x1b]0;title\x07\nkvcached: forged"
READ_ONLY = StorageReport(
    id=1, backend="s3", state="read_only", why=HOSTILE, backup="every", restarts=0,
    blocks=-1, size_bytes=-1, capacity_bytes=-1, counters={},
)  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "reply"),
    [
        (["set-weights", "a", "v"], msgspec.structs.replace(CLEARED, weights_version=HOSTILE)),
        (
            ["describe"],
            msgspec.structs.replace(
                REPLIES["describe"],
                replicas=(msgspec.structs.replace(REPLIES["describe"].replicas[0], weights_version=HOSTILE),),
            ),
        ),
        (["storage"], READ_ONLY),
        (["storage"], msgspec.structs.replace(READ_ONLY, state="failed")),
        (["health"], HealthReport(id=1, ok=False, parts=(HealthPart(part="x", ok=False, detail=HOSTILE),))),
        (["check"], CheckReport(id=1, ok=False, violations=(HOSTILE,))),
        (["pause"], DaemonFailure(ErrorCode.INTERNAL, HOSTILE, "")),
    ],
)
def test_cli_shows_a_reply_on_its_own_line(arguments: list[str], reply: Any, admin: FakeAdmin) -> None:
    """Text in a reply that drives a terminal, or looks like a line of its own, is shown escaped."""
    admin.reply = reply
    printed = CliRunner().invoke(main, arguments, color=True).output

    assert r"v\x1b]0;title\x07" in printed
    assert not {"\x1b", "\x07"} & set(printed)
    if arguments != ["pause"]:  # a message of several lines may be the program's own: each has the program's name
        assert "\nkvcached: forged" not in printed


def test_cli_says_an_error_of_several_lines_in_as_many(admin: FakeAdmin) -> None:
    """Each line of an error stands on a line of stderr, behind the program's name."""
    admin.reply = DaemonFailure(ErrorCode.INTERNAL, "one\ntwo\rthree", "wait")

    assert run("resume").stderr == "kvcached: internal: one\nkvcached: two\\rthree (wait)\n"
