"""What the log tells of a request, and that it costs nothing where nobody wants to know."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import pytest

from kvcached.core.messages import TransferKind
from kvcached.service.pending import Answer
from kvcached_client.protocol import engine as wire
from tests.service.office import EPOCH, ONE, SLOTS, TWO, FakePeer, Office, key_chain
from tests.service.offload_office import OffloadOffice

NAMES = ("kvcached", "kvcached_client")


@pytest.fixture(autouse=True)
def _restored_levels() -> Iterator[None]:
    saved = {name: logging.getLogger(name).level for name in NAMES}
    logging.getLogger("kvcached").setLevel(logging.INFO)
    yield
    for name, level in saved.items():
        logging.getLogger(name).setLevel(level)


def set_level(office: Office | OffloadOffice, level: str) -> wire.LogLevelSet:
    request = wire.SetLogLevel(id=office.next_id(), level=level)  # type: ignore[arg-type]
    return office.expect(wire.LogLevelSet, request, peer=TWO)


def told_of(caplog: pytest.LogCaptureFixture, name: str, value: object) -> list[str]:
    """The messages that have a field of this value."""
    found = [record for record in caplog.records if isinstance(record.args, Mapping) and record.args.get(name) == value]
    return [record.getMessage() for record in found]


def test_level_changes_live_and_the_answer_has_the_one_of_before() -> None:
    """Both loggers have the level at once; setting it again changes nothing."""
    office = Office()

    assert [set_level(office, level).before for level in ("debug", "error", "error", "info")] == [
        "info", "debug", "error", "error",
    ]  # fmt: skip
    assert {logging.getLogger(name).level for name in NAMES} == {logging.INFO}


def test_change_of_the_level_is_logged_at_every_level(caplog: pytest.LogCaptureFixture) -> None:
    """A log that has become silent says why in its last line; an operator's command is no error to whoever reads it."""
    office = Office()
    for level in ("error", "error", "debug"):
        set_level(office, level)

    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name.endswith(".stories")]
    assert told == [
        ("INFO", "log level: error, was info"),
        ("INFO", "log level: error, was error"),
        ("INFO", "log level: debug, was error"),
    ]


def test_story_of_a_lease_is_found_by_its_number(caplog: pytest.LogCaptureFixture) -> None:
    """At debug, every line about a lease has its number as a field: what was asked, what was answered, loads."""
    office = Office("a", host_slabs=4)
    office.enter(FakePeer(7))
    office.store(key_chain(3))
    office.workers["a"].end_all()
    office.store(key_chain(SLOTS, seed=9))  # the blocks leave the device
    office.workers["a"].end_all()
    set_level(office, "debug")
    caplog.clear()

    answered: list[Answer] = []
    header, *_ = office.ask(office.acquire(key_chain(3), "prompt"), key_chain(3))
    assert isinstance(header, wire.Acquired)
    (transfer,) = office.workers["a"].under_way(TransferKind.LOAD)
    office.workers["a"].end_all()
    late = wire.Allocate(id=office.next_id(), epoch=EPOCH, lease=header.lease, blocks=SLOTS)
    office.expect(wire.ErrorReply, late)
    one_way = wire.Release(id=office.next_id(), epoch=EPOCH, lease=header.lease, reply=False)
    office.service.submit(ONE, one_way, [b"", b""], answered.append)

    acquired, loads, refused, released = told_of(caplog, "lease", header.lease)
    assert acquired.startswith("acquire: acquired: session 1, pid 7, request prompt, tokens 12")
    assert acquired.endswith(f"lease {header.lease}, hit 3, ready 0, loads [{transfer}]")
    assert loads == f"loads are over: session 1, lease {header.lease}"
    assert refused.startswith("allocate: error: ")
    assert "code no_capacity" in refused
    assert released.startswith("release: no reply wanted: ")
    assert len(told_of(caplog, "transfer", transfer)) == office.cache.pools["a"].shards


def test_requests_are_not_told_at_other_levels(caplog: pytest.LogCaptureFixture) -> None:
    """At info, a request that succeeds logs nothing, and its answer goes straight to whoever asked."""
    office = Office()
    welcome = office.enter(FakePeer(7))
    caplog.clear()
    office.store(key_chain(3))

    def respond(_: object) -> None:
        raise AssertionError

    heartbeat = wire.Heartbeat(id=office.next_id(), session=welcome.session, token=welcome.token)
    assert office.service._stories.begin(ONE, office.acquire(key_chain(3)), respond) is respond
    set_level(office, "debug")
    assert office.service._stories.begin(ONE, heartbeat, respond) is respond  # one each interval says nothing
    assert caplog.messages == ["log level: debug, was info"]


def test_story_has_neither_keys_nor_tokens(caplog: pytest.LogCaptureFixture) -> None:
    """What would let a reader of the log act as the engine, or read a block, is in no line."""
    office = OffloadOffice()
    set_level(office, "debug")
    welcome = office.attach(FakePeer(7))
    keys = key_chain(3)
    office.ask(wire.Acquire(id=office.next_id(), epoch=welcome.epoch, request="r", tokens=12, full=True), keys)

    office.ask(office.transfer_done(welcome, transfer=1, shard=0))

    text = " ".join(str(record.args) + record.getMessage() for record in caplog.records)
    assert "acquire: held" in text
    for secret in (welcome.token, keys[:16]):
        assert secret.hex() not in text
        assert repr(secret) not in text


def test_lines_of_sessions_have_fields(caplog: pytest.LogCaptureFixture) -> None:
    """Who came, where, and how it ended are fields: session, process, replica or namespace."""
    office, process = Office(), FakePeer(7)
    welcome = office.enter(process)
    process.dead = True
    office.service.peer_lost(process)
    offload = OffloadOffice()
    space = offload.attach(FakePeer(8))

    assert told_of(caplog, "pid", 7) == [
        "session 1: process 7 on replica a",
        "process 7 of session 1 is dead, 0 live",
    ]
    assert len(told_of(caplog, "session", welcome.session)) >= 2
    assert len(told_of(caplog, "namespace", space.namespace.hex()[:16])) == 1
