from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from kvcached.storage.backend import DONE, Outcome, StorageGone, StorageUnusable
from kvcached.storage.disk.backend import open_disk
from kvcached.storage.disk.directory import refusal, take_directory
from tests.storage.disks import get, opened, put, there


def test_nobody_else_can_read_the_directory(tmp_path: Path) -> None:
    """The directory is its owner's alone, and so is every file in it, whatever the umask is."""
    before = os.umask(0)
    try:
        with opened(tmp_path / "d") as storage:
            put(storage, *range(100))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "d").iterdir()}
    finally:
        os.umask(before)

    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700
    assert len(modes) > 3
    assert set(modes.values()) == {0o600}


def test_open_directory_is_closed_to_others(tmp_path: Path) -> None:
    """A directory that is empty and open to others is used, and closed to them."""
    (tmp_path / "d").mkdir(mode=0o755)

    with opened(tmp_path / "d"):
        assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o700


def test_two_backends_never_share_a_directory(tmp_path: Path) -> None:
    """The second one is told that another process uses it; when the first one is closed it may."""
    with (
        opened(tmp_path / "d") as storage,
        pytest.raises(StorageUnusable, match=f"another process uses {tmp_path / 'd'}"),
        opened(tmp_path / "d"),
    ):
        put(storage, 1)

    with opened(tmp_path / "d"):
        pass


@pytest.mark.parametrize("how", ["removed", "replaced", "emptied", "a file", "of others"])
def test_directory_that_is_gone_is_opened_anew(tmp_path: Path, how: str) -> None:
    """Nothing is read from files without a name: the next one to open it finds an empty directory that works."""
    path = tmp_path / "d"
    with opened(path) as storage:
        put(storage, 1)
        assert there(storage, range(1, 2)) == {1}
        if how == "emptied":
            for each in path.iterdir():
                each.unlink()
        else:
            path.rename(tmp_path / "before")
        if how in {"replaced", "of others"}:
            path.mkdir(mode=0o700)
        if how == "of others":
            (path / "README").touch()
        elif how == "a file":
            path.touch()

        with pytest.raises(StorageGone, match=f"{path} was removed or replaced") as gone:
            there(storage, range(1, 2))
        assert gone.value.can_open == (how not in {"a file", "of others"})
        with pytest.raises(OSError, match=f"{path} was removed or replaced"):
            put(storage, 2)
    if how == "a file":
        path.unlink()
    elif how == "of others":
        assert [each.name for each in path.iterdir()] == ["README"]
        (path / "README").unlink()

    with opened(path) as storage:
        assert there(storage, range(1, 2)) == set()
        assert put(storage, 2) == [Outcome.DONE]
        assert there(storage, range(2, 3)) == {2}


def test_lock_that_was_deleted_is_made_again(tmp_path: Path) -> None:
    """It is an empty file: storage goes on without an interruption, and still nobody else can take the directory."""
    path = tmp_path / "d"
    with opened(path) as storage:
        put(storage, 1)
        (path / "lock").unlink()
        assert there(storage, range(1, 3)) == {1}
        with pytest.raises(StorageUnusable, match="another process uses"), opened(path):
            pass
        assert put(storage, 2) == [Outcome.DONE]
    with opened(path) as storage:
        assert there(storage, range(1, 3)) == {1, 2}


def test_who_takes_a_directory_without_a_lock_has_it(tmp_path: Path) -> None:
    """Two never use one directory: who finds the lock of another in it uses it no more."""
    path = tmp_path / "d"
    with opened(path) as storage:
        put(storage, 1)
        (path / "lock").unlink()
        (path / "lock").touch()

        with closing(take_directory(path)), pytest.raises(StorageGone) as gone:
            there(storage, range(1, 2))
        assert not gone.value.can_open


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """A directory that holds anything else is not taken, and not changed."""
    (tmp_path / "d").mkdir(mode=0o755)
    (tmp_path / "d" / "thesis.tex").touch()

    with pytest.raises(StorageUnusable, match=r"holds other files, as thesis\.tex"), opened(tmp_path / "d"):
        pass

    assert stat.S_IMODE((tmp_path / "d").stat().st_mode) == 0o755


def test_lock_of_others_makes_no_directory_this_backends(tmp_path: Path) -> None:
    """Package managers have a file of that name, too: their directory is refused, and its mode stays."""
    directory = tmp_path / "dpkg"
    directory.mkdir(mode=0o755)
    for name in ("lock", "status", "available"):
        (directory / name).touch()

    with pytest.raises(StorageUnusable, match=r"holds other files, as available"), opened(directory):
        pass

    assert (stat.S_IMODE(directory.stat().st_mode), refusal(directory)) == (
        0o755, ("holds other files, as available", "name an empty directory"),
    )  # fmt: skip


