from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner, Result

import kvcached_client
from kvcached import VERSION
from kvcached.cli.main import SECTIONS, ExitCode, main
from kvcached_client import DaemonFailure, DaemonUnreachable, DeadlineExceeded, ErrorCode, Refused
from kvcached_client.blocks.layout import KvGroup, Layout
from kvcached_client.protocol.engine import (
    BlockPlace,
    CheckReport,
    Description,
    HealthPart,
    HealthReport,
    HitEstimate,
    HostRegistration,
    HostStats,
    InspectReport,
    OffloadInfo,
    PoolStats,
    ReplicaInfo,
    StatsReport,
    TreeNode,
    TreeReport,
)
from kvcached_client.types import Verify
from tests.project.admins import FakeAdmin
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
        offload_paused=False,
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
                state="awake",
                degraded=False,
                restarts=2,
                paused=False,
                pinned=0,
                registered=(HostRegistration(shard=0, registered_bytes=4096, size_bytes=8192, error="refused"),),
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
        offload=None,
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
    TreeReport(id=1, runs=9, blocks=1234, shown=4, deepest=1200, half_depth=617, nine_tenths_depth=1112),
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


#: What `stats` asks for beside its report.
DESCRIPTION = msgspec.structs.replace(
    REPLIES["describe"], offload=OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=2, verify=Verify.ALWAYS)
)


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> FakeAdmin:
    fake = FakeAdmin()
    fake.description = DESCRIPTION
    monkeypatch.setattr(kvcached_client, "Admin", fake)
    return fake


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


@pytest.mark.parametrize("command", REPLIES)
def test_cli_prints_a_reply_as_json(command: str, admin: FakeAdmin) -> None:
    """With --json a command prints one JSON document on stdout, the reply without its transport fields."""
    admin.reply = REPLIES[command]

    result = run(command, *ARGUMENTS.get(command, []), "--json")

    printed = json.loads(result.stdout)
    assert result.exit_code == ExitCode.OK
    assert set(printed) == set(REPLIES[command].__struct_fields__) - {"id"}


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("health", ["ok    default/acquire"]),
        ("check", ["no violations"]),
        (
            "stats",
            [
                "cached blocks: 3 on devices, 41 in host memory\n",
                "replica default\n",
                "session:    1\n",
                "free:       5\n",
                "requests: 4\n",
            ],
        ),
        ("stats", ["registered: shard 0: 4096 of 8192 bytes (refused)\n"]),
        ("stats", ["host pool of default, second\n", "absent:       341\n", "running stores: 2\n"]),
        ("stats", ["\nhost pool\n  slabs:          4\n", "  bytes per slab: 1048576\n"]),
        ("inspect", ["block:           6 of its chain, in the run [4, 16)\n", "copy in host:    slot 9, filling\n"]),
        ("inspect", [f"previous block:  {bytes(range(16)).hex()}\n", "  request-1\n", "  store 3 of replica default"]),
        ("describe", [f"version:      {VERSION}", LAYOUT.fingerprint(), "header_bytes: 16384\n"]),
    ],
)
def test_cli_prints_a_reply_for_people(command: str, expected: list[str], admin: FakeAdmin) -> None:
    """Without --json a command prints the same for people."""
    admin.reply = REPLIES[command]

    result = run(command, *ARGUMENTS.get(command, []))

    assert [text for text in expected if text not in result.stdout] == []


def test_cli_shows_the_host_pool_before_anybody_has_any_of_it(admin: FakeAdmin) -> None:
    """Before the first namespace `stats` says how large the host pool is, and that all of it is free."""
    admin.reply = msgspec.structs.replace(REPLIES["stats"], hosts=())

    assert "\nhost pool\n" in run("stats").stdout
    assert "  free slabs:     4\n" in run("stats").stdout


def test_cli_what_if_shows_sizes_beside_that_of_the_pool(admin: FakeAdmin) -> None:
    """Each namespace has a table of sizes, hits and differences; one without estimates says so."""
    stats, (host,) = REPLIES["stats"], REPLIES["stats"].hosts
    known = msgspec.structs.replace(
        host, asked_blocks=12_345, hit_estimates=(HitEstimate(0.5, 0.25), HitEstimate(1.0, 0.5), HitEstimate(4.0, 0.75))
    )
    other = msgspec.structs.replace(host, namespace="ff" * 8, replicas=(), label="offload")
    admin.reply = msgspec.structs.replace(stats, hosts=(known, other), host_pool_bytes=3 << 30)

    lines = [" ".join(line.split()) for line in run("what-if").stdout.splitlines()]
    assert lines[:5] == [
        "0123456789abcdef (default, second), 12,345 blocks",
        "host pool hits difference",
        "1.5 GiB 25% -25 points",
        "3.0 GiB 50% its size now",
        "12.0 GiB 75% +25 points",
    ]
    assert " ".join(lines[5:]).startswith(f"{'ff' * 8} (offload): too few of its blocks were sampled")
    printed = json.loads(run("what-if", "--json").stdout)
    assert printed["host_pool_bytes"] == 3 << 30
    assert printed["namespaces"][0]["estimates"][2] == {"size_bytes": 12 << 30, "hit_ratio": 0.75}
    assert printed["namespaces"][1] == {
        "namespace": "ff" * 8,
        "name": "offload",
        "asked_blocks": 0,
        "estimates": [],
    }


