from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

from kvcached import VERSION
from kvcached.cli.main import ExitCode, main
from kvcached.config.schema import Config
from kvcached.doors import HTTP, TCP
from tests.project.source_tree import ROOT, modules


def test_both_distributions_have_the_version_of_the_code() -> None:
    """Daemon, client, the daemon's dependency on the client and `kvcached.VERSION` name one version."""
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "kvcached_client/pyproject.toml").read_text())["project"]

    assert {daemon["version"], client["version"]} == {VERSION}
    assert f"kvcached-client=={VERSION}" in daemon["dependencies"]


def test_environment_of_the_tests_is_locked() -> None:
    """The lock holds each package that `make env` asks for by name, but torch: none comes in another version unseen."""
    daemon = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    client = tomllib.loads((ROOT / "kvcached_client/pyproject.toml").read_text())["project"]
    extras = daemon["optional-dependencies"]
    wanted = [*daemon["dependencies"], *client["dependencies"], *extras["dev"], *extras["examples"]]
    lock = (ROOT / "tests/environment.lock.txt").read_text()
    locked = {canonical(line.partition("==")[0]) for line in lock.splitlines() if not line.startswith("#")}

    assert {canonical(each) for each in wanted} - locked == {"kvcached-client", "torch"}


def canonical(requirement: str) -> str:
    """The name of the package that a requirement asks for, as indexes compare it."""
    (name,) = re.findall(r"^[A-Za-z0-9._-]+", requirement)
    return re.sub(r"[-_.]+", "-", name).lower()


def unit() -> dict[str, str]:
    """The [Service] section of the systemd unit; of a key that appears twice, the last."""
    parser = configparser.RawConfigParser(strict=False)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(ROOT / "configs/kvcached.service")
    return dict(parser["Service"])


def test_service_stops_the_daemon_alone() -> None:
    """The unit asks the daemon alone to stop, which ends its workers, and keeps the epoch over a restart."""
    service = unit()

    assert (service["KillMode"], service["RuntimeDirectoryPreserve"]) == ("process", "restart")
    assert (service["Type"], service["OOMPolicy"]) == ("notify", "continue")


def test_service_keeps_the_host_pool() -> None:
    """The unit keeps descriptors, and starts the daemon again unless it was told to stop or is misconfigured."""
    service = unit()

    assert int(service["FileDescriptorStoreMax"]) >= 1
    assert (service["Restart"], service["RestartPreventExitStatus"]) == ("on-failure", str(ExitCode.USAGE.value))


def test_service_tells_who_may_be_an_engine() -> None:
    """The unit's first lines do not limit engines to the daemon's user: the configuration may name others."""
    head = (ROOT / "configs/kvcached.service").read_text().partition("[Unit]")[0]

    assert "[[access.engine]]" in head
    assert "must run as" not in head


def test_service_starts_a_command_that_exists() -> None:
    """What the unit executes is a command line that the program understands."""
    _, *arguments = unit()["ExecStart"].split()

    result = CliRunner().invoke(main, [*arguments, "--help"])

    assert result.exit_code == 0


def test_service_stops_later_than_the_daemon_gives_up() -> None:
    """The manager waits longer for a stop than the daemon's default deadline for it."""
    assert int(unit()["TimeoutStopSec"].removesuffix("s")) * 1000 > Config.model_fields["shutdown_deadline_ms"].default


@pytest.mark.parametrize(
    "directive",
    [
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "DevicePolicy=closed",
        "RestrictAddressFamilies=AF_UNIX",
        "RestrictNamespaces=yes",
        "SystemCallFilter=@system-service",
        "LimitCORE=0",
        "RuntimeDirectoryMode=0750",
        "UMask=0077",
    ],
)
def test_service_is_confined(directive: str) -> None:
    """The unit takes away what the daemon does not need."""
    key, value = directive.split("=", 1)

    assert unit()[key] == value


