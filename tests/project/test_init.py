from __future__ import annotations

import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvcached.cli.main import ExitCode, main
from kvcached.cli.set_up import _SHIPPED_COMMAND, _SHIPPED_DISK
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
    assert f"kvcached serve --config {path}" in path.read_text()
    assert f"kvcached check-config --config {path}" in result.stdout


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
    assert f"ExecStart={_SHIPPED_COMMAND}\n" in (ROOT / "configs/kvcached.service").read_text()
    assert f'directory = "{_SHIPPED_DISK}"' in (ROOT / "configs/offload-disk.toml").read_text()
    for name in ("offload-cpu.toml", "offload-disk.toml", "cpu-tp1.toml"):
        assert f"configs/{name}" in (ROOT / "configs" / name).read_text()
