"""Daemons of several machines that share one storage service: real records, without processes, in virtual time."""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Callable
from typing import Any

import msgspec

from kvcached.core.generations import Edition, Generations
from kvcached.core.messages import StorageLost, StorageReady
from kvcached.recovery.generations import Record
from kvcached.service.storage_verbs import StorageService
from kvcached.shared_record import SharedRecord
from kvcached.storage.backend import SHARED_RECORD_BYTES_MAX, RecordUnusable, StorageUnusable, Usage, VersionedRecord
from kvcached.storage.link_state import LinkState
from kvcached.storage.messages import Done, Forget, ReadRecord, WriteRecord
from kvcached.storage.record_exchange import RecordExchange
from kvcached.storage.shared_records import SharedRecords
from kvcached.storage_start import _take_in, keep_record
from kvcached_client.protocol import engine as wire
from tests.service.office import FakePeer, root_of
from tests.service.offload_office import OffloadOffice
from tests.virtual_time import VirtualTimeLoop


class FakeShelf:
    """A service that keeps a record.

    Attributes:
        record: None if there is none.
        is_away: every call fails.
        is_foreign: the record is none that can be read.
        has_no_password: nobody can connect at the moment.
        fails_after: calls that write and then fail, as where the reply is lost.
        has_blocks: what it says of its blocks.
        history: all records that were written.
    """

    def __init__(self) -> None:
        self.record: VersionedRecord | None = None
        self.is_away = self.is_foreign = self.has_no_password = False
        self.fails_after = 0
        self.has_blocks = -1
        self.history: list[bytes] = []

    def read_record(self, *, timeout_s: float) -> VersionedRecord | None:
        self._reach(timeout_s)
        if self.has_no_password:
            raise StorageUnusable("password_file is empty")
        if self.is_foreign:
            raise RecordUnusable("it is not encrypted with this key")
        return self.record

    def write_record(self, data: bytes, after: bytes, *, timeout_s: float) -> bytes | None:
        self._reach(timeout_s)
        if after != (b"" if self.record is None else self.record.version):
            return None
        self.record = self.record_of(data)
        self.history.append(data)
        if self.fails_after:
            self.fails_after -= 1
            raise OSError("the reply is lost")
        return self.record.version

    def record_of(self, data: bytes) -> VersionedRecord:
        """A record of these bytes, as somebody has written it."""
        return VersionedRecord(data, secrets.token_bytes(8))

    def _reach(self, _: float) -> None:
        if self.is_away:
            raise OSError("the service is away")


class FakeLink:
    """The storage process of one daemon, which answers a moment later."""

    def __init__(self, shelf: FakeShelf, exchange: RecordExchange, loop: VirtualTimeLoop) -> None:
        self.state = LinkState.DETACHED
        self.is_shared = True
        self.lives = 1
        self.usage = Usage(shelf.has_blocks, -1, -1)
        self.due: dict[bytes, None] = {}
        self.refusals: list[str] = []
        self.asked: list[ReadRecord | WriteRecord] = []
        memory = memoryview(mmap.mmap(exchange.memory, SHARED_RECORD_BYTES_MAX))
        self._records = SharedRecords(memory, shelf, 1.0)  # type: ignore[arg-type]
        self._loop = loop

    def ask(self, request: Callable[[int], ReadRecord | WriteRecord | Forget], tell: Callable[[Done], None]) -> bool:
        if self.state is LinkState.DETACHED:
            return False
        made = request(1)
        if isinstance(made, Forget):
            self._loop.call_later(0.01, tell, Done(sequence=1))
            return True
        self.asked.append(made)
        self._loop.call_later(0.01, self._carry_out, made, tell)
        return True

    def _carry_out(self, request: ReadRecord | WriteRecord, tell: Callable[[Done], None]) -> None:
        try:
            done = self._records.carry_out(request)
        except OSError as error:
            done = Done(sequence=1, failed=True, error=str(error))
        tell(done)

    def forget(self, prefix: bytes, _: Callable[[Done], None]) -> None:
        self.due[prefix] = None

    def refuse(self, why: str) -> None:
        self.refusals.append(why)
        self.state = LinkState.WAITING


class Node:
    """A daemon with an engine in offload mode, whose namespace all nodes share."""

    def __init__(self, shelf: FakeShelf, loop: VirtualTimeLoop, first: int, generations: Any = None) -> None:
        self.shelf, self.loop = shelf, loop
        root = root_of(first, "")  # of the replica: each daemon begins it anew
        known = {**(generations or {}), root: Edition(first)}
        self.office = OffloadOffice(generation=first, generations=Generations(first + 1, known, [root]))
        self.exchange = RecordExchange()
        self.link = FakeLink(shelf, self.exchange, loop)
        self.exchange.use(self.link)
        service: Any = self.office.service
        link: Any = self.link
        self.shared = SharedRecord(
            service, link, self.exchange, "engine", lambda record: _take_in(service, link, record)
        )
        service.storage.storage = StorageService(link, "redis", "every", 1, 1, self.shared.age_ms)
        keep_record(service, link, None, None, "engine")
        self.shared.expect()
        self.welcome: wire.WelcomeOffload | None = None

    @property
    def recorder(self) -> Any:
        return self.office.service.state_writer.recorder

    def open(self) -> None:
        """Storage is open, and its record is followed, unless that fails."""
        self.link.state = LinkState.STARTING
        self.link.lives += 1
        self.shared.begin(self._ready)

    def _ready(self) -> None:
        self.link.state = LinkState.READY
        self.office.service.on_event(StorageReady())

    def lose(self) -> None:
        """The storage process has died."""
        self.link.state = LinkState.DETACHED
        self.office.service.on_event(StorageLost())

    def engine(self) -> wire.WelcomeOffload:
        """An engine declares the namespace."""
        if self.welcome is None:
            self.welcome = self.office.attach(FakePeer(1))
        return self.welcome

    def generation(self) -> int:
        """Of the namespace."""
        return self.office.cache.offload.namespaces.by_root[self.engine().namespace].generation

    def replica(self) -> int:
        """The generation of replica `a`, which all nodes have, too."""
        description = self.office.expect(wire.Description, wire.Describe(id=self.office.next_id()))
        return description.replicas[0].generation

    def clear(self, target: str = "tiny") -> list[wire.Header]:
        """An administrator clears a namespace; the answers, once there are any."""
        self.engine()
        answers: list[wire.Header] = []
        request = wire.ClearNamespace(id=self.office.next_id(), target=target)
        self.office.service.submit(b"people", request, [], lambda answer: answers.append(answer.header))
        return answers

    def close(self) -> None:
        self.shared.close()
        self.exchange.close()


def recorded(shelf: FakeShelf) -> Record:
    """The record as it is there."""
    assert shelf.record is not None
    return msgspec.json.decode(shelf.record.data, type=Record)
