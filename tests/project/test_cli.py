from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached import VERSION
from kvcached.cli import ExitCode, main
from kvcached_client import DaemonFailure, DaemonUnreachable, DeadlineExceeded, ErrorCode
from kvcached_client.layout import KvGroup, Layout
from kvcached_client.protocol import (
    CheckReport,
    Description,
    HealthPart,
    HealthReport,
    PoolStats,
    ReplicaInfo,
    StatsReport,
)
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

GOOD = str(ROOT / "configs/cpu-tp2.toml")
LAYOUT = Layout(
    block_size=16, shards=2, groups=(KvGroup(layers=1, kv_heads=1, head_dim=8, v_head_dim=8, dtype="float32"),)
)
REPLIES: dict[str, Any] = {
    "health": HealthReport(id=1, ok=True, parts=(HealthPart(part="default/acquire", ok=True),)),
    "check": CheckReport(id=1, ok=True, violations=()),
    "stats": StatsReport(
        id=1,
        daemon_epoch=1,
        uptime_ms=1,
        sessions=1,
        runs=2,
        cached_blocks=3,
        pools=(
            PoolStats(
                replica="default",
                epoch=1,
                slots=8,
                states={"free": 5, "cached": 3},
                evictable=3,
                leases=0,
                session=1,
                healthy=True,
            ),
        ),
        counters={"requests": 4},
    ),
    "describe": Description(
        id=1,
        version=VERSION,
        protocol_min=1,
        protocol_max=1,
        daemon_epoch=1,
        pid=1,
        replicas=(
            ReplicaInfo(
                name="default",
                layout=LAYOUT,
                fingerprint=LAYOUT.fingerprint(),
                slots=8,
                bytes_per_block=1024,
                device="cpu",
                model="m",
                key_algorithm="blake3",
            ),
        ),
        limits={"header_bytes": 16384},
    ),
}


class FakeAdmin:
    """An `Admin` that answers every question with `reply`, or raises it."""

    reply: Any = None

    @classmethod
    def connect(cls, run_dir: Path | None, *, deadline_ms: int) -> FakeAdmin:
        return cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Any:
        def answer() -> Any:
            if isinstance(self.reply, Exception):
                raise self.reply
            return self.reply

        return answer


@pytest.fixture
def fake_admin(monkeypatch: pytest.MonkeyPatch) -> type[FakeAdmin]:
    """Put `FakeAdmin` in the client's place."""
    monkeypatch.setattr(kvcached_client, "Admin", FakeAdmin)
    return FakeAdmin


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", REPLIES)
def test_cli_prints_a_reply_as_json(command: str, fake_admin: type[FakeAdmin]) -> None:
    """With --json a command prints one JSON document on stdout, the reply without its transport fields."""
    fake_admin.reply = REPLIES[command]

    result = run(command, "--json")

    printed = json.loads(result.stdout)
    assert result.exit_code == ExitCode.OK
    assert set(printed) == set(REPLIES[command].__struct_fields__) - {"id"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("health", ["ok    default/acquire"]),
        ("check", ["no violations"]),
        ("stats", ["cached blocks: 3\n", "replica default\n", "session:   1\n", "free:      5\n", "requests: 4\n"]),
        ("describe", [f"version:      {VERSION}", LAYOUT.fingerprint(), "header_bytes: 16384\n"]),
    ],
)
def test_cli_prints_a_reply_for_people(command: str, expected: list[str], fake_admin: type[FakeAdmin]) -> None:
    """Without --json a command prints the same for people."""
    fake_admin.reply = REPLIES[command]

    result = run(command)

    assert [text for text in expected if text not in result.stdout] == []


