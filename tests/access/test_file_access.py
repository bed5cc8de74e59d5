"""Access control lists of the sockets and the run directory: who reaches them, and nobody else."""

from __future__ import annotations

import errno
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached.process import file_access
from kvcached.process.access import Users
from kvcached.process.file_access import CONNECT, PASS, let_in
from kvcached.process.seqpacket import listen
from tests.access.grants import SOMEBODY

GROUP = 777
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_CONNECT = """
import os, socket, sys
path, uid, gid, groups = sys.argv[1:]
os.setgroups([int(each) for each in groups.split()])
os.setresgid(*[int(gid)] * 3)
os.setresuid(*[int(uid)] * 3)
try:
    socket.socket(socket.AF_UNIX).connect(path)
except PermissionError:
    sys.exit(1)
"""


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A directory as the daemon makes it, where everybody may come to it."""
    with tempfile.TemporaryDirectory() as parent:
        Path(parent).chmod(0o755)
        path = Path(parent) / "run"
        path.mkdir(mode=0o750)
        yield path


def connects(path: Path, uid: int, gid: int = SOMEBODY, groups: str = "") -> bool:
    command = [sys.executable, "-I", "-S", "-c", _CONNECT, str(path), str(uid), str(gid), groups]
    return subprocess.run(command, check=False).returncode == 0


@only_root
def test_named_users_and_groups_connect_and_nobody_else(run_dir: Path) -> None:
    """A socket lets those connect who are named, by user or by any group, and no other user."""
    users = Users(frozenset({SOMEBODY}), frozenset({GROUP}))
    with listen(str(run_dir / "s"), 8, socket.SOCK_STREAM):
        let_in(run_dir, users, PASS)
        let_in(run_dir / "s", users, CONNECT)

        assert connects(run_dir / "s", SOMEBODY)
        assert connects(run_dir / "s", SOMEBODY + 1, GROUP)
        assert connects(run_dir / "s", SOMEBODY + 1, groups=f"5 {GROUP}")
        assert not connects(run_dir / "s", SOMEBODY + 1)


@only_root
def test_named_user_sees_and_changes_nothing_else(run_dir: Path) -> None:
    """Who is let in goes through the directory, and neither lists it nor writes to it; other files stay closed."""
    (run_dir / "ledger").touch(0o600)
    let_in(run_dir, Users(frozenset({SOMEBODY})), PASS)
    code = (
        "import os, sys; os.setgroups([]); os.setresgid(*[1]*3); os.setresuid(*[int(sys.argv[2])] * 3);"
        "print(*[os.access(sys.argv[1] + each, mode) for each, mode in"
        " (('', os.X_OK), ('', os.R_OK), ('', os.W_OK), ('/ledger', os.R_OK))])"
    )
    command = [sys.executable, "-I", "-S", "-c", code, str(run_dir), str(SOMEBODY)]

    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout.split() == [
        "True", "False", "False", "False",
    ]  # fmt: skip


def test_nobody_named_changes_nothing(run_dir: Path) -> None:
    """Where no other user has a role, the modes are what they were."""
    let_in(run_dir, Users(), PASS)

    assert (run_dir.stat().st_mode & 0o777, os.listxattr(run_dir)) == (0o750, [])


def test_list_that_is_there_is_kept(run_dir: Path) -> None:
    """A second list is added to the first: an administrator's own entries stay."""
    let_in(run_dir, Users(frozenset({1, 2})), PASS)
    let_in(run_dir, Users(frozenset({2, 3})), PASS)

    entries = file_access._entries(run_dir, 0)
    assert {number for tag, number in entries if tag == file_access._USER} == {1, 2, 3}
    assert run_dir.stat().st_mode & 0o027 == 0  # the mask is what the group has: nobody may write
    assert entries[file_access._GROUP_OWNER, file_access._NO_ID] == 0o5


def test_entries_without_a_number_here_are_dropped(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that a daemon of another user namespace has left names users without a number here: it is made again."""
    let_in(run_dir, Users(frozenset({1}), frozenset({5})), PASS)
    packed = os.getxattr(run_dir, file_access._ATTRIBUTE)
    for tag, number in ((file_access._USER, 1), (file_access._GROUP, 5)):  # as the kernel shows it there
        old, new = (file_access._ENTRY.pack(tag, PASS, each) for each in (number, file_access._NO_ID))
        assert old in packed
        packed = packed.replace(old, new)
    monkeypatch.setattr(os, "getxattr", lambda *_: packed)

    let_in(run_dir, Users(frozenset({2})), PASS)

    monkeypatch.undo()
    entries = file_access._entries(run_dir, 0)
    assert [number for tag, number in entries if tag in {file_access._USER, file_access._GROUP}] == [2]


def test_file_system_without_lists_lets_everybody_come(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without access control lists the permission is everybody's, and the daemon decides who is served."""

    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOTSUP, "not supported")

    monkeypatch.setattr(os, "setxattr", unsupported)
    users = Users(frozenset({SOMEBODY}))
    with listen(str(run_dir / "s"), 8, socket.SOCK_STREAM):
        let_in(run_dir, users, PASS)
        let_in(run_dir / "s", users, CONNECT)

        assert [each.stat().st_mode & 0o777 for each in (run_dir, run_dir / "s")] == [0o751, 0o722]


def test_list_that_cannot_be_made_is_an_error(run_dir: Path) -> None:
    """What the kernel refuses for another reason ends the start, with the path."""
    with pytest.raises(OSError, match=f"access to {run_dir}/none cannot be given|No such file"):
        let_in(run_dir / "none", Users(frozenset({SOMEBODY})), PASS)
