from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvcached.cli import set_up
from kvcached.cli.main import ExitCode, main
from kvcached.cli.set_up import _READ_ONLY, _SHIPPED_COMMAND, _SHIPPED_DISK, _SHIPPED_PROMISE
from kvcached.config.schema import load_config
from tests.project.source_tree import ROOT


def init(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["init", *arguments])


@pytest.mark.parametrize(("choice", "has_replicas"), [("vllm", False), ("engine", True)])
def test_init_writes_a_configuration_that_loads(choice: str, has_replicas: bool, tmp_path: Path) -> None:
    """What `init` writes loads, is for whom it says, and names itself in its own comments."""
    result = init("--for", choice, str(tmp_path / "here"))

    path = tmp_path / "here/kvcached.toml"
    config = load_config(path, environment={})
    assert (result.exit_code, bool(config.replica), config.offload is None) == (0, has_replicas, has_replicas)
    assert f"kvcached supervise --config {path}" in path.read_text()
    assert f"kvcached check-config --config {path}" in result.stdout


def test_init_has_vllm_checked_before_it_is_started(tmp_path: Path) -> None:
    """Blocks of large models do not fit the slabs of the first configuration: doctor, which says so, is a step."""
    steps = init("--for", "vllm", str(tmp_path / "a")).stdout.partition("next:")[2]

    assert f" 1. set size_bytes, and slab_bytes for large blocks, in {tmp_path}/a/kvcached.toml\n" in steps
    assert re.findall(r"^ \d\. (?:python -m )?([a-z]+ ?[a-z-]*)", steps, re.MULTILINE) == [
        "set size", "kvcached check-config", "kvcached supervise", "kvcached health", "kvcached doctor", "vllm",
    ]  # fmt: skip
    assert "kvcached doctor" not in init("--for", "engine", str(tmp_path / "b")).stdout


def test_init_prints_commands_that_a_shell_takes(tmp_path: Path) -> None:
    """A directory whose name a shell would take apart is quoted in the next steps, and in the file's own comment."""
    steps = init(str(tmp_path / "my $cache")).stdout.partition("next:")[2]
    comments = (tmp_path / "my $cache/kvcached.toml").read_text()

    commands = re.findall(r"kvcached (?:check-config|supervise|serve) .*", steps + comments)
    assert len(commands) == 3
    for command in commands:
        assert shlex.split(command)[2:] == ["--config", str(tmp_path / "my $cache/kvcached.toml")]


def test_init_writes_a_unit_that_starts_this_installation(tmp_path: Path) -> None:
    """The unit starts the command of the environment that wrote it, with the configuration beside it."""
    init(str(tmp_path))

    unit = (tmp_path / "kvcached.service").read_text()
    command = Path(sys.executable).with_name("kvcached")
    assert f"\nExecStart={command} serve --config {tmp_path}/kvcached.toml\n" in unit


def test_init_with_a_disk_has_storage_there(tmp_path: Path) -> None:
    """--disk adds storage in that directory; engines on device pools have no such example."""
    init("--disk", str(tmp_path / "blocks"), str(tmp_path))

    storage = load_config(tmp_path / "kvcached.toml", environment={}).storage
    assert storage is not None
    assert storage.settings["directory"] == str(tmp_path / "blocks")
    assert init("--for", "engine", "--disk", "/x", str(tmp_path / "other")).exit_code == ExitCode.USAGE
    assert not (tmp_path / "other").exists()


def test_init_overwrites_only_when_told(tmp_path: Path) -> None:
    """Where one of the files is there nothing is written, unless --force says so."""
    (tmp_path / "kvcached.service").write_text("mine")

    refused = init(str(tmp_path))

    assert (refused.exit_code, refused.stdout) == (ExitCode.USAGE, "")
    assert f"{tmp_path}/kvcached.service: there already" in refused.stderr
    assert not (tmp_path / "kvcached.toml").exists()
    assert (tmp_path / "kvcached.service").read_text() == "mine"

    assert init("--force", str(tmp_path)).exit_code == 0
    assert (tmp_path / "kvcached.service").read_text() != "mine"


def test_init_knows_what_the_shipped_files_say() -> None:
    """What `init` replaces stands in the files that it replaces it in."""
    assert _READ_ONLY in (ROOT / "configs/kvcached.service").read_text()
    assert f"ExecStart={_SHIPPED_COMMAND}\n" in (ROOT / "configs/kvcached.service").read_text()
    assert f'directory = "{_SHIPPED_DISK}"' in (ROOT / "configs/offload-disk.toml").read_text()
    for name in ("offload-cpu.toml", "offload-disk.toml", "cpu-tp1.toml"):
        assert f"configs/{name}" in (ROOT / "configs" / name).read_text()


