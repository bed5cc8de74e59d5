"""What a configuration with a mistake tells of the secrets in it: nothing."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

from kvcached.config import machine
from kvcached.config.machine import check_machine
from kvcached.config.problems import ConfigError
from kvcached.config.schema import load_config
from kvcached.storage.backend import GROUP
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


HEX = "0123456789abcdef" * 4
Z85 = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
REDIS = '[storage]\nbackend = "redis"\n[storage.settings]\nurl = "rediss://h"\n'
S3 = '[storage]\nbackend = "s3"\n[storage.settings]\nbucket = "blocks"\n'
TCP = f"""[tcp]\nlisten = "127.0.0.1:9"
key_file = {{}}
[[tcp.client]]\nname = "x"\npublic_key = "{"0" * 40}"\nrole = "look"
"""


@pytest.mark.parametrize(
    ("table", "secret", "key"),
    [
        ("[storage]\nkey_file = {}\n" + '[storage.settings]\ndirectory = "/nowhere"\n', f'"{HEX}"', "storage.key_file"),
        ("[storage]\nkey_file = {}\n", f"0x{HEX[1:15]}", "storage.key_file"),
        (REDIS + "password_file = {}\n", '"hunter2"', "storage.settings.password_file"),
        (REDIS + "password_file = {}\n", "12345678", "storage.settings.password_file"),
        (REDIS + "key_file = {}\n", f'"{HEX}"', "storage.settings.key_file"),
        (S3 + "credentials_file = {}\n", '"wJalrXUtnFEMI/K7MDENG"', "storage.settings.credentials_file"),
        (TCP, f'"{Z85}"', "tcp.key_file"),
        (TCP, "12345678", "tcp.key_file"),
    ],
)
def test_secret_in_place_of_the_path_of_its_file_is_not_repeated(
    table: str, secret: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The key is named, with what to do in users' words; what stands there may be the secret, and is in no message."""
    found = EntryPoints([EntryPoint(name, "somewhere:else", GROUP) for name in ("disk", "redis", "s3")])
    monkeypatch.setattr(machine, "entry_points", lambda group: found)
    path = tmp_path / "kvcached.toml"
    path.write_text(f"{HOST}\n{table.replace('{}', secret)}")

    with pytest.raises(ConfigError) as caught:
        check_machine(load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")}))

    shown = str(int(secret, 16)) if secret.startswith("0x") else secret.strip('"')
    told = [str(each) for each in caught.value.problems if each.key == key]
    assert told
    for each in told:
        assert not [part for part in shown.split("/") if part in each]
        assert f": {key}: " in each
        assert "pathlib" not in each
        assert "instance of" not in each


@pytest.mark.parametrize("written", ["/no/key", "./key", "../key"])
def test_path_of_a_file_of_a_secret_is_told(written: str, tmp_path: Path) -> None:
    """What is certainly a path is repeated, and stands in the command that makes the file."""
    path = tmp_path / "kvcached.toml"
    path.write_text(f'{HOST}\n[storage]\nkey_file = "{written}"\n[storage.settings]\ndirectory = "{tmp_path}/disk"\n')
    config = load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})
    assert config.storage is not None

    with pytest.raises(ConfigError) as caught:
        check_machine(config)

    assert str(config.storage.key_file) in str(next(each for each in caught.value.problems if "key_file" in each.key))
