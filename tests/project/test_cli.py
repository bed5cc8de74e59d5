from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Self

import msgspec
import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached import VERSION
from kvcached.cli import ExitCode, main
from kvcached_client import DaemonFailure, DaemonUnreachable, DeadlineExceeded, ErrorCode, Refused
from kvcached_client.layout import KvGroup, Layout
from kvcached_client.protocol import (
    BlockPlace,
    CheckReport,
    Description,
    HealthPart,
    HealthReport,
    HostStats,
    InspectReport,
    PoolStats,
    ReplicaInfo,
    StatsReport,
    TreeNode,
    TreeReport,
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
        state="serving",
        attached_paused=False,
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
                degraded=False,
                restarts=2,
                paused=False,
                pinned=0,
            ),
        ),
        hosts=(
            HostStats(
                namespace="0123456789abcdef",
                replicas=("default", "second"),
                label="",
                generation=0,
                sessions=0,
                leases=0,
                slots=682,
                slabs=1,
                write_policy="write_through",
                pinned=0,
                states={"free": 300, "cached": 41, "filling": 0, "quarantined": 0, "absent": 341},
            ),
        ),
        transfers={"queued_loads": 0, "running_stores": 2},
        counters={"requests": 4},
    ),
    "describe": Description(
        id=1,
        version=VERSION,
        protocol_min=1,
        protocol_max=1,
        daemon_epoch=1,
        state="serving",
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
                namespace="01" * 32,
                generation=0,
                weights_version="",
            ),
        ),
        attached=None,
        limits={"header_bytes": 16384},
    ),
    "inspect": InspectReport(
        id=1,
        found=True,
        namespace="0123456789abcdef",
        depth=6,
        run_start=4,
        run_blocks=12,
        parent=bytes(range(16)),
        children=2,
        places=(BlockPlace(tier="default", slot=7, state="cached"), BlockPlace(tier="host", slot=9, state="filling")),
        leases=("request-1",),
        transfers=("store 3 of replica default, running",),
    ),
}
KEY = "0f" * 16
ARGUMENTS = {"inspect": [KEY]}


def tree_node(level: int, start: int, blocks: int, **fields: Any) -> TreeNode:
    """A run that replica a holds whole."""
    defaults = {"tiers": {"a": blocks}, "loading": 0, "pins": 0, "children": 0, "hidden": 0}
    return TreeNode(level=level, key=bytes([level]) * 16, start=start, blocks=blocks, **{**defaults, **fields})


TREE = (
    TreeReport(id=1, runs=9, blocks=1234, shown=4),
    [
        TreeNode(
            level=0,
            key=b"n" * 32,
            start=0,
            blocks=0,
            tiers={"a": 0, "host": 0},
            loading=0,
            pins=0,
            children=1,
            hidden=0,
        ),
        tree_node(1, 0, 740, children=7, hidden=5, tiers={"a": 740, "host": 738}),
        tree_node(2, 740, 12, tiers={"a": 4, "host": 12}, loading=3, pins=2),
        tree_node(2, 740, 460, tiers={"host": 460}),
    ],
)


class FakeAdmin:
    """An `Admin` that answers every question with `reply`, or raises it."""

    reply: Any = None
    asked: ClassVar[list[tuple[tuple[Any, ...], dict[str, Any]]]] = []

    @classmethod
    def connect(cls, run_dir: Path | None, *, deadline_ms: int) -> FakeAdmin:
        return cls()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...

    def __getattr__(self, _: str) -> Any:
        def answer(*arguments: Any, **options: Any) -> Any:
            self.asked.append((arguments, options))
            if isinstance(self.reply, Exception):
                raise self.reply
            return self.reply

        return answer


@pytest.fixture
def fake_admin(monkeypatch: pytest.MonkeyPatch) -> type[FakeAdmin]:
    """Put `FakeAdmin` in the client's place."""
    monkeypatch.setattr(kvcached_client, "Admin", FakeAdmin)
    monkeypatch.setattr(FakeAdmin, "asked", [])
    return FakeAdmin


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", REPLIES)
def test_cli_prints_a_reply_as_json(command: str, fake_admin: type[FakeAdmin]) -> None:
    """With --json a command prints one JSON document on stdout, the reply without its transport fields."""
    fake_admin.reply = REPLIES[command]

    result = run(command, *ARGUMENTS.get(command, []), "--json")

    printed = json.loads(result.stdout)
    assert result.exit_code == ExitCode.OK
    assert set(printed) == set(REPLIES[command].__struct_fields__) - {"id"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("health", ["ok    default/acquire"]),
        ("check", ["no violations"]),
        ("stats", ["cached blocks: 3\n", "replica default\n", "session:   1\n", "free:      5\n", "requests: 4\n"]),
        ("stats", ["host pool of default, second\n", "absent:       341\n", "running stores: 2\n"]),
        ("inspect", ["block:           6 of its chain, in the run [4, 16)\n", "copy in host:    slot 9, filling\n"]),
        ("inspect", [f"block before:    {bytes(range(16)).hex()}\n", "  request-1\n", "  store 3 of replica default"]),
        ("describe", [f"version:      {VERSION}", LAYOUT.fingerprint(), "header_bytes: 16384\n"]),
    ],
)
def test_cli_prints_a_reply_for_people(command: str, expected: list[str], fake_admin: type[FakeAdmin]) -> None:
    """Without --json a command prints the same for people."""
    fake_admin.reply = REPLIES[command]

    result = run(command, *ARGUMENTS.get(command, []))

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
        (Refused(ErrorCode.UNKNOWN_REPLICA, "there is no replica 'x'", "configured are: a"), ExitCode.USAGE),
    ],
)
def test_cli_exit_code_tells_errors_apart(error: Exception, code: ExitCode, fake_admin: type[FakeAdmin]) -> None:
    """No answer and a daemon that fails have different exit codes; the reason is on stderr, nothing on stdout."""
    fake_admin.reply = error

    result = run("health")

    assert (result.exit_code, result.stdout) == (code, "")
    assert str(error) in result.stderr