@pytest.mark.parametrize(("pool_bytes", "words"), [(0, "no host pool: a [host] table"), (1, "no engine has used")])
def test_cli_what_if_without_namespaces_says_why(pool_bytes: int, words: str, admin: FakeAdmin) -> None:
    """Without a host pool, or before its first engine, there is a sentence instead of a table."""
    admin.reply = msgspec.structs.replace(REPLIES["stats"], hosts=(), host_pool_bytes=pool_bytes)
    assert words in run("what-if").stdout


@pytest.mark.parametrize("command", ["stats", "describe"])
def test_cli_cuts_nothing_at_80_columns(command: str, admin: FakeAdmin, monkeypatch: pytest.MonkeyPatch) -> None:
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
    admin.reply = large_replies[command]

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
    admin: FakeAdmin,
) -> None:
    """An unhealthy part and a broken invariant are printed, and the exit code is 1."""
    admin.reply = reply

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
def test_cli_exit_code_tells_errors_apart(error: Exception, code: ExitCode, admin: FakeAdmin) -> None:
    """No answer and a daemon that fails have different exit codes; the reason is on stderr, nothing on stdout."""
    admin.reply = error

    result = run("health")

    assert (result.exit_code, result.stdout) == (code, "")
    assert str(error) in result.stderr


def test_cli_tree_is_a_line_for_each_run(admin: FakeAdmin) -> None:
    """Runs hang on the run that they continue; coverage, loads and pins are named, and what is left out is counted."""
    admin.reply = TREE

    result = run("tree", "--replica", "a", "--levels", "2", "--children", "2")

    assert admin.asked == [("tree", ("a",), {"levels": 2, "children": 2})]
    assert [line.strip(" │├└─┣┗━┃") for line in result.stdout.splitlines()] == [
        "namespace 6e6e6e6e6e6e6e6e: a, host",
        f"[0, 740)  a 740/740  host 738/740  {'01' * 16}",
        f"[740, 752)  a 4/12  host 12/12  loading 3  pins 2  {'02' * 16}",
        f"[740, 1200)  host 460/460  {'02' * 16}",
        "+ 5 more",
        "1234 blocks in 9 runs",
        "depth: 1200 blocks; half of the blocks within 617, nine tenths within 1112",
    ]
    indents = [len(line) - len(line.lstrip(" │├└─┣┗━┃")) for line in result.stdout.splitlines()]
    assert indents == [0, 4, 8, 8, 8, 0, 0]


def test_cli_tree_as_json_has_keys_in_hex(admin: FakeAdmin) -> None:
    """With --json the report and its nodes are one document, nodes in preorder."""
    admin.reply = TREE

    printed = json.loads(run("tree", "--json").stdout)

    assert admin.asked == [("tree", ("",), {"levels": 8, "children": 8})]
    assert (printed["runs"], printed["blocks"], printed["shown"], "id" in printed) == (9, 1234, 4, False)
    assert [printed[name] for name in ("deepest", "half_depth", "nine_tenths_depth")] == [1200, 617, 1112]
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


def test_cli_inspect_asks_for_the_bytes_of_the_key(admin: FakeAdmin) -> None:
    """The hex digits of a key, in either case, become its bytes; in JSON a key is hex digits again."""
    admin.reply = REPLIES["inspect"]

    printed = json.loads(run("inspect", KEY.upper(), "--json").stdout)

    assert admin.asked == [("inspect", (bytes.fromhex(KEY),), {})]
    assert printed["parent"] == bytes(range(16)).hex()
    assert printed["places"][1] == {"tier": "host", "slot": 9, "state": "filling"}


def test_cli_inspect_of_an_unknown_block_says_so(admin: FakeAdmin) -> None:
    """A block that is not cached is an answer, not an error."""
    admin.reply = InspectReport(id=1, found=False)

    result = run("inspect", KEY)

    assert (result.exit_code, result.stdout) == (ExitCode.OK, "no copy of this block is in the index\n")


def test_help_lists_every_command_once() -> None:
    """`kvcached --help` has each command under one heading, on one line of a terminal of 80 columns."""
    listed = [command for commands in SECTIONS.values() for command in commands]
    assert sorted(listed) == sorted(main.commands)
    text = CliRunner().invoke(main, ["--help"]).stdout
    for heading, commands in SECTIONS.items():
        assert f"\n{heading}:\n" in text
        for command, words in commands.items():
            assert any(line.split(maxsplit=1) == [command, words] for line in text.splitlines()), command
    command, words = list(SECTIONS["Set up"].items())[-1]  # what an installed package does not have, for beginners last
    assert (command, words.partition(":")[0]) == ("demo", "In a checkout")
