"""The backend `s3` does what every backend has to do: on a service in this process, and on SeaweedFS."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached.storage.backend import Storage
from kvcached.storage.encryption.backend import EncryptedStorage
from kvcached.storage.s3.opening import open_s3
from kvcached.storage.s3.settings import S3Settings
from tests.project.source_tree import ROOT
from tests.storage.contract import SharedContract
from tests.storage.s3.servers import server
from tests.storage.s3.service import FakeS3, fake_s3


class TestS3(SharedContract):
    @pytest.fixture(autouse=True)
    def fake(self) -> Iterator[FakeS3]:
        """One service for each test."""
        with fake_s3() as self.service:
            yield self.service

    def open(self, directory: Path) -> Storage:
        directory.mkdir(exist_ok=True)
        return open_s3(self.service.settings(directory, prefix=f"{directory.name}/"))


class TestSeaweedFs(SharedContract):
    def open(self, directory: Path) -> Storage:
        return open_s3(server().settings(directory))


class TestEncryptedSeaweedFs(SharedContract):
    def open(self, directory: Path) -> Storage:
        return EncryptedStorage(open_s3(server().settings(directory)), bytes(range(32)))


def test_documentation_tells_every_setting_of_s3() -> None:
    """docs/storage.md has a row for each setting, and no other."""
    section = (ROOT / "docs/storage.md").read_text().split("## S3\n")[1].split("**Keys.**")[0]

    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == set(S3Settings.model_fields)