def test_service_is_as_confined_as_documented() -> None:
    """The exposure that systemd computes for the unit is not above the one that docs/deployment.md states."""
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not installed")
    unit_file = str(ROOT / "configs/kvcached.service")
    result = subprocess.run(
        [command, "security", "--offline=true", "--no-pager", unit_file], capture_output=True, text=True, check=False
    )
    (documented,) = re.findall(r"gives an exposure of ([0-9.]+)", (ROOT / "docs/deployment.md").read_text())
    (computed,) = re.findall(r"Overall exposure level for kvcached.service: ([0-9.]+)", result.stdout)

    assert float(computed) <= float(documented)


def test_container_does_not_run_as_root() -> None:
    """The image ends as a fixed user that is not root, and serves under supervision by default."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()

    assert [line for line in lines if line.startswith("USER")] == ["USER kvcached"]
    assert any("--uid 10001" in line for line in lines)
    entry = lines.index('ENTRYPOINT ["kvcached"]')
    assert lines[entry + 1] == 'CMD ["supervise"]'
    stages = [line for line in lines if line.startswith("FROM")]
    assert stages[-2:] == ["FROM run AS cuda", "FROM run"]
    assert not any(line.startswith(("USER", "ENTRYPOINT", "CMD")) for line in lines[entry + 2 :])


def test_image_has_every_optional_part_in_the_versions_of_the_tests() -> None:
    """The image installs all extras that a configuration may need, from the lock, which the build's context holds."""
    image, context = (ROOT / "Dockerfile").read_text(), (ROOT / ".dockerignore").read_text().splitlines()
    installs = re.findall(r"bin/pip install (.*?)(?:\n\n|$)", image, re.DOTALL)
    (extras,) = re.findall(r"'/source\[([a-z0-9,]+)\]'", image)
    lock = "tests/environment.lock.txt"
    documents = "".join((ROOT / "docs" / name).read_text() for name in ("configuration.md", "monitoring.md"))
    needed = set(re.findall(r"kvcached-daemon\[([a-z]+)\]", documents))

    assert needed <= set(extras.split(","))
    assert ["'/source/kvcached_client[cuda]'" in each for each in installs] == [False, True]
    assert all(f"--constraint /source/{lock} " in each for each in installs)
    assert f"!{lock}" in context


def test_package_has_the_examples_and_nothing_else_that_lies_beside_them(tmp_path: Path) -> None:
    """A build copies the examples and units of `configs`, and neither `.env`, other files and folders, nor old ones."""
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    for name in ("kvcached", "configs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", ".env*"))
    shipped = {path.name for path in (ROOT / "configs").iterdir() if not path.name.startswith(".env")}
    built = tmp_path / "out/kvcached/configs"
    built.mkdir(parents=True)
    for secret in (".env", "tls.key", "notes.toml~"):
        (tmp_path / "configs" / secret).touch()
    (built / ".env").touch()
    (tmp_path / "configs/secrets.toml").mkdir()

    subprocess.run([sys.executable, "setup.py", "--quiet", "build_py", "--build-lib", "out"], cwd=tmp_path, check=True)

    assert {path.name for path in built.iterdir()} == shipped
    assert "cpu-tp1.toml" in shipped


def test_secrets_of_compose_are_in_no_image_and_no_commit() -> None:
    """The file that Compose reads variables from is neither in the build's context nor in the repository."""
    context = (ROOT / ".dockerignore").read_text().splitlines()

    assert context.index("**/.env*") > max(place for place, line in enumerate(context) if line.startswith("!"))
    assert ".env*" in (ROOT / ".gitignore").read_text().splitlines()


def test_nothing_asks_an_index_for_these_distributions() -> None:
    """No message or document has pip look for `kvcached-daemon` or `kvcached-client`: an index may have another's."""
    texts = [
        *((ROOT / path).read_text() for path, _ in modules("kvcached", "kvcached_client", "examples")),
        *(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))),
        *(path.read_text() for path in (ROOT / "configs").iterdir()),
    ]
    commands = [command for text in texts for command in re.findall(r"pip install[^\n`;]*", text)]

    assert len(commands) > 20
    assert [each for each in commands if re.search(r"kvcached-(?:daemon|client)|\{DISTRIBUTION\}", each)] == []


