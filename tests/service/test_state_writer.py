"""What a successor has to know is written down before anybody is told of it."""

from __future__ import annotations

import errno
import hashlib
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from msgspec import UNSET

from kvcached.config.tables import StorageLayout
from kvcached.core.messages import Ticked
from kvcached.core.restart.restore import RestoredCache
from kvcached.core.slots.states import SlotState
from kvcached.process.identity import ProcessIdentity
from kvcached.process.peer import UnseenProcess
from kvcached.recovery.state_file import EarlierRecord, HostPoolRecord, Ledger, LedgerFile, boot_id, read_ledger
from kvcached.service.sessions import FoundSession
from kvcached.service.state_writer import StatePlace
from kvcached_client.blocks.host_layout import CanonicalLayout, HostGeometry
from kvcached_client.protocol import engine as wire
from tests.monitoring.registry import metrics_of
from tests.service.office import EPOCH, ONE, SLAB_BYTES, FakePeer, Office, key_chain
from tests.service.offload_office import BLOCK_BYTES, INSTANCE, OffloadOffice, slots_in
from tests.service.test_service import health

RECORD = HostPoolRecord(device=1, inode=2, slabs=4, slab_bytes=SLAB_BYTES, allocated={})


class Notes:
    """The headers of a host pool: what was written there, in order."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.written: list[tuple[Any, ...]] = []

    def clear_slab(self, slab: int, geometry: HostGeometry) -> None:
        known = read_ledger(self._path)
        is_allocated = (
            known is not None and known.host is not None and any(slab in each for each in known.host.allocated.values())
        )
        self.written.append(("clear", slab, geometry.block_bytes, is_allocated))

    def claim(self, slots: npt.NDArray[np.int64], geometry: HostGeometry, epoch: int, session: int) -> None:
        self.written.append(("claim", slots.tolist(), geometry.block_bytes, epoch, session))

    def trim(self) -> None:
        """Nothing lies behind the last slab."""

    def try_end(self, slab: int, size_bytes: int) -> str:
        self.written.append(("try", slab, size_bytes))
        return ""


def process(pid: int) -> FakePeer:
    return FakePeer(pid, identity=ProcessIdentity(pid, 1000 + pid))


class Written(OffloadOffice):
    """A service that writes its ledger."""

    def hello_and_join(self, peers: list[FakePeer]) -> None:
        """A session on a device pool: of the first process, and of the others, which map the pool."""
        welcome = self.expect(wire.Welcome, self.hello(peers[0]))
        for peer in peers[1:]:
            self.service.join(peer, welcome.session, welcome.token, 0)  # type: ignore[arg-type]


def members_in(path: Path) -> list[ProcessIdentity | None]:
    """The processes of the only session in a ledger."""
    ledger = read_ledger(path)
    assert ledger is not None
    (session,) = ledger.sessions
    return [each.process for each in session.members]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "ledger.json"


@pytest.fixture
def notes(path: Path) -> Notes:
    return Notes(path)


@pytest.fixture
def office(path: Path, notes: Notes) -> Written:
    return Written(state_place=StatePlace(LedgerFile(path), boot_id(), RECORD), headers=notes)


def ledger_at_reply(office: Office, path: Path, request: wire.Request, *frames: bytes) -> tuple[Any, Ledger]:
    """The reply to a request, and the ledger as it is when the reply goes out."""
    found: list[tuple[Any, Ledger | None]] = []
    office.service.submit(ONE, request, list(frames), lambda answer: found.append((answer.header, read_ledger(path))))
    ((header, ledger),) = found
    assert ledger is not None
    return header, ledger


def test_sessions_are_known_before_the_welcome(office: OffloadOffice, path: Path) -> None:
    """A session and its processes are in the ledger when its engine hears of it, and when each shard has joined."""
    scheduler, shard = process(1), process(2)
    welcome, ledger = ledger_at_reply(office, path, office.hello_offload(scheduler))
    (session,) = ledger.sessions
    assert (session.id, session.epoch, session.mode) == (welcome.session, EPOCH, "offload")
    assert (session.instance, session.token_digest) == (
        INSTANCE.hex(),
        hashlib.sha256(welcome.token).hexdigest(),
    )
    assert [(each.process, each.shard) for each in session.members] == [(scheduler.identity, None)]
    (space,) = ledger.namespaces
    assert (space.root, space.block_bytes, space.generation) == (welcome.namespace.hex(), BLOCK_BYTES, 0)

    office.join(shard, welcome, 1)
    after = read_ledger(path)
    assert after is not None
    assert [(each.process, each.shard) for each in after.sessions[0].members][1:] == [(shard.identity, 1)]


@pytest.mark.parametrize("layout", ["engine", "canonical"])
@pytest.mark.parametrize("is_declared", [True, False])
def test_ledger_names_the_layout_of_storage_where_it_matters(
    path: Path, layout: StorageLayout, *, is_declared: bool
) -> None:
    """The next daemon learns of which layout the generations are; without a canonical root older daemons read it."""
    office = OffloadOffice(
        state_place=StatePlace(LedgerFile(path), boot_id(), RECORD, layout),
        has_canonical_storage=layout == "canonical",
    )
    canonical = CanonicalLayout(fingerprint=bytes(16), parts=2, runs=2) if is_declared else None
    office.attach(process(1), canonical=canonical)

    assert json.loads(path.read_bytes()).get("layout") == (layout if is_declared else None)


def test_engine_on_a_pool_is_known_with_its_shards(office: OffloadOffice, path: Path) -> None:
    """The same for a session on a device pool."""
    welcome, ledger = ledger_at_reply(office, path, office.hello(process(1)))
    assert [(each.mode, each.place) for each in ledger.sessions] == [("device", "a")]
    office.service.join(process(2), welcome.session, welcome.token, 0)  # type: ignore[arg-type]
    after = read_ledger(path)
    assert after is not None
    assert len(after.sessions[0].members) == 2
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))


def test_process_is_written_down_once(office: Written, path: Path) -> None:
    """A process that maps the pool again, as one does after each restart, is one member for the next daemon."""
    office.hello_and_join([process(1), *(process(2) for _ in range(3))])
    assert members_in(path) == [process(1).identity, process(2).identity]


def test_unseen_process_is_written_down_once(office: Written, path: Path) -> None:
    """The same for a process without an identity, whose connections are known to be of one process."""
    office.hello_and_join([FakePeer(1), FakePeer(2), FakePeer(2)])
    assert members_in(path) == [None, None]


def test_unseen_processes_that_may_be_several_are_several(office: Written, path: Path) -> None:
    """A scheduler and two shards of another pid namespace are three members for the next daemon."""
    office.hello_and_join([FakePeer(0), FakePeer(0), FakePeer(0)])
    assert members_in(path) == [None, None, None]


def test_pool_is_not_free_while_unseen_shards_may_live(office: Written, path: Path) -> None:
    """After a restart the scheduler of another pid namespace rejoins and dies: its shards may be writing the pool."""
    office.hello_and_join([FakePeer(0), FakePeer(0), FakePeer(0)])
    ledger = read_ledger(path)
    assert ledger is not None
    members: list[tuple[Any, Any]] = [(UnseenProcess(), each.shard) for each in ledger.sessions[0].members]
    after, token, scheduler = Office("a"), b"t" * 32, FakePeer(0)
    session = RestoredCache(after.cache).pool_session("a")
    digest = hashlib.sha256(token).digest()
    after.service.take_in({}, [FoundSession(session, (EPOCH - 1, 5), digest, b"", members)])
    member = after.service.identify(scheduler).member
    rejoin = wire.Rejoin(
        id=after.next_id(), version_min=1, version_max=1, member=member, session=5, daemon_epoch=EPOCH - 1,
        token=token, layout="", namespace=b"n" * 32, fence=0,
    )  # fmt: skip
    after.expect(wire.Welcome, rejoin)

    scheduler.dead = True
    after.service.peer_lost(scheduler)

    assert after.count("a", SlotState.FREE) == 0


def test_engine_that_has_not_returned_is_written_down_as_it_was(office: OffloadOffice, path: Path) -> None:
    """A daemon that dies before an engine has come back to it leaves the engine to the next one, by the same name."""
    session = RestoredCache(office.cache).pool_session("a")
    found = FoundSession(session, (EPOCH - 1, 5), b"d" * 32, b"", [(process(1), None)])
    office.service.take_in({}, [found])
    ledger = read_ledger(path)
    assert ledger is not None
    (record,) = ledger.sessions
    assert (record.epoch, record.id, record.token_digest) == (EPOCH - 1, 5, (b"d" * 32).hex())


def test_engine_that_may_not_know_of_its_return_is_written_down_by_both_names(
    office: OffloadOffice, path: Path
) -> None:
    """Until an engine shows that it has heard of its return, the next daemon knows it as the one before did, too."""
    found = FoundSession(
        RestoredCache(office.cache).pool_session("a"), (EPOCH - 1, 5), sha256(b"t" * 32).digest(), b"",
        [(process(1), None)],
    )  # fmt: skip
    office.service.take_in({}, [found])
    rejoin = wire.Rejoin(
        id=office.next_id(), version_min=1, version_max=1, member=office.service.identify(process(1)).member,
        session=5, daemon_epoch=EPOCH - 1, token=b"t" * 32, layout="", namespace=b"n" * 32, fence=0,
    )  # fmt: skip
    welcome, ledger = ledger_at_reply(office, path, rejoin)
    (record,) = ledger.sessions
    assert (record.epoch, record.id, record.token_digest) == (EPOCH, welcome.session, sha256(welcome.token).hexdigest())
    assert record.resumed_as == EarlierRecord(id=5, epoch=EPOCH - 1, token_digest=sha256(b"t" * 32).hexdigest())
    over = wire.DeclareOver(id=office.next_id(), epoch=EPOCH)
    assert ledger_at_reply(office, path, over)[1].sessions == (record,)

    heartbeat = wire.Heartbeat(id=office.next_id(), session=welcome.session, token=welcome.token)
    assert ledger_at_reply(office, path, heartbeat)[1].sessions[0].resumed_as is UNSET
    assert b"resumed_as" not in path.read_bytes()  # which earlier versions refuse to read


def test_slab_is_wiped_then_written_down_then_given_out(office: OffloadOffice, path: Path, notes: Notes) -> None:
    """Old headers are gone before the ledger says whose a slab is; claims are there before the reply."""
    welcome, _ = ledger_at_reply(office, path, office.hello_offload(process(1)))
    held = office.acquire_blocks(3)
    prepare = office.prepare_store(held.lease)
    answers: list[Any] = []
    office.service.submit(ONE, prepare, [key_chain(3)], answers.append)

    slots = slots_in(answers[0].frames[1])
    assert notes.written == [
        ("clear", slots[0] // 8, BLOCK_BYTES, False),
        ("claim", slots, BLOCK_BYTES, EPOCH, welcome.session),
    ]
    ledger = read_ledger(path)
    assert ledger is not None
    assert ledger.host is not None
    assert ledger.host.allocated == {welcome.namespace.hex(): (slots[0] // 8,)}


def test_clear_is_durable_before_its_reply(office: OffloadOffice, path: Path) -> None:
    """When a clear is answered the new generation is written down."""
    ledger_at_reply(office, path, office.hello_offload(process(1)))
    cleared, ledger = ledger_at_reply(office, path, wire.Clear(id=office.next_id(), epoch=EPOCH))
    assert (cleared.generation, ledger.namespaces[0].generation) == (1, 1)


def test_nothing_is_written_where_nothing_changed(office: OffloadOffice, path: Path) -> None:
    """Requests that change nothing which a successor has to know cost no write."""
    ledger_at_reply(office, path, office.hello_offload(process(1)))
    office.acquire_blocks(3)
    before = path.stat().st_ino
    office.hit(3)
    office.expect(wire.Held, office.acquire(key_chain(2), "s"), key_chain(2))
    assert path.stat().st_ino == before


def test_ledger_that_cannot_be_written_is_removed(
    office: OffloadOffice, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An outdated ledger would be believed; without one the next start is cold. The engine is served all the same."""
    ledger_at_reply(office, path, office.hello_offload(process(1)))

    monkeypatch.setattr(LedgerFile, "write", _no_space)
    office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=EPOCH))
    assert not path.exists()
    assert "cannot be written" in caplog.text


