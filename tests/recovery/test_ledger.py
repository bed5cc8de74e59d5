"""The ledger: what is written is read, and nothing else is."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from queue import Queue
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcached.process import identity
from kvcached.process.identity import ProcessIdentity, identity_of, open_process
from kvcached.process.peer import PeerProcess
from kvcached.recovery import state_file
from kvcached.recovery.state_file import (
    EarlierRecord,
    HostPoolRecord,
    Ledger,
    LedgerFile,
    MemberRecord,
    NamespaceRecord,
    ReplicaRecord,
    SessionRecord,
    boot_id,
    read_ledger,
    sealed,
)

ROOT = "ab" * 32
LEDGER = Ledger(
    boot=boot_id(),
    epoch=1_700_000_000_000,
    host=HostPoolRecord(device=1, inode=2, slabs=8, slab_bytes=1 << 20, allocated={ROOT: (0, 3), "cd" * 32: (7,)}),
    namespaces=(
        NamespaceRecord(
            root=ROOT,
            label="model ✓ \n",
            fingerprint="0f" * 16,
            block_size=16,
            shards=2,
            block_bytes=4096,
            slots_per_slab=120,
            generation=3,
        ),
    ),
    replicas=(
        ReplicaRecord(
            name="a", fingerprint="00" * 16, namespace="cd" * 32, generation=0, weights_version="v1", slots=64
        ),
    ),
    sessions=(
        SessionRecord(
            id=9,
            epoch=1_700_000_000_000,
            mode="offload",
            place=ROOT,
            instance="ee" * 16,
            members=(
                MemberRecord(process=ProcessIdentity(6, 0)),
                MemberRecord(process=ProcessIdentity(7, 1), shard=1),
                MemberRecord(process=None, shard=0),
            ),
            resumed_as=EarlierRecord(id=3, epoch=1_600_000_000_000, token_digest="ff" * 32),
        ),
    ),
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger"


def refused(path: Path, caplog: pytest.LogCaptureFixture) -> str:
    """The one line that says why a ledger is not used."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "kvcached"):
        assert read_ledger(path) is None
    [message] = caplog.messages
    assert str(path) in message
    return message


def test_ledger_is_read_as_it_was_written(path: Path) -> None:
    """What one daemon wrote last is what the next one reads, to the last field."""
    LedgerFile(path).write(Ledger(boot=boot_id(), epoch=1))
    LedgerFile(path).write(LEDGER)

    assert read_ledger(path) == LEDGER


