"""Whose key files are read, as a key of CURVE and as the key of storage."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvcached.process.access import Users
from kvcached.process.file_access import let_in
from kvcached.storage.backend import StorageUnusable
from kvcached.storage.encryption.backend import read_secret
from kvcached_client.errors import RequestError
from kvcached_client.protocol.key_files import key_text, read_key_file

ROOT, DAEMON, GROUP, OTHER = 0, 12_001, 12_100, 12_200
SECRET = bytes(range(32))
Reader = Callable[[Path], bytes]
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
readers = pytest.mark.parametrize(
    ("read", "content"),
    [(read_key_file, key_text(SECRET)), (read_secret, SECRET.hex())],
    ids=["CURVE", "storage"],
)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may pass."""
    with tempfile.TemporaryDirectory() as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


@contextmanager
def as_daemon(gid: int, *groups: int) -> Iterator[None]:
    """This process is the daemon's user, with these groups."""
    before = os.getgroups(), os.getegid()
    os.setgroups(groups)
    os.setegid(gid)
    os.seteuid(DAEMON)
    try:
        yield
    finally:
        os.seteuid(ROOT)
        os.setegid(before[1])
        os.setgroups(before[0])


def mounted(place: Path, content: str) -> Path:
    """A Secret as the kubelet mounts it for the group of a Pod: root's, readable by the group, behind a link."""
    (place / "..data").mkdir()
    file = place / "..data/key"
    file.write_text(content)
    os.chown(file, ROOT, GROUP)
    file.chmod(0o440)
    (place / "key").symlink_to("..data/key")
    return place / "key"


@only_root
@readers
@pytest.mark.parametrize("groups", [(GROUP,), (OTHER, GROUP)], ids=["own", "further"])
def test_secret_of_the_pods_group_is_a_key(place: Path, read: Reader, content: str, groups: tuple[int, ...]) -> None:
    """A file of root that one of the daemon's groups may read is a key file, as Kubernetes mounts it with fsGroup."""
    path = mounted(place, content)

    with as_daemon(*groups):
        assert read(path) == SECRET


@only_root
@readers
def test_access_list_may_name_others(place: Path, read: Reader, content: str) -> None:
    """Where the group's permission may be that of further users in an access control list, the file is no key."""
    path = mounted(place, content)
    let_in(path, Users(frozenset({OTHER})), os.R_OK)

    with as_daemon(GROUP), pytest.raises((RequestError, StorageUnusable)):
        read(path)


@readers
@pytest.mark.parametrize(
    ("uid", "gid", "mode", "is_read"),
    [
        (ROOT, GROUP, 0o440, True),
        (ROOT, GROUP, 0o640, True),
        (ROOT, OTHER, 0o400, True),
        (DAEMON, OTHER, 0o600, True),
        (ROOT, OTHER, 0o440, False),
        (ROOT, ROOT, 0o440, False),
        (ROOT, GROUP, 0o460, False),
        (ROOT, GROUP, 0o450, False),
        (ROOT, GROUP, 0o444, False),
        (DAEMON, GROUP, 0o440, False),
        (OTHER, GROUP, 0o440, False),
        (OTHER, GROUP, 0o400, False),
    ],
)
def test_nobody_else_may_use_a_key(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    read: Reader,
    content: str,
    *,
    uid: int,
    gid: int,
    mode: int,
    is_read: bool,
) -> None:
    """A key file is root's or the daemon's, and nobody reads it but these, and of root's file a group of the daemon."""
    path = tmp_path / "key"
    path.write_text(content)
    found = os.stat_result((stat.S_IFREG | mode, *path.stat()[1:4], uid, gid, *path.stat()[6:10]))
    monkeypatch.setattr(os, "fstat", lambda _: found)
    monkeypatch.setattr(os, "geteuid", lambda: DAEMON)
    monkeypatch.setattr(os, "getegid", lambda: ROOT)
    monkeypatch.setattr(os, "getgroups", lambda: [ROOT, GROUP])

    if is_read:
        assert read(path) == SECRET
    else:
        with pytest.raises((RequestError, StorageUnusable), match=r"alone can read|others than the owner|belongs to"):
            read(path)
