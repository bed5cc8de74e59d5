from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvcached.storage.backend import (
    ABSENT,
    DONE,
    Block,
    Capabilities,
    Outcome,
    Result,
    StorageUnusable,
    VersionedRecord,
)
from kvcached.storage.encryption import backend as encrypted
from kvcached.storage.encryption.backend import EncryptedStorage, read_secret
from tests.service.fleet import FakeShelf
from tests.storage.disks import flip, opened, put
from tests.storage.fault import Fault, FaultStorage
from tests.storage.values import KIND, TIMEOUT_S, asked, is_right, key, kind, name, stored

SECRET = bytes(range(32))


@pytest.fixture
def storage(tmp_path: Path) -> Iterator[EncryptedStorage]:
    """An encrypted disk with blocks 1 to 3."""
    with opened(tmp_path / "d") as inner:
        storage = EncryptedStorage(inner, SECRET)
        put(storage, 1, 2, 3)
        yield storage


def test_disk_tells_neither_names_nor_bytes(tmp_path: Path, storage: EncryptedStorage) -> None:
    """No file of the backend holds a key, a prefix, the namespace, or 16 bytes of a block; without encryption, all."""
    canaries = [name(1), KIND.prefix(), KIND.namespace, KIND.fingerprint, b"KVCS", bytes(stored(1).parts[2][4096:4112])]
    with opened(tmp_path / "plain") as plain:
        put(plain, 1)

    assert [found_in(tmp_path / "d", canary) for canary in canaries] == [False] * 4 + [True, False]  # of the index
    assert all(found_in(tmp_path / "plain", canary) for canary in canaries)
    assert found_in(tmp_path / "d", storage._cipher.name(key(1)))


def found_in(directory: Path, canary: bytes) -> bool:
    return any(canary in path.read_bytes() for path in directory.iterdir())


def test_equal_values_are_not_equal_on_disk(tmp_path: Path) -> None:
    """Two writings of one value have no byte run in common: nonces are random."""
    contents = []
    for attempt in ("a", "b"):
        with opened(tmp_path / attempt) as inner:
            put(EncryptedStorage(inner, SECRET), 1)
        (slots,) = (tmp_path / attempt).glob("*.slots")
        contents.append(slots.read_bytes()[:20480])

    assert contents[0][:2048] != contents[1][:2048]
    assert contents[0][4096:4112] not in contents[1]


def test_another_key_finds_nothing(tmp_path: Path, storage: EncryptedStorage) -> None:
    """With a wrong key everything is absent, and nothing is harmed."""
    other = EncryptedStorage(storage._inner, bytes(32))

    assert other.get([asked(1)], timeout_s=TIMEOUT_S) == [ABSENT]
    assert other.exists([key(1)], timeout_s=TIMEOUT_S) == [False]
    assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [DONE]


@pytest.mark.parametrize("trials", [200, pytest.param(5000, marks=[pytest.mark.slow, pytest.mark.timeout(900)])])
def test_changed_bytes_are_absent(tmp_path: Path, storage: EncryptedStorage, trials: int) -> None:
    """Whichever byte of a stored value changes, the block is absent and deleted, or its bytes are the right ones."""
    draw, absent = random.Random(4), 0
    for _ in range(trials):
        (slots,) = (tmp_path / "d").glob("*.slots")
        flip(slots, draw, draw.randrange(20480))
        block = asked(1)
        results = [storage.get([block], timeout_s=TIMEOUT_S)[0]]
        if results == [DONE]:  # a byte behind the last tag
            assert is_right(block, 1)
        else:
            assert results == [ABSENT]
            assert storage.exists([key(1)], timeout_s=TIMEOUT_S) == [False]
            absent += 1
        put(storage, 1)
    assert absent > trials * 0.8


def test_values_cannot_change_places(tmp_path: Path) -> None:
    """A value under another name, whole or with parts of another writing, is absent."""
    with opened(tmp_path / "d") as inner:
        faulty = FaultStorage(inner)
        storage = EncryptedStorage(faulty, SECRET)
        put(storage, 1, 2)
        faulty.plan(Fault.SWAP)

        assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [ABSENT]
        assert storage.get([asked(2)], timeout_s=TIMEOUT_S) == [DONE]


