from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcached.storage.backend import StorageMisconfigured, StorageUnusable
from kvcached.storage.redis import opening
from kvcached.storage.redis.opening import PACKAGES, open_redis
from kvcached.storage.redis.settings import RedisSettings, Server, server_of
from kvcached.storage.secret_file import read_private
from tests.project.source_tree import ROOT
from tests.storage.redis.servers import private

SECRET = "hunter2"  # noqa: S105 - no message may have it


def refusal(**settings: object) -> str:
    """Why settings are refused for good."""
    with pytest.raises(StorageMisconfigured) as caught:
        open_redis(settings)
    return str(caught.value)


def test_all_mistakes_are_named() -> None:
    """Settings that are wrong, unknown or missing are told together."""
    message = refusal(threads=0, ttl_s=0, prefix="a b", ca_file="ca.pem", color="blue", username="")

    told = set(re.findall(r"(?:storage: |; )(\w+): ", message))
    assert told == {"url", "threads", "ttl_s", "prefix", "ca_file", "color", "username"}


def test_files_without_their_use_are_refused(tmp_path: Path) -> None:
    """TLS files without TLS, a key without a certificate, a user without a password are mistakes, each with a fix."""
    file = str(tmp_path / "file")
    message = refusal(url="redis://localhost", ca_file=file, certificate_file=file, key_file=file, username="me")

    assert message.count("begin url with rediss://, or leave it out") == 3
    assert "username: has no password (name its file in password_file)" in message
    assert "key_file: has no certificate" in refusal(url="rediss://localhost", key_file=file)


@pytest.mark.parametrize(
    "url",
    [
        f"redis://user:{SECRET}@localhost",
        f"redis://:{SECRET}@localhost:6379",
        f"unix://user:{SECRET}@/run/socket",
        f"redis://localhost?password={SECRET}",
        f"http://{SECRET}",
        f"redis://localhost:{SECRET}",
        f"redis://localhost/{SECRET}",
        f"redis:///{SECRET}",
        f"unix://{SECRET}",
        f"redis://localhost#{SECRET}",
    ],
)
def test_urls_that_are_none_are_not_repeated(url: str) -> None:
    """A url with anything but a server in it is refused, and no message has it: it may hold a password."""
    message = refusal(url=url)

    assert message.startswith("redis storage: url: ")
    assert SECRET not in message


@pytest.mark.parametrize("url", ["redis://localhost:0", "rediss://localhost:0/1", "redis://localhost/" + "9" * 20])
def test_numbers_that_no_server_has_are_refused(url: str) -> None:
    """The port 0, and a database that no server has, are mistakes of the configuration."""
    assert refusal(url=url).startswith("redis storage: url: has ")


@pytest.mark.parametrize("name", ["threads", "ttl_s"])
@pytest.mark.parametrize("value", [True, "1", 1.0])
def test_numbers_are_numbers(name: str, value: object) -> None:
    """A truth value, a text or a number with a point is no count."""
    assert f"storage: {name}: " in refusal(**{"url": "redis://localhost", name: value})


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("redis://cache", Server("cache", 6379, "", 0, is_encrypted=False)),
        ("rediss://cache:7000/3", Server("cache", 7000, "", 3, is_encrypted=True)),
        ("redis://[::1]:6380/", Server("::1", 6380, "", 0, is_encrypted=False)),
        ("unix:///run/valkey/socket", Server("", 0, "/run/valkey/socket", 0, is_encrypted=False)),
    ],
)
def test_urls_name_servers(url: str, server: Server) -> None:
    """Host, port, socket, database and TLS are as the url says."""
    assert server_of(url) == server


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the packages the message says what to install, which is what the extra brings."""
    monkeypatch.setattr(opening, "find_spec", lambda name: None)
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

    assert refusal(url="redis://localhost").endswith(f"needs the package redis: pip install {PACKAGES}")
    assert [each.partition(">=")[0] for each in extras["redis"]] == PACKAGES.split()


def test_entry_point_needs_no_package() -> None:
    """Who looks for backends, or reads settings, does not import redis."""
    script = "import sys, kvcached.storage.redis.opening; sys.exit('redis' in sys.modules or 'hiredis' in sys.modules)"
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["kvcached.storage"]

    assert scripts["redis"] == "kvcached.storage.redis.opening:open_redis"
    assert subprocess.run([sys.executable, "-c", script], check=False, cwd=ROOT).returncode == 0


def test_password_files_are_private(tmp_path: Path) -> None:
    """A file of secrets that others may read, that is missing, too large or no file is refused, with what to do."""
    path = private(tmp_path / "password", SECRET)
    assert read_private(path, "it") == SECRET.encode()

    path.chmod(0o640)
    with pytest.raises(StorageUnusable, match="chmod 600"):
        read_private(path, "it")
    with pytest.raises(StorageUnusable, match="No such file"):
        read_private(tmp_path / "none", "it")
    with pytest.raises(StorageUnusable, match="not a regular file"):
        read_private(tmp_path, "it")
    with pytest.raises(StorageUnusable, match="more than"):
        read_private(private(tmp_path / "large", "a" * 70_000), "it")


def test_documentation_tells_every_setting() -> None:
    """docs/storage.md has a row for each setting, and no other."""
    section = (ROOT / "docs/storage.md").read_text().split("## Redis and Valkey")[1].split("**Keys.**")[0]

    assert re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE) == list(RedisSettings.model_fields)