@pytest.mark.parametrize(
    ("name", "written"), [("blocks", "/srv/blocks"), ('a b"c%\\d', '"/srv/a b\\"c%%\\\\d"'), ("ä", '"/srv/ä"')]
)
def test_init_lets_the_unit_write_to_the_disk(name: str, written: str, tmp_path: Path) -> None:
    """The unit may write where the configuration has its blocks, whatever characters are in the path of both."""
    disk = f"/srv/{name}"

    assert init("--disk", disk, str(tmp_path)).exit_code == ExitCode.OK

    storage = load_config(tmp_path / "kvcached.toml", environment={}).storage
    assert storage is not None
    assert storage.settings["directory"] == disk
    assert f"\nReadWritePaths={written}\n" in (tmp_path / "kvcached.service").read_text()


def test_init_says_who_makes_the_disks_directory(tmp_path: Path) -> None:
    """What the unit does not make is a step of its own, and the configuration says so, too; what it makes is none."""
    elsewhere = init("--disk", "/srv/blocks", str(tmp_path / "a"))
    usual = init("--disk", _SHIPPED_DISK, str(tmp_path / "b"))

    assert "\n 2. mkdir -p -m 700 /srv/blocks\n" in elsewhere.stdout
    user = "id kvcached >/dev/null 2>&1 || useradd --system kvcached"  # which may be there already
    assert f"\n    {user}; install -d -m 700 -o kvcached /srv/blocks)\n" in elsewhere.stdout
    assert "\n 3. kvcached check-config" in elsewhere.stdout
    assert "make it before the first start" in (tmp_path / "a/kvcached.toml").read_text()
    assert "created if it does not exist" not in (tmp_path / "a/kvcached.toml").read_text()
    assert "\n 2. kvcached check-config" in usual.stdout
    assert _SHIPPED_PROMISE in (tmp_path / "b/kvcached.toml").read_text()


def test_init_writes_paths_as_systemd_reads_them(tmp_path: Path) -> None:
    """What systemd reads is the path that was given: it names the path where that is not absolute."""
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not installed")
    init("--disk", '/srv/a b"c%\\d', str(tmp_path))
    unit = tmp_path / "kvcached.service"
    unit.write_text(unit.read_text().replace('ReadWritePaths="/srv/', 'ReadWritePaths="srv/'))

    done = subprocess.run([command, "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False)

    assert 'not absolute, ignoring: srv/a b"c%\\d\n' in done.stderr


@pytest.mark.parametrize("disk", ["/var/cache/kvcached", "/var/cache/kvcached/a"])
def test_init_leaves_the_unit_as_it_is_where_it_may_write_already(disk: str, tmp_path: Path) -> None:
    """For a directory in the unit's own cache directory there is no further path."""
    init("--disk", disk, str(tmp_path))

    assert "ReadWritePaths" not in (tmp_path / "kvcached.service").read_text()


def test_init_warns_of_what_the_unit_hides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A configuration, a disk or an interpreter where the unit shows the daemon nothing is named on stderr."""
    monkeypatch.setattr(set_up, "_HIDDEN", (str(tmp_path / "home"),))
    monkeypatch.setattr(sys, "executable", "/opt/kvcached/bin/python")
    assert init("--disk", "/srv/blocks", str(tmp_path / "etc")).stderr == ""

    monkeypatch.setattr(sys, "executable", str(tmp_path / "home/bin/python"))
    lines = init("--disk", str(tmp_path / "home/disk"), str(tmp_path / "home")).stderr.splitlines()

    named = [line.removeprefix(f"kvcached: warning: {set_up._HIDES} {tmp_path}/home/").split(":")[0] for line in lines]
    assert named == ["kvcached.toml", "bin/kvcached", "bin/python", "disk"]


def test_hidden_places_are_those_that_the_unit_hides() -> None:
    """What `init` warns of is what ProtectHome= and PrivateTmp= hide, which the shipped unit has."""
    unit = (ROOT / "configs/kvcached.service").read_text()

    assert "\nProtectHome=yes\nPrivateTmp=yes\n" in unit
    assert set_up._HIDDEN == ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - names


@pytest.mark.parametrize(("disk", "directory"), [("/srv/a\nb", "here"), ("/srv/blocks", "a\x7fb")])
def test_init_refuses_paths_that_no_file_can_name(disk: str, directory: str, tmp_path: Path) -> None:
    """A line's end in a path would be the end of a line of the unit: nothing is written."""
    refused = init("--disk", disk, str(tmp_path / directory))

    assert (refused.exit_code, refused.stdout, list(tmp_path.iterdir())) == (ExitCode.USAGE, "", [])
    assert "has characters that no unit can name" in refused.stderr


def test_cli_init_in_a_directory_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing that a relative path could start from: wrong usage, and no traceback."""
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()

    result = init("new")

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr == "kvcached: new: the current directory was removed; change to another one\n"