def test_health_says_that_the_ledger_cannot_be_written_until_it_is_again(
    office: OffloadOffice, path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A full run directory fails the health check and is logged once; with time the ledger is written again."""
    caplog.set_level("INFO")
    office.attach(process(1))
    with monkeypatch.context() as full:
        full.setattr(LedgerFile, "write", _no_space)
        for number in (1, 2, 3):
            office.expect(wire.Cleared, wire.Clear(id=office.next_id(), epoch=EPOCH))
            office.service.on_event(Ticked(office.now_ms + number))
        (part,) = failed_parts(office)
        assert (part.part, "No space left on device" in part.detail, missing(office)) == ("ledger", True, 1)
    assert caplog.text.count("the ledger cannot be written") == 1
    office.service.on_event(Ticked(office.now_ms + 4))

    assert path.exists()
    assert (failed_parts(office), missing(office)) == ([], 0)
    assert caplog.text.count("the ledger is written again") == 1


def failed_parts(office: OffloadOffice) -> list[wire.HealthPart]:
    """What `health` finds wrong."""
    return [part for part in health(office).parts if not part.ok]


def missing(office: OffloadOffice) -> float:
    return metrics_of(office)["kvcached_ledger_missing"].samples[0].value


def _no_space(*_: object) -> None:
    raise OSError(28, "No space left on device")


def test_ledger_that_cannot_be_removed_either_stops_nobody(
    office: OffloadOffice, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a file system that takes nothing any more engines are served on, and the log says what to do."""

    def fail(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(LedgerFile, "write", fail)
    monkeypatch.setattr(LedgerFile, "remove", fail)
    office.store_blocks(office.attach(process(1)), 2)
    assert "delete it before the next start" in caplog.text


def test_end_of_a_session_is_written_down(office: OffloadOffice, path: Path) -> None:
    """A session that is over is not in the ledger any more."""
    ledger_at_reply(office, path, office.hello_offload(process(1)))
    office.expect(wire.Goodbye, wire.Bye(id=office.next_id()))
    after = read_ledger(path)
    assert after is not None
    assert after.sessions == ()


def test_clear_is_refused_while_an_outdated_ledger_stays(
    office: OffloadOffice, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the ledger can be neither written nor removed, a clear is an error: a crash would bring the blocks back."""
    welcome, _ = ledger_at_reply(office, path, office.hello_offload(process(1)))
    office.store_blocks(welcome, 2)

    def clear() -> wire.NamespaceCleared | wire.ErrorReply:
        ((header, _),) = office.ask_late(wire.ClearNamespace(id=office.next_id(), target="tiny"), peer=b"admin")
        assert isinstance(header, wire.NamespaceCleared | wire.ErrorReply)
        return header

    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    with monkeypatch.context() as patch:
        patch.setattr(LedgerFile, "write", fail)
        patch.setattr(LedgerFile, "remove", fail)
        refused = clear()
        assert isinstance(refused, wire.ErrorReply)
        assert "a crash of the daemon would bring its blocks back" in refused.message

    office.service.on_event(Ticked(office.now_ms))
    assert isinstance(clear(), wire.NamespaceCleared)