@pytest.mark.parametrize("command", ["stats", "describe"])
def test_cli_cuts_nothing_at_80_columns(
    command: str, fake_admin: type[FakeAdmin], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every name and value of a report is in a line that 80 columns hold, however large the figures are."""
    large = (1 << 63) - 1
    pool = msgspec.structs.replace(REPLIES["stats"].pools[0], slots=large, states={"quarantined": large}, leases=large)
    replica = msgspec.structs.replace(
        REPLIES["describe"].replicas[0], name="r" * 32, slots=large, bytes_per_block=large
    )
    large_replies = {
        "stats": msgspec.structs.replace(REPLIES["stats"], pools=(pool,), counters={"errors_unknown_session": large}),
        "describe": msgspec.structs.replace(REPLIES["describe"], replicas=(replica,)),
    }
    monkeypatch.setenv("COLUMNS", "80")
    fake_admin.reply = large_replies[command]

    lines = run(command).stdout.splitlines()

    assert max(map(len, lines)) <= 80
    assert sum(str(large) in line for line in lines) == {"stats": 4, "describe": 2}[command]


@pytest.mark.parametrize(
    ("command", "reply", "printed"),
    [
        (
            "health",
            HealthReport(id=1, ok=False, parts=(HealthPart(part="w", ok=False, detail="hung"),)),
            "FAIL  w: hung",
        ),
        ("check", CheckReport(id=1, ok=False, violations=("slot 3 in two states",)), "slot 3 in two states"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_cli_exit_code_tells_that_something_is_wrong(
    command: str,
    reply: HealthReport | CheckReport,
    printed: str,
    arguments: list[str],
    fake_admin: type[FakeAdmin],
) -> None:
    """An unhealthy part and a broken invariant are printed, and the exit code is 1."""
    fake_admin.reply = reply

    result = run(command, *arguments)

    assert result.exit_code == ExitCode.UNHEALTHY
    assert printed in result.stdout or arguments


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (DaemonUnreachable("nothing there"), ExitCode.UNREACHABLE),
        (DeadlineExceeded("too late"), ExitCode.UNREACHABLE),
        (DaemonFailure(ErrorCode.INTERNAL, "oops", "see the log"), ExitCode.UNHEALTHY),
    ],
)
def test_cli_exit_code_tells_errors_apart(error: Exception, code: ExitCode, fake_admin: type[FakeAdmin]) -> None:
    """No answer and a daemon that fails have different exit codes; the reason is on stderr, nothing on stdout."""
    fake_admin.reply = error

    result = run("health")

    assert (result.exit_code, result.stdout) == (code, "")
    assert str(error) in result.stderr


def test_cli_without_a_daemon_is_unreachable(tmp_path: Path) -> None:
    """Against a run directory without a daemon, a command ends with exit code 4 at its deadline."""
    result = run("health", "--run-dir", str(tmp_path), "--deadline-ms", "100")

    assert result.exit_code == ExitCode.UNREACHABLE


def test_cli_with_an_impossible_run_dir_is_wrong_usage() -> None:
    """A run directory whose sockets no path could name is wrong usage, not a missing daemon."""
    assert run("stats", "--run-dir", f"/{'x' * 200}").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["serve"],
        ["serve", "--config", "/no/such/file.toml"],
        ["check-config", "--config", GOOD, "--run-dir", "relative"],
        ["check-config", "--config", GOOD, "--log-level", "loud"],
        ["health", "--deadline-ms", "0"],
        ["demo", "--tp", "3"],
    ],
)
def test_cli_wrong_usage_exits_with_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong usage and wrong configuration exit with 2 and say why on stderr."""
    monkeypatch.delenv("KVCACHED_CONFIG", raising=False)

    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr


def test_cli_check_config_prints_effective_values_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """check-config prints what is in effect, options and variables included, and what it comes to."""
    monkeypatch.setenv("KVCACHED_REPLICA__0__SLOTS", "32")

    result = run("check-config", "--config", GOOD, "--run-dir", "/run/x", "--json")

    printed = json.loads(result.stdout)
    assert (printed["config"]["run_dir"], printed["config"]["session_ttl_ms"]) == ("/run/x", 30000)
    assert (printed["figures"][0]["slots"], printed["figures"][0]["tokens"]) == (32, 512)
    text = run("check-config", "--config", GOOD, "--run-dir", "/run/x").stdout
    assert 'run_dir = "/run/x"' in text
    assert "tokens 512" in text


def test_cli_serve_that_cannot_start_exits_with_3(tmp_path: Path) -> None:
    """A daemon that cannot start says why on stderr and exits with 3."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    result = subprocess.run(
        [sys.executable, "-m", "kvcached", "serve", "--config", GOOD, "--run-dir", str(in_the_way / "run")],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (result.returncode, result.stdout) == (ExitCode.START_FAILED, "")
    assert str(in_the_way) in result.stderr
    assert "Traceback" not in result.stderr


def test_cli_version_imports_neither_client_nor_configuration() -> None:
    """`kvcached version` prints the version without loading what it does not need."""
    code = "import sys; sys.argv[1:] = ['version']; from kvcached.cli import main; main(standalone_mode=False);"
    code += "print([name for name in ('zmq', 'pydantic', 'numpy', 'rich', 'torch') if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout.split("\n")[:2] == [VERSION, "[]"]


def test_cli_has_the_option_version() -> None:
    """`kvcached --version` prints what `kvcached version` prints."""
    assert run("--version").stdout == run("version").stdout == f"{VERSION}\n"


@pytest.mark.parametrize("module", ["click", "pydantic", "kvcached.daemon"])
def test_cli_interrupted_exits_with_130(module: str, tmp_path: Path) -> None:
    """Ctrl-C while the command is still being imported, and later, ends it with 130 and without a traceback."""
    code = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["serve", "--config", {GOOD!r}, "--run-dir", {str(tmp_path / "run")!r}]
from kvcached.__main__ import run
run()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, timeout=30, check=False
    )

    assert (result.returncode, result.stdout, result.stderr) == (ExitCode.INTERRUPTED, b"", b"")
    assert not (tmp_path / "run").exists()


def test_cli_help_shows_defaults_and_variables() -> None:
    """--help shows each option's default, and the variable where there is one."""
    text = run("health", "--help").stdout

    assert "default: 5000" in text
    assert "KVCACHED_RUN_DIR" in text
    assert "XDG_RUNTIME_DIR" in text


def test_cli_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvcached demo` passes its options to the demo and exits with what the demo returns."""
    calls: list[dict[str, object]] = []
    import kvcached.demo  # noqa: PLC0415 - the module whose function is replaced

    def fake_demo(**options: object) -> int:
        calls.append(options)
        return 1

    monkeypatch.setattr(kvcached.demo, "run_demo", fake_demo)

    assert run("demo", "--tp", "1", "--json").exit_code == 1
    assert calls == [{"json_output": True, "tp": 1}]