def test_cli_tree_is_a_line_for_each_run(fake_admin: type[FakeAdmin]) -> None:
    """Runs hang on the run that they continue; coverage, loads and pins are named, and what is left out is counted."""
    fake_admin.reply = TREE

    result = run("tree", "--replica", "a", "--levels", "2", "--children", "2")

    assert fake_admin.asked == [(("a",), {"levels": 2, "children": 2})]
    assert [line.strip(" │├└─┣┗━┃") for line in result.stdout.splitlines()] == [
        "namespace 6e6e6e6e6e6e6e6e: a, host",
        f"[0, 740)  a 740/740  host 738/740  {'01' * 16}",
        f"[740, 752)  a 4/12  host 12/12  loading 3  pins 2  {'02' * 16}",
        f"[740, 1200)  host 460/460  {'02' * 16}",
        "+ 5 more",
        "1234 blocks in 9 runs",
    ]
    indents = [len(line) - len(line.lstrip(" │├└─┣┗━┃")) for line in result.stdout.splitlines()]
    assert indents == [0, 4, 8, 8, 8, 0]


def test_cli_tree_as_json_has_keys_in_hex(fake_admin: type[FakeAdmin]) -> None:
    """With --json the report and its nodes are one document, nodes in preorder."""
    fake_admin.reply = TREE

    printed = json.loads(run("tree", "--json").stdout)

    assert fake_admin.asked == [(("",), {"levels": 8, "children": 8})]
    assert (printed["runs"], printed["blocks"], printed["shown"], "id" in printed) == (9, 1234, 4, False)
    assert [node["level"] for node in printed["nodes"]] == [0, 1, 2, 2]
    assert printed["nodes"][2] == {
        "level": 2,
        "key": "02" * 16,
        "start": 740,
        "blocks": 12,
        "tiers": {"a": 4, "host": 12},
        "loading": 3,
        "pins": 2,
        "children": 0,
        "hidden": 0,
    }


def test_cli_inspect_asks_for_the_bytes_of_the_key(fake_admin: type[FakeAdmin]) -> None:
    """The hex digits of a key, in either case, become its bytes; in JSON a key is hex digits again."""
    fake_admin.reply = REPLIES["inspect"]

    printed = json.loads(run("inspect", KEY.upper(), "--json").stdout)

    assert fake_admin.asked == [((bytes.fromhex(KEY),), {})]
    assert printed["parent"] == bytes(range(16)).hex()
    assert printed["places"][1] == {"tier": "host", "slot": 9, "state": "filling"}


def test_cli_inspect_of_an_unknown_block_says_so(fake_admin: type[FakeAdmin]) -> None:
    """A block that is not cached is an answer, not an error."""
    fake_admin.reply = InspectReport(id=1, found=False)

    result = run("inspect", KEY)

    assert (result.exit_code, result.stdout) == (ExitCode.OK, "no copy of this block is in the index\n")


def test_cli_capacity_needs_no_daemon() -> None:
    """Capacity is worked out from the file: both pools, all shards, and what a slab holds."""
    path = str(ROOT / "configs/cpu-host.toml")

    printed = json.loads(run("capacity", "--config", path, "--json").stdout)
    text = run("capacity", "--config", path).stdout

    first, second = printed["replicas"]
    assert (first["replica"], second["replica"], first["namespace"]) == ("a", "b", second["namespace"])
    assert (first["bytes_per_block"], first["device_slots"], first["device_tokens"]) == (196608, 256, 4096)
    assert (first["host_slots_per_slab"], first["host_slots"], first["host_tokens"]) == (341, 4 * 341, 4 * 341 * 16)
    assert (printed["host_bytes"], printed["device_bytes"]) == (256 << 20, 2 * 256 * 196608)
    assert printed["total_bytes"] == printed["host_bytes"] + printed["device_bytes"]
    assert "host slots per slab: 341\n" in text


def test_cli_capacity_counts_all_shards_and_no_host_tier() -> None:
    """A block is as large as its parts on all shards; without a host tier there is no room in it."""
    printed = json.loads(run("capacity", "--config", GOOD, "--json").stdout)

    (replica,) = printed["replicas"]
    assert (replica["bytes_per_block"], replica["device_bytes"]) == (196608, 256 * 196608)
    assert (replica["host_slots_per_slab"], printed["host_slabs"], printed["host_bytes"]) == (0, 0, 0)


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
        ["tree", "--levels", "65"],
        ["tree", "--children", "0"],
        ["inspect"],
        ["inspect", "0f0f"],
        ["inspect", "0x" + "0f" * 15],
        ["inspect", "g" * 32],
        ["capacity"],
        ["capacity", "--config", "/no/such/file.toml"],
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
