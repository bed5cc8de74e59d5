"""What a configuration with a mistake tells of the secrets in it: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.project.daemon_process import clean_environment

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'


@pytest.mark.parametrize("command", ["serve", "check-config"])
@pytest.mark.parametrize(
    ("table", "told"),
    [
        ('[storage]\nbackend = "redis"\n\n[storage.settings]\npassword = "hunter2"\n', "storage.settings.password: "),
        (
            '[storage]\nbackend = "s3"\n\n[storage.settings]\nbucket = "blocks"\naws_secret_access_key = "hunter2"\n',
            "storage.settings.aws_secret_access_key: ",
        ),
        ('[storage]\nbackend = "disk"\n\n[storage.settings]\nauth = "hunter2"\n', "storage.settings.auth: "),
        ('[storage]\nPassWord = "hunter2"\n', "storage.PassWord: "),
        ('[[storage.auth]]\npassword = "hunter2"\n', "storage.auth: "),
        ('[http]\ntoken = "hunter2"\n', "http.token: "),
    ],
)
def test_secret_under_a_wrong_key_is_not_repeated(command: str, table: str, told: str, tmp_path: Path) -> None:
    """The key is named with what to do, and its value is nowhere in what is printed."""
    path = tmp_path / "kvcached.toml"
    path.write_text(f"{HOST}\n{table}")

    done = subprocess.run(
        [sys.executable, "-m", "kvcached", command, "--config", str(path), "--run-dir", str(tmp_path / "run")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert done.returncode == 2
    assert f"{told}there is no such key; " in done.stderr
    assert "hunter2" not in done.stdout + done.stderr