def test_ledger_can_be_looked_at(path: Path) -> None:
    """It is one JSON document with bytes as hex digits, that nobody but its user may read."""
    LedgerFile(path).write(LEDGER)

    assert json.loads(path.read_text())["host"]["allocated"][ROOT] == [0, 3]
    assert path.stat().st_mode & 0o777 == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_ledger_that_is_not_there_is_no_warning(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A first start says that nothing is taken over, and does not warn."""
    assert "no " in refused(path, caplog)
    assert caplog.records[0].levelno == logging.INFO


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": 1}, "format is 1"),
        ({"boot": "of another day"}, "booted"),
        ({"epoch": -1}, "damaged"),
        ({"epoch": "1"}, "damaged"),
        ({"later": 1}, "damaged"),
    ],
)
def test_ledger_of_another_kind_is_not_used(
    change: dict[str, Any], reason: str, path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Another format, another boot, a field that is wrong or unknown: one log line that says which, no ledger."""
    path.write_bytes(sealed(json.dumps({**msgspec.to_builtins(LEDGER), **change}).encode()))

    assert reason in refused(path, caplog)


@pytest.mark.parametrize(
    "allocated", [{ROOT: [8]}, {ROOT: [1, 1]}, {ROOT: [1], "cd" * 32: [1]}, {"xy": [1]}, {ROOT: [-1]}]
)
def test_ledger_that_contradicts_itself_is_not_used(
    allocated: dict[str, list[int]], path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slab that is not there, allocated twice, or allocated to a name that is none makes the ledger worthless."""
    fields = msgspec.to_builtins(LEDGER)
    fields["host"]["allocated"] = allocated
    path.write_bytes(sealed(json.dumps(fields).encode()))

    assert "damaged" in refused(path, caplog)


def test_slab_is_never_written_down_twice() -> None:
    """A ledger that gives a slab to two namespaces cannot even be made."""
    with pytest.raises(ValueError, match="allocated twice"):
        HostPoolRecord(device=1, inode=2, slabs=8, slab_bytes=4096, allocated={ROOT: (1,), "cd" * 32: (1,)})


def test_torn_ledger_is_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Cut anywhere, a ledger is not used."""
    LedgerFile(path).write(LEDGER)
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        assert "damaged" in refused(path, caplog)


@given(content=st.binary(max_size=200) | st.just(b"[" * 100_000) | st.just(b'{"format":1,"boot":' + b"[" * 100_000))
def test_garbage_is_not_used(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Whatever the file holds, reading it raises nothing and gives nothing."""
    path = tmp_path_factory.mktemp("run") / "ledger"
    path.write_bytes(content)

    assert read_ledger(path) is None


@pytest.mark.parametrize("kind", ["folder", "link", "pipe", "large"])
def test_only_a_file_of_ones_own_is_read(
    kind: str, path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder, a link to a good ledger, a pipe and a file without end are not used, and nothing waits for them."""
    other = path.with_name("other")
    LedgerFile(other).write(LEDGER)
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        path.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        monkeypatch.setattr(state_file, "LEDGER_BYTES_MAX", 100)
        other.rename(path)

    assert "not used" in refused(path, caplog)


def test_write_that_fails_leaves_the_old_ledger(path: Path) -> None:
    """Where the new one cannot be written, the error is told and the old one is whole."""
    file = LedgerFile(path)
    file.write(LEDGER)
    path.with_name("ledger.new").symlink_to("/dev/null")

    with pytest.raises(OSError, match=r"ledger\.new"):
        file.write(Ledger(boot=boot_id(), epoch=2))

    assert read_ledger(path) == LEDGER


def test_killed_writer_leaves_a_whole_ledger(path: Path) -> None:
    """A process that is killed while it writes one ledger after the other leaves one of them, whole."""
    code = f"""
from pathlib import Path
import msgspec
from kvcached.recovery.state_file import LedgerFile, read_ledger
path = Path({str(path)!r})
file, ledger = LedgerFile(path), read_ledger(path)
for epoch in range(10**9):
    file.write(msgspec.structs.replace(ledger, epoch=epoch))
    if epoch == 50: print("going", flush=True)
"""
    LedgerFile(path).write(LEDGER)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"going\n"
        writer.kill()

    found = read_ledger(path)
    assert found is not None
    assert msgspec.structs.replace(found, epoch=LEDGER.epoch) == LEDGER
    assert found.epoch >= 50


def test_ledger_of_a_directory_that_is_gone_is_nobody_elses(tmp_path: Path) -> None:
    """A daemon whose run directory was removed writes into no other one in its place, and removes nothing there."""
    directory = tmp_path / "run"
    directory.mkdir()
    file = LedgerFile(directory / "ledger")
    file.write(LEDGER)
    (directory / "ledger").unlink()
    directory.rmdir()
    directory.mkdir()
    LedgerFile(directory / "ledger").write(LEDGER)

    with pytest.raises(OSError, match="No such file"):
        file.write(Ledger(boot=boot_id(), epoch=2))
    file.remove()

    assert read_ledger(directory / "ledger") == LEDGER


def test_changed_byte_makes_a_ledger_worthless(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A field that says something else and still has its type is not believed, wherever it is."""
    LedgerFile(path).write(LEDGER)
    whole = path.read_bytes()
    digits = [at for at in range(len(whole)) if whole[at : at + 1].isdigit()]
    for at in digits:
        path.write_bytes(whole[:at] + (b"1" if whole[at : at + 1] != b"1" else b"2") + whole[at + 1 :])
        assert "not used" in refused(path, caplog)


def test_removed_ledger_is_gone(path: Path) -> None:
    """After `remove` the next start is cold; removing twice is once."""
    file = LedgerFile(path)
    file.write(LEDGER)

    file.remove()
    file.remove()

    assert not path.exists()


def test_ledger_that_cannot_be_removed_is_emptied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a directory that takes no changes any more, the ledger is left empty, and the next start is cold."""
    file = LedgerFile(path)
    file.write(LEDGER)

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "unlink", refused)
        file.remove()

    assert path.stat().st_size == 0
    assert read_ledger(path) is None


def test_process_is_found_by_pid_and_start() -> None:
    """A living process with the pid and the start time that were written down is opened."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert identity is not None

        pidfd = open_process(identity.pid, identity.started)

        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        os.close(pidfd)


def test_another_process_with_the_pid_is_not_taken_for_it() -> None:
    """A pid that is another process's by now, by the time it started, is not opened."""
    identity = identity_of(os.getpid())
    assert identity is not None

    assert open_process(identity.pid, identity.started - 1) is None


def test_dead_process_is_not_opened() -> None:
    """A process that has ended is dead, whether its parent has waited for it or not."""
    with subprocess.Popen(["/bin/cat"], stdin=subprocess.PIPE) as process:
        identity = identity_of(process.pid)
        assert identity is not None
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        assert open_process(identity.pid, identity.started) is None

        process.wait()
        assert open_process(identity.pid, identity.started) is None
        assert identity_of(process.pid) is None


def test_id_of_a_thread_is_no_process() -> None:
    """A pid that was written down and is a thread's id now is dead: the kernel has another error for it."""
    told: Queue[int] = Queue()
    end = threading.Event()

    def live() -> None:
        told.put(threading.get_native_id())
        end.wait()

    thread = threading.Thread(target=live)
    thread.start()
    number = told.get()
    try:
        assert number != os.getpid()
        assert open_process(number, 1) is None
        assert PeerProcess.found(ProcessIdentity(number, 1)) is None
    finally:
        end.set()
        thread.join()


@pytest.mark.parametrize("number", [errno.ESRCH, errno.ENOENT, errno.EINVAL])
def test_each_kernels_word_for_no_process(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever error a kernel has for an id that no process has: it is no process. Other errors are told."""

    def refuse(_: int) -> int:
        raise OSError(refused_with, os.strerror(refused_with))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    refused_with = number
    assert open_process(5, 1) is None
    refused_with = errno.EMFILE
    with pytest.raises(OSError, match="Too many open files"):
        open_process(5, 1)


def test_process_that_cannot_be_looked_at_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A living process whose start time is hidden is taken for the one that was meant: it might be writing."""
    monkeypatch.setattr(identity, "identity_of", lambda _: None)

    pidfd = open_process(os.getpid(), 1)

    assert pidfd is not None
    os.close(pidfd)


def test_odd_program_names_do_not_hide_the_start() -> None:
    """A program whose name has brackets and spaces has the start time that the kernel gives it."""
    code = "import sys; open('/proc/self/comm', 'w').write('a) R (b'); print('ready', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        before = identity_of(process.pid)
        process.stdout.readline()

        assert Path(f"/proc/{process.pid}/comm").read_text() == "a) R (b\n"
        assert identity_of(process.pid) == before
        process.kill()
