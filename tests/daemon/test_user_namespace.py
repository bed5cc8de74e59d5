"""A daemon in a user namespace that does not have root, as sandboxes without privileges make it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvcached.process.access import Users
from kvcached.process.file_access import PASS, let_in
from kvcached_client import Admin
from tests.daemon.supervised import supervised
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

#: One user and one group, who are not root and have no other number than this one.
WITHOUT_ROOT = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
CONFIG = '[host]\nsize_bytes = "4MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'


def is_allowed() -> bool:
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*WITHOUT_ROOT, "true"], check=False, capture_output=True).returncode == 0


pytestmark = pytest.mark.skipif(not is_allowed(), reason="user namespaces are not allowed here")


def check_config(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "kvcached.toml"
    path.write_text(text)
    options = ["--config", str(path), "--run-dir", str(tmp_path / "run")]
    command = [*WITHOUT_ROOT, sys.executable, "-m", "kvcached", "check-config", *options]
    return subprocess.run(command, cwd=ROOT, env=clean_environment(), capture_output=True, text=True, check=False)


def test_default_configuration_is_served_and_taken_over_without_root(tmp_path: Path) -> None:
    """A user namespace that lacks root costs root its look, with a warning, and neither the start nor a takeover."""
    with supervised(tmp_path, CONFIG, within=WITHOUT_ROOT) as running:
        running.kill_and_wait()
        with Admin.connect(running.run_dir) as admin:
            assert admin.describe().pid == running.daemon_pid
        log = running.log

    warning = "[access]: 'root' is a user without a number in this user namespace, and gets no access"
    assert log.count(warning) == 2
    assert "taken over in" in log


def test_list_that_names_users_of_another_user_namespace_is_made_again(tmp_path: Path) -> None:
    """A run directory that names a user who has no number here is served to those who have one."""
    (tmp_path / "run").mkdir(mode=0o750)
    let_in(tmp_path / "run", Users(frozenset({54_321})), PASS)

    with supervised(tmp_path, CONFIG + '[access]\noperate = ["@1000"]\n', within=WITHOUT_ROOT) as running:
        assert running.daemon_pid


def test_check_config_without_root_refuses_what_is_written(tmp_path: Path) -> None:
    """`check-config` takes the default there, and refuses root where somebody wrote it."""
    assert check_config(tmp_path, CONFIG).returncode == 0

    refused = check_config(tmp_path, CONFIG + '[access]\nlook = ["root"]\n')

    assert refused.returncode == 2
    assert "access.look = [\"root\"]: 'root' is a user without a number in this user namespace" in refused.stderr
