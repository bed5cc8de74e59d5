"""Requests of an engine in offload mode for copies' slots, and copies that were granted too late for their caller."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, TypeAlias, TypeVar

from kvcached_client.errors import DaemonUnreachable, RequestError
from kvcached_client.failpoints import failpoint
from kvcached_client.protocol.engine import (
    EVERY_SHARD,
    LoadPrepared,
    PrepareLoad,
    PrepareStore,
    PrepareStores,
    Settled,
    StorePrepared,
    StoresPrepared,
    TransferDone,
)
from kvcached_client.protocol.offload import CopyKind
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.session import SessionChannel
from kvcached_client.types import TransferId

P = TypeVar("P", LoadPrepared, StorePrepared, StoresPrepared)
_Prepare: TypeAlias = PrepareLoad | PrepareStore | PrepareStores

_log: Final = logging.getLogger("kvcached_client")


class Preparations:
    """Those of one session.

    If no reply comes in time, or the wait is interrupted, it is unknown whether there is a copy. The next request, or
    `cancel_late`, finds out, and cancels it.

    Args:
        channel: of the scheduler.
        session: which the copies are of.
    """

    def __init__(self, channel: SessionChannel, session: SessionGrant) -> None:
        self._channel = channel
        self._session = session
        self._unanswered: list[tuple[_Prepare, tuple[bytes, ...]]] = []

    def send(self, request: _Prepare, frames: tuple[bytes, ...] = ()) -> None:
        """Ask for a copy's slots."""
        self.cancel_late()
        with self._noting(request, frames):
            self._channel.send(request, frames)

    def receive(self, request: _Prepare, frames: tuple[bytes, ...], kind: type[P]) -> tuple[P, list[bytes]]:
        """The reply to a request that was sent with these frames."""
        with self._noting(request, frames):
            received = self._channel.receive(request, kind)
        if not isinstance(request, PrepareLoad):
            failpoint("offload.store.prepared")
        return received

    def cancel(self, kind: CopyKind, transfer: TransferId, why: str) -> None:
        """Tell the daemon that no shard will make a copy, or continue it."""
        request = TransferDone(
            id=self._channel.next_id(),
            session=self._session.id,
            token=self._session.token,
            kind=kind,
            transfer=transfer,
            shard=EVERY_SHARD,
            error=why,
        )
        self._channel.ask(request, Settled)

    def cancel_late(self) -> None:
        """Repeat requests whose reply was not received, with their ids: the daemon repeats its replies."""
        while self._unanswered:
            request, frames = self._unanswered[0]
            try:
                if isinstance(request, PrepareLoad):
                    late = self._channel.ask(request, LoadPrepared, frames)[0].transfer
                    self.cancel("load", TransferId(late), "")
                else:
                    self._cancel_late_stores(request, frames)
            except RequestError as error:
                _log.debug("a request whose reply was not received was refused: %s", error)
            self._unanswered.pop(0)

    @contextmanager
    def _noting(self, request: _Prepare, frames: tuple[bytes, ...]) -> Iterator[None]:
        """Note the request if the block inside ends without saying whether there is a copy, as Ctrl-C ends it."""
        try:
            yield
        except (RequestError, DaemonUnreachable):
            raise
        except BaseException:
            self._unanswered.append((request, frames))
            raise

    def _cancel_late_stores(self, request: PrepareStore | PrepareStores, frames: tuple[bytes, ...]) -> None:
        if isinstance(request, PrepareStore):
            transfers = [self._channel.ask(request, StorePrepared, frames)[0].transfer]
        else:
            transfers = [each.transfer for each in self._channel.ask(request, StoresPrepared, frames)[0].outcomes]
        for transfer in filter(None, transfers):
            self.cancel("store", TransferId(transfer), "the answer came too late")