def test_large_batches_are_copied_in_portions(
    tmp_path: Path, storage: EncryptedStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many blocks a batch has, few are copied at a time; each has its result, in order."""
    monkeypatch.setattr(encrypted, "_COPIES_BYTES_MAX", 2 * 20480)
    inner, sizes = storage._inner, []
    for name_of_call in ("get", "put"):
        call = getattr(inner, name_of_call)

        def note(blocks: list[Block], *, timeout_s: float, call: Any = call) -> list[Result]:
            sizes.append(len(blocks))
            results: list[Result] = call(blocks, timeout_s=timeout_s)
            return results

        monkeypatch.setattr(inner, name_of_call, note)
    put(storage, *range(10, 15))
    blocks = [asked(number) for number in (10, 99, 11, 12, 13)]

    results = storage.get(blocks, timeout_s=TIMEOUT_S)

    assert results == [DONE, ABSENT, DONE, DONE, DONE]
    assert is_right(blocks[4], 13)
    assert sizes == [2, 2, 1, 2, 2, 1]


@pytest.mark.parametrize("name_of_call", ["get", "put"])
def test_portions_share_the_limit_of_their_call(
    storage: EncryptedStorage, monkeypatch: pytest.MonkeyPatch, name_of_call: str
) -> None:
    """Each portion gets what the ones before have left; where nothing is left, its blocks fail without a call."""
    monkeypatch.setattr(encrypted, "_COPIES_BYTES_MAX", 20480)
    now_s, limits = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def wait(blocks: list[Block], *, timeout_s: float) -> list[Result]:
        limits.append(timeout_s)
        now_s[0] += min(timeout_s, 4.0)
        return [DONE if timeout_s >= 4 else Result(Outcome.FAILED, "too slow")] * len(blocks)

    monkeypatch.setattr(storage._inner, name_of_call, wait)
    monkeypatch.setattr(storage._cipher, "decrypt", lambda *_: True)

    results = getattr(storage, name_of_call)([stored(number) for number in range(5)], timeout_s=10.0)

    assert limits == [10.0, 6.0, 2.0]
    late = Result(Outcome.FAILED, "not begun within 10 s")
    assert results == [DONE, DONE, Result(Outcome.FAILED, "too slow"), late, late]
    assert now_s == [110.0]


@pytest.mark.parametrize(("takes_s", "deletes"), [(4.0, [6.0]), (10.0, [])])
def test_deletion_has_what_the_read_has_left(
    storage: EncryptedStorage, monkeypatch: pytest.MonkeyPatch, takes_s: float, deletes: list[float]
) -> None:
    """A value that is not what was encrypted is deleted within the limit of the read that found it, or later."""
    now_s, limits = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now_s[0])

    def read(blocks: list[Block], *, timeout_s: float) -> list[Result]:
        now_s[0] += takes_s
        return [DONE] * len(blocks)

    monkeypatch.setattr(storage._inner, "get", read)
    monkeypatch.setattr(storage._inner, "discard", lambda keys, *, timeout_s: limits.append(timeout_s))

    assert storage.get([asked(1)], timeout_s=10.0) == [ABSENT]
    assert limits == deletes


def test_parts_cannot_change_places(tmp_path: Path, storage: EncryptedStorage) -> None:
    """Two parts of one value that were exchanged, with their proofs, are absent."""
    (slots,) = (tmp_path / "d").glob("*.slots")
    content = bytearray(slots.read_bytes())
    content[4096:12288], content[12288:20480] = content[12288:20480], content[4096:12288]
    content[2076:2104], content[2104:2132] = content[2104:2132], content[2076:2104]
    slots.write_bytes(content)

    assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [ABSENT]


def test_deletion_that_fails_is_not_the_caller_s_problem(tmp_path: Path) -> None:
    """A value that is not what was encrypted is absent, even if it cannot be deleted."""
    with opened(tmp_path / "d") as inner:
        faulty = FaultStorage(inner)
        storage = EncryptedStorage(faulty, SECRET)
        put(storage, 1)
        faulty.plan(Fault.FLIP, Fault.RAISE)

        assert storage.get([asked(1)], timeout_s=TIMEOUT_S) == [ABSENT]


def test_one_namespace_is_cleared_under_its_encrypted_name(storage: EncryptedStorage) -> None:
    """Clearing a prefix works without its being known inside."""
    other = kind(generation=9)
    storage.put([stored(1, other)], timeout_s=TIMEOUT_S)

    assert storage.clear(KIND.prefix(), timeout_s=TIMEOUT_S) == 3
    assert storage.exists([key(1, other)], timeout_s=TIMEOUT_S) == [True]


def test_value_without_a_frame_is_a_mistake(storage: EncryptedStorage) -> None:
    """Values that do not begin with a frame are refused: there is no room for tags in them."""
    with pytest.raises(ValueError, match="does not begin with a frame"):
        storage.put([stored(1)._replace(parts=[memoryview(bytearray(100))])], timeout_s=TIMEOUT_S)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the package that encrypts, the message says how to install it."""
    monkeypatch.setitem(sys.modules, "kvcached.storage.encryption.cipher", None)
    with opened(tmp_path / "d") as inner, pytest.raises(StorageUnusable, match="pip install cryptography"):
        EncryptedStorage(inner, SECRET)


@pytest.mark.parametrize("content", [SECRET, SECRET.hex().encode(), SECRET.hex().upper().encode() + b"\n"])
def test_key_is_read_from_a_file(tmp_path: Path, content: bytes) -> None:
    """32 bytes, or 64 hexadecimal digits with or without an end of line."""
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(content)

    assert read_secret(path) == SECRET


@pytest.mark.parametrize("content", [b"", SECRET[:31], SECRET + b"\n", b"z" * 64, SECRET.hex().encode()[:-2]])
def test_other_contents_are_no_key(tmp_path: Path, content: bytes) -> None:
    """Anything else is refused, and the message does not repeat it."""
    path = tmp_path / "key"
    path.touch(mode=0o600)
    path.write_bytes(content)

    with pytest.raises(StorageUnusable, match="holds no key") as caught:
        read_secret(path)
    assert not content or content.decode("latin-1") not in str(caught.value)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_key_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    """The file is its owner's alone."""
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    path.chmod(mode)

    with pytest.raises(StorageUnusable, match="chmod 600"):
        read_secret(path)


def test_key_is_a_regular_file(tmp_path: Path) -> None:
    """A pipe does not make the start wait, and a missing file is named."""
    os.mkfifo(tmp_path / "pipe", 0o600)

    with pytest.raises(StorageUnusable, match="is no regular file"):
        read_secret(tmp_path / "pipe")
    with pytest.raises(StorageUnusable, match="No such file"):
        read_secret(tmp_path / "none")


def test_what_is_advised_never_overwrites_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only where no file is, a command makes one, and refuses one that has come meanwhile; else nothing is written."""
    path = tmp_path / "the key"

    def advice() -> str:
        with pytest.raises(StorageUnusable) as caught:
            read_secret(path)
        return str(caught.value).partition("; ")[2]

    command = advice().removeprefix("make one: ").replace("openssl rand -hex 32", f"echo {SECRET.hex()}")
    done = [subprocess.run(["/bin/sh", "-c", command], capture_output=True, check=False).returncode for _ in range(2)]
    assert (done[0], done[1] != 0, read_secret(path)) == (0, True, SECRET)

    path.chmod(0o644)
    assert advice() == f"chmod 600 '{path}'"
    path.chmod(0o600)
    path.write_text("short")
    assert (">" in advice(), "name the file of a key" in advice()) == (False, True)
    path.write_bytes(SECRET)
    path.chmod(0o600)
    another = os.stat_result((*path.stat()[:4], os.geteuid() + 1, *path.stat()[5:10]))
    with monkeypatch.context() as patched:
        patched.setattr(os, "fstat", lambda _: another)
        assert advice() == f"run this as the daemon's user, or chown {os.geteuid()} '{path}'"
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", partial(_denied, path))
        assert advice().startswith("run this as the daemon's user, or give the file to this one: chown")


def _denied(path: Path, *_: object) -> int:
    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)


def test_record_of_generations_is_encrypted_with_the_blocks() -> None:
    """The service sees no names of namespaces, each write is other bytes, and another key is told from damage."""
    shelf: Any = FakeShelf()
    shelf.capabilities = Capabilities(is_shared=True)
    storage, other = EncryptedStorage(shelf, bytes(32)), EncryptedStorage(shelf, bytes(31) + b"1")
    record = b"generation of a namespace"
    first = storage.write_record(record, b"", timeout_s=TIMEOUT_S)
    assert first
    before = shelf.record.data
    second = storage.write_record(record, first, timeout_s=TIMEOUT_S)
    assert second

    assert record not in before
    assert before != shelf.record.data
    assert storage.read_record(timeout_s=TIMEOUT_S) == VersionedRecord(record, second)
    with pytest.raises(StorageUnusable, match="same key_file"):
        other.read_record(timeout_s=TIMEOUT_S)
    shelf.record = VersionedRecord(b"plain", second)
    with pytest.raises(StorageUnusable, match="same key_file"):
        storage.read_record(timeout_s=TIMEOUT_S)
