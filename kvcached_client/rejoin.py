"""How a managed engine survives its daemon: a reserve of slots meanwhile, and rejoining the next daemon."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvcached_client.errors import KvcachedError
from kvcached_client.grants import Declaration, Slots
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
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.session import SessionChannel
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId

if TYPE_CHECKING:
    from kvcached_client.lease import Lease

_log: Final = logging.getLogger("kvcached_client")


class Declarable(Protocol):
    """A lease, as far as it is declared."""

    def declaration(self) -> Declaration | None:
        """What there is to say of it; None where it is given back."""

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """It goes on over another connection, under another id."""


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


class Reserve:
    """The slots of one lease, which nobody writes before they are taken. Used by one thread.

    Args:
        keeper: the lease; it has slots only.
    """

    def __init__(self, keeper: Lease) -> None:
        self._keeper = keeper
        self._capacity_tokens = keeper.capacity_tokens
        self._free: list[int] = keeper.block_table.tolist()
        #: Slots that came back while work was queued on them, with the fence behind that.
        self._fenced: list[tuple[FenceSequence, list[int]]] = []
        self._signalled = NO_FENCE

    def take(self, count: int) -> Slots | None:
        """So many slots, or None where fewer are left."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int32)

    def give(self, slots: Slots, fence: FenceSequence) -> None:
        """Slots come back. They are taken again once `fence` has signalled."""
        self._fenced.append((fence, slots.tolist()))
        self.signal(self._signalled)

    def signal(self, fence: FenceSequence) -> None:
        """The engine's queued work up to a fence is over."""
        self._signalled = fence
        self._free += [slot for named, slots in self._fenced if named <= fence for slot in slots]
        self._fenced = [(named, slots) for named, slots in self._fenced if named > fence]

    def refill(self) -> None:
        """Slots in place of those that other leases have taken for good, as far as the pool has any."""
        had = len(self._free)
        try:
            self._keeper.allocate(self._capacity_tokens)
        except KvcachedError as error:
            _log.info("the reserve has only %d slots for now: %s", had, error)
        self._free += self._keeper.block_table[had:].tolist()

    # As a lease that is declared:

    def declaration(self) -> Declaration | None:
        """What is left of it."""
        self._keeper.hold_only(np.array(self._free, np.int32))
        return self._keeper.declaration()

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """See `Lease.take_up`. Slots that wait for their fence are the daemon's, which waits for it as well."""
        self._fenced.clear()
        self._keeper.take_up(channel, lease_id)
