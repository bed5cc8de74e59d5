"""The keeper: whom it gives what it keeps, what of it survives, and what a supervisor does without it."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import pytest

from kvcached.cli.main import ExitCode
from kvcached.process.seqpacket import listen, receive
from kvcached.recovery import keeper_link
from kvcached.recovery.fd_store import KEPT_MAX, MESSAGE_BYTES_MAX, KeptDescriptors, Notice, store_message
from kvcached.recovery.keeper_link import KeeperLink
from tests.client.descriptors import no_descriptor_left
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT
from tests.recovery.keepers import DEADLINE_S, KeeperProcess, keeper_process
from tests.recovery.test_supervise import Supervised, supervised  # noqa: F401 - a fixture

STRANGER = 12_001


class Supervisor:
    """A supervisor's end of a connection to the keeper."""

    def __init__(self, keeper: KeeperProcess) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.settimeout(DEADLINE_S)
        try:
            self.socket.connect(str(keeper.path))
        except OSError:
            self.socket.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def hear(self) -> Notice | None:
        """What the keeper says next; None at the end of the connection."""
        self.socket.recv(1, socket.MSG_PEEK)
        packet = receive(self.socket, 4096, 16)
        return None if packet is None else Notice.of(packet.data, packet.descriptors)

    def given(self) -> list[tuple[str, int]]:
        """What the keeper has for this supervisor."""
        found = []
        while (notice := self.hear()) is not None and notice.fields.get("READY") != "1":
            found.append((notice.fields["FDNAME"], notice.descriptors[0]))
        return found

    def say(self, text: str, *descriptors: int) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", descriptors))] if descriptors else []
        self.socket.sendmsg([text.encode()], rights)

    def barrier(self) -> None:
        """Wait until the keeper has carried out everything."""
        ours, theirs = os.pipe()
        self.say("BARRIER=1", theirs)
        os.close(theirs)
        assert os.read(ours, 1) == b""
        os.close(ours)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[KeeperProcess]:
    with keeper_process(tmp_path) as running:
        yield running


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that every user may write to."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    with tempfile.TemporaryDirectory(dir="/run") as directory:
        Path(directory).chmod(0o777)
        yield Path(directory)


def next_ready(supervisor: Supervised) -> dict[str, Any]:
    """The next daemon's first words, behind the last ones of the daemon before."""
    while (event := supervisor.event())["event"] != "started":
        pass
    while supervisor.notice() != "READY=1":
        pass
    return event


def contents(keeper: KeeperProcess) -> list[bytes]:
    """The first bytes of each memory that the keeper gives to the next supervisor."""
    with Supervisor(keeper) as supervisor:
        descriptors = [each for _, each in supervisor.given()]
    found = [os.pread(each, 100, 0) for each in descriptors]
    for each in descriptors:
        os.close(each)
    return found


@contextmanager
def as_stranger() -> Iterator[None]:
    """What is connected or listens from here on is another user's, by the kernel's word."""
    os.seteuid(STRANGER)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_memory_outlives_the_supervisor(
    keeper: KeeperProcess,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
    number: signal.Signals,
) -> None:
    """Whether a supervisor is stopped or killed, the next one has the descriptors for its daemon, with their bytes."""
    pids: list[int] = []
    for _ in range(3):
        with supervised(keeper=str(keeper.path)) as it:
            started = next_ready(it)
            assert started["before"] == [str(pid) for pid in pids]
            pids.append(started["pid"])
            it.send(number)
            it.status()

    assert keeper.end(signal.SIGTERM) == 0
    assert "1 descriptors are dropped" in keeper.log