@pytest.mark.parametrize(
    "left", [(), ("index.db",), ("00000001-20480.slots", "generations.json"), ("index.db", "notes.txt")]
)
def test_directory_that_was_used_is_used_again(tmp_path: Path, left: tuple[str, ...]) -> None:
    """Whatever a killed process has left of its files, and whatever people have put beside them."""
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
    for path in (tmp_path / "d").iterdir():
        if path.name not in {"lock", *left}:
            path.unlink()
    for name in left:
        (tmp_path / "d" / name).touch()

    assert refusal(tmp_path / "d") is None
    with opened(tmp_path / "d") as storage:
        assert put(storage, 2) == [Outcome.DONE]


def test_directory_behind_a_link_is_refused(tmp_path: Path) -> None:
    """A symbolic link in the directory's place is not followed; the error names what it leads to."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d").symlink_to(tmp_path / "elsewhere")

    said = f"is a symbolic link; name what it leads to: {tmp_path / 'elsewhere'}"
    with pytest.raises(StorageUnusable, match=f"^disk storage: {tmp_path / 'd'} {said}$"):
        open_disk({"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})
    assert refusal(tmp_path / "d") == tuple(said.split("; "))


def test_root_of_a_file_system_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system of its own, with nothing but root's lost+found, is taken; a file or another's folder is not."""
    place = tmp_path / "d" / "lost+found"
    place.mkdir(mode=0o700, parents=True)
    lstat, owner = Path.lstat, 0

    def as_owned(path: Path) -> os.stat_result:
        return os.stat_result((*lstat(path)[:4], owner, *lstat(path)[5:])) if path == place else lstat(path)

    monkeypatch.setattr(Path, "lstat", as_owned)
    assert refusal(tmp_path / "d") is None
    with opened(tmp_path / "d") as storage:
        assert put(storage, 1) == [Outcome.DONE]

    for path in (tmp_path / "d").iterdir():
        if path != place:
            path.unlink()
    owner = 1000
    assert refusal(tmp_path / "d") == ("holds other files, as lost+found", "name an empty directory")
    owner = 0
    place.rmdir()
    place.touch()
    assert refusal(tmp_path / "d") == ("holds other files, as lost+found", "name an empty directory")


def test_file_half_made_is_no_hindrance(tmp_path: Path) -> None:
    """A process that was killed while it made a file of slots leaves one that is too short: the next start goes on."""
    with opened(tmp_path / "d") as storage:
        put(storage, 1)
    (tmp_path / "d" / "00000003-20480.slots").write_bytes(bytes(1000))

    with opened(tmp_path / "d") as storage:
        put(storage, *range(2, 50))
        assert get(storage, 49) == DONE
        assert there(storage, range(50)) == set(range(1, 50))


def test_index_half_made_is_replaced(tmp_path: Path) -> None:
    """A process that was killed while it made the index leaves an empty file: the next start makes another."""
    with opened(tmp_path / "d"):
        pass
    (tmp_path / "d" / "index.db").write_bytes(b"")

    with opened(tmp_path / "d") as storage:
        put(storage, 1)
        assert get(storage, 1) == DONE


def test_directory_can_be_opened_after_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that fails does not keep the directory."""

    def fail(*_: Any) -> None:
        raise OSError("injected")

    with monkeypatch.context() as patch:
        patch.setattr("kvcached.storage.disk.catalog.DiskSpace", fail)
        with pytest.raises(StorageUnusable, match="injected"):
            open_disk({"directory": str(tmp_path / "d"), "capacity_bytes": 4 << 20})

    with opened(tmp_path / "d"):
        pass


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"directory": "relative", "capacity_bytes": 4 << 20}, "directory: is no absolute path"),
        ({"directory": "/d", "capacity_bytes": 1}, "capacity_bytes: Input should be greater than or equal to 4194304"),
        ({"directory": "/d"}, "capacity_bytes: Field required"),
        ({"directory": "/d", "capacity_bytes": 4 << 20, "directIO": "off"}, "directIO: Extra inputs"),
        ({"directory": "/d", "capacity_bytes": 4 << 20, "ttl_s": 0}, "ttl_s: Input should be greater"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, object], said: str) -> None:
    """A setting that is unknown, missing or out of range is named, and nothing is opened."""
    with pytest.raises(StorageUnusable, match=said):
        open_disk(settings)