def test_hints_name_what_the_extras_bring() -> None:
    """The packages that messages of a missing extra name are those of the extra."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    for door, extra in ((HTTP, "metrics"), (TCP, "curve")):
        assert [canonical(each) for each in door.packages.split()] == [canonical(each) for each in extras[extra]]


def test_unit_opens_nothing_but_devices_for_gpus() -> None:
    """The drop-in for GPU nodes lets NVIDIA's devices in, and takes back nothing else that confines the daemon."""
    text = (ROOT / "configs/gpu.conf").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]", line))

    assert settings["DevicePolicy"] == "closed"
    assert settings["DeviceAllow"] == "char-nvidia* rwm"
    assert set(settings) == {"DevicePolicy", "DeviceAllow", "ExecStartPre", "TimeoutStartSec", "TasksMax"}


def test_unit_makes_the_device_files_of_all_gpus() -> None:
    """Before the daemon, the drop-in for GPU nodes makes the file of unified memory and those of all GPUs, as root."""
    text = (ROOT / "configs/gpu.conf").read_text()
    commands = re.findall(r"^ExecStartPre=(\S+) (.*)$", text, re.MULTILINE)
    (allowed,) = re.findall(r"^DeviceAllow=char-nvidia\* (\w+)$", text, re.MULTILINE)

    assert commands == [("-+/usr/bin/nvidia-modprobe", "-u -c 0"), ("-+/usr/bin/nvidia-smi", "--list-gpus")]
    assert "m" in allowed


def test_unit_lets_in_the_loopback_interface_alone() -> None:
    """The drop-in for a port of metrics allows local addresses, and leaves the denial of all others in the unit."""
    text = (ROOT / "configs/http.conf").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]", line))

    assert settings == {
        "PrivateNetwork": "no",
        "RestrictAddressFamilies": "AF_INET AF_INET6",
        "IPAddressAllow": "localhost",
    }
    assert unit()["IPAddressDeny"] == "any"


def test_unit_lets_in_named_networks_alone() -> None:
    """The drop-in for other machines allows the networks that it names, and leaves the denial of all others."""
    text = (ROOT / "configs/tcp.conf").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if re.match(r"[A-Z]", line))

    assert set(settings) == {"PrivateNetwork", "RestrictAddressFamilies", "IPAddressAllow"}
    assert settings["IPAddressAllow"].split() == ["localhost", "10.0.0.0/8"]
    assert unit()["IPAddressDeny"] == "any"


def test_pre_commit_hooks_need_no_network() -> None:
    """Every hook is local and runs a tool of the environment that `make env` makes."""
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    entries = re.findall(r"entry: (.*)", text)

    assert re.findall(r"repo: (.*)", text) == ["local"]
    assert len(entries) >= 3
    assert all(entry.startswith(".venv/bin/") for entry in entries)


def test_make_help_names_the_targets() -> None:
    """Every target that the Makefile's first lines and the documents speak of exists."""
    phony = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert phony is not None

    spoken_of = set()
    for name in ("Makefile", "README.md", "CONTRIBUTING.md", ".ci/run"):
        spoken_of |= set(re.findall(r"^(?:#\s+)?make (\w+)", (ROOT / name).read_text(), re.MULTILINE))

    assert spoken_of <= set(phony[1].split())
    assert {"demo", "test", "env"} <= spoken_of


def test_ci_script_is_executable_and_parses() -> None:
    """The script can be started, and bash finds no error in its syntax."""
    path = ROOT / ".ci/run"

    assert path.stat().st_mode & 0o111
    assert subprocess.run(["/bin/bash", "-n", str(path)], check=False).returncode == 0