def test_descriptor_that_the_daemon_removes_is_not_kept(
    keeper: KeeperProcess,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """What a daemon removes from the service manager's store, the keeper drops as well."""
    with supervised("forgetful", keeper=str(keeper.path)) as it:
        next_ready(it)
        it.send(signal.SIGTERM)
        it.status()

    assert contents(keeper) == []


def test_other_users_get_nothing(place: Path, memfd: Callable[[bytes], int]) -> None:
    """A connection of another user is closed without a word, even if somebody has opened the socket to everybody."""
    with keeper_process(place) as keeper:
        with Supervisor(keeper) as owner:
            owner.given()
            owner.say(store_message("pool"), memfd(b"secret"))
            owner.barrier()
        with as_stranger(), pytest.raises(PermissionError):
            Supervisor(keeper)
        keeper.path.chmod(0o666)
        with as_stranger():
            stranger = Supervisor(keeper)
        with stranger:
            assert stranger.hear() is None

        assert contents(keeper) == [b"secret"]
        assert f"it is of user {STRANGER}, not of 0" in keeper.log


def test_one_supervisor_at_a_time(
    keeper: KeeperProcess,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """While a supervisor is connected, another one ends with the reason, and gets nothing; afterwards it gets all."""
    with supervised(keeper=str(keeper.path)) as first:
        pid = next_ready(first)["pid"]
        with pytest.raises(OSError, match="another supervisor is connected"):
            asyncio.run(take_from(keeper.path))
        first.send(signal.SIGKILL)
        first.status()

    with supervised(keeper=str(keeper.path)) as third:
        assert next_ready(third)["before"] == [str(pid)]


def test_new_keeper_gets_everything(
    tmp_path: Path,
    supervised: Callable[..., Any],  # noqa: F811 - the fixture
) -> None:
    """A supervisor goes on without its keeper, and gives a new keeper all that it has."""
    with supervised(keeper=str(tmp_path / "keeper.sock")) as it:
        it.logged("no keeper at .* yet")
        pid = next_ready(it)["pid"]
        for number in (signal.SIGKILL, signal.SIGTERM):
            with keeper_process(tmp_path) as keeper:
                it.logged("the keeper is there, and has 1 descriptors")
                keeper.end(number)
                it.logged("the keeper is lost")
        with keeper_process(tmp_path) as keeper:
            it.logged("the keeper is there")
            it.send(signal.SIGKILL)
            it.status()
            assert contents(keeper) == [f"{pid} ".encode()]


def test_keeper_keeps_a_limited_number(keeper: KeeperProcess, memfd: Callable[[bytes], int]) -> None:
    """The limit of the service manager's store is the keeper's, and that many arrive at the next supervisor."""
    with Supervisor(keeper) as first:
        first.given()
        for number in range(KEPT_MAX + 1):
            first.say(store_message("pool"), memfd(str(number).encode()))
        first.barrier()

    assert contents(keeper) == [str(number).encode() for number in range(KEPT_MAX)]
    assert f"the limit of {KEPT_MAX} is reached" in keeper.log


def test_keeper_may_have_as_many_descriptors_as_its_hard_limit_allows(
    tmp_path: Path, memfd: Callable[[bytes], int]
) -> None:
    """A shell's soft limit of open files costs no memory. Where the hard one is too low, the log says so, and how."""
    few = 40
    with keeper_process(tmp_path, "prlimit", f"--nofile={few}:") as keeper:
        with Supervisor(keeper) as first:
            first.given()
            for _ in range(2 * few):
                first.say(store_message("pool"), memfd(b""))
            first.barrier()
        assert len(contents(keeper)) == 2 * few

    with keeper_process(tmp_path, "prlimit", f"--nofile={few}:{few}") as keeper, Supervisor(keeper) as first:
        first.given()
        with pytest.raises(OSError, match=r"Broken pipe|Connection reset"):  # noqa: PT012 - any of them may be the last
            while True:
                first.say(store_message("pool"), memfd(b""))
        assert f"the supervisor is gone: no descriptor is free: this process may have {few} files open" in keeper.log


def test_memory_for_which_no_descriptor_is_free_is_not_left_behind(
    keeper: KeeperProcess, memfd: Callable[[bytes], int]
) -> None:
    """A supervisor that may have too few files open says so and does not start: the keeper still has its memory."""
    with Supervisor(keeper) as first:
        first.given()
        for number in range(3):
            first.say(store_message("pool"), memfd(str(number).encode()))
        first.barrier()

    async def take_with_few_left() -> None:
        link = KeeperLink(str(keeper.path), KeptDescriptors())
        spare = [os.dup(0) for _ in range(2)]  # its socket, and a descriptor of three
        with no_descriptor_left():
            for each in spare:
                os.close(each)
            await link.open()

    with pytest.raises(OSError, match=rf"keeper at {keeper.path}: no descriptor is free: .*; raise LimitNOFILE="):
        asyncio.run(take_with_few_left())

    assert contents(keeper) == [b"0", b"1", b"2"]


def test_too_long_message_ends_the_connection(keeper: KeeperProcess) -> None:
    """A supervisor that sends more than a message may hold loses its connection, and nothing else changes."""
    with Supervisor(keeper) as faulty:
        faulty.given()
        faulty.say("X" * (MESSAGE_BYTES_MAX + 1))
        assert faulty.hear() is None

    assert contents(keeper) == []


async def take_from(path: Path) -> None:
    await KeeperLink(str(path), KeptDescriptors()).open()


def test_keeper_of_another_user_is_not_believed(place: Path) -> None:
    """A supervisor takes no memory from another user's process, and does not start without it either."""
    with as_stranger():
        listener = listen(str(place / "keeper.sock"), 1)

    with listener, pytest.raises(OSError, match=f"it is of user {STRANGER}"):
        asyncio.run(take_from(place / "keeper.sock"))


def test_keeper_that_hangs_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A supervisor does not start without a keeper that is there and says nothing: it may have the memory."""
    monkeypatch.setattr(keeper_link, "ANSWER_S", 0.05)

    with listen(str(tmp_path / "keeper.sock"), 1), pytest.raises(OSError, match="it does not answer"):
        asyncio.run(take_from(tmp_path / "keeper.sock"))


def test_path_that_is_too_long_is_said_to_be(tmp_path: Path) -> None:
    """A socket's path of more than 107 bytes is called too long, as the keeper calls it, not a keeper that hangs."""
    path = tmp_path / ("x" * 107)

    with pytest.raises(OSError, match="AF_UNIX path too long") as refused:
        asyncio.run(take_from(path))
    assert "it does not answer" not in str(refused.value)
    with pytest.raises(OSError, match="AF_UNIX path too long"):
        listen(str(path), 1)


def kept_at(path: Path) -> subprocess.CompletedProcess[str]:
    """A keeper that ends by itself."""
    return subprocess.run(
        [sys.executable, "-m", "kvcached", "keep", "--socket", str(path)],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )


def test_second_keeper_at_one_socket_is_refused(keeper: KeeperProcess) -> None:
    """Two keepers never have one socket: the second says so, with the exit code of a failed start."""
    result = kept_at(keeper.path)

    assert (result.returncode, result.stdout) == (ExitCode.START_FAILED, "")
    assert "is locked by another process" in result.stderr


@pytest.mark.parametrize("name", ["poem", "poem.lock"])
def test_file_at_the_path_of_the_socket_stays(tmp_path: Path, name: str) -> None:
    """A file where the socket or its lock would be is neither removed nor emptied: the keeper does not start."""
    (tmp_path / name).write_text("so much depends\n")

    result = kept_at(tmp_path / "poem")

    assert (result.returncode, result.stdout) == (ExitCode.START_FAILED, "")
    assert f"kvcached: keeper at {tmp_path}/poem: " in result.stderr
    assert "; move it away, or name another p" in result.stderr
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: "so much depends\n"}
