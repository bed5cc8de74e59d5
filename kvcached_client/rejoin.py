"""Going on with a daemon that was started anew, where the pool with the engine's slots has outlived the one before."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from kvcached_client.grants import Declaration
from kvcached_client.protocol.engine import (
    PROTOCOL_VERSION,
    PROTOCOL_VERSION_MIN,
    Declare,
    Declared,
    DeclareEnded,
    DeclareOver,
    Rejoin,
    Welcome,
)
from kvcached_client.transport.attach import SessionGrant, identify
from kvcached_client.transport.channel import SessionChannel
from kvcached_client.transport.misses import Failures
from kvcached_client.types import FenceSequence, LeaseId


class Declarable(Protocol):
    """A lease, as far as it is declared."""

    def declaration(self) -> Declaration | None:
        """What there is to say of it; None where it is given back."""

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """It goes on over another connection, under another id."""


def open_channel(run_dir: str, *, deadline_ms: int, failures: Failures) -> tuple[SessionChannel, bytes]:
    """A connection to the daemon, and what names this process there.

    Raises:
        DaemonUnreachable, DeadlineExceeded, RequestError: as `identify`.
    """
    attached, identified = identify(run_dir, client="kvcached_client", deadline_ms=deadline_ms)
    try:
        channel = SessionChannel(identified.endpoint, deadline_ms=deadline_ms, attached=attached, failures=failures)
    except BaseException:
        attached.close()
        raise
    return channel, identified.member


def rejoin(
    channel: SessionChannel,
    member: bytes,
    grant: SessionGrant,
    daemon_epoch: int,
    layout: str,
    namespace: bytes,
    fence: FenceSequence,
) -> Welcome:
    """Ask to go on with a session of the daemon before.

    Until `fence` has signalled, work may be queued on every slot that the session has ever held: what is declared is
    not for others before that, and what is not declared is not granted.

    Raises:
        Stale: nothing is left of it, or the namespace was cleared since.
        RequestError, TransportError: see `kvcached_client.errors`.
    """
    request = Rejoin(
        id=channel.next_id(),
        version_min=PROTOCOL_VERSION_MIN,
        version_max=PROTOCOL_VERSION,
        member=member,
        session=grant.id,
        daemon_epoch=daemon_epoch,
        token=grant.token,
        layout=layout,
        namespace=namespace,
        fence=fence,
    )
    welcome, _ = channel.ask(request, Welcome)
    channel.epoch = welcome.epoch
    return welcome


def declare(channel: SessionChannel, leases: Iterable[Declarable]) -> None:
    """Declare all leases, then say that this was all.

    Raises:
        RequestError, TransportError: one was not taken. Then nothing else is granted in the pool: end the session.
    """
    taken: list[tuple[Declarable, LeaseId]] = []
    for lease in leases:
        told = lease.declaration()
        if told is not None:
            taken.append((lease, _declare(channel, told)))
    channel.ask(DeclareOver(id=channel.next_id(), epoch=channel.epoch), DeclareEnded)
    for lease, lease_id in taken:
        lease.take_up(channel, lease_id)


def _declare(channel: SessionChannel, told: Declaration) -> LeaseId:
    request = Declare(
        id=channel.next_id(),
        epoch=channel.epoch,
        request=told.request,
        tokens=told.tokens,
        hit=told.hit,
    )
    return LeaseId(channel.ask(request, Declared, told.frames)[0].lease)
