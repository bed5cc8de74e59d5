"""How a managed engine survives its daemon: a reserve of slots meanwhile, and rejoining the next daemon."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from kvcached_client.errors import KvcachedError
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
from kvcached_client.protocol.grants import Declaration, Slots
from kvcached_client.transport.attach import SessionGrant
from kvcached_client.transport.session import SessionChannel
from kvcached_client.types import NO_FENCE, FenceSequence, LeaseId

if TYPE_CHECKING:
    from kvcached_client.lease import Lease

_log: Final = logging.getLogger("kvcached_client")


class Declarable(Protocol):
    """What `declare` needs of a lease."""

    def declaration(self) -> Declaration | None:
        """What the next daemon must know; None if the lease is released."""

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """Continue over another connection, under another id."""


def rejoin(
    channel: SessionChannel,
    member: bytes,
    grant: SessionGrant,
    daemon_epoch: int,
    layout: str,
    namespace: bytes,
    fence: FenceSequence,
) -> Welcome:
    """Ask to continue a session of the earlier daemon.

    Until `fence` has signalled, the engine may have queued work on every slot that the session ever held: until then
    nobody else gets these slots, whether they are declared or not.

    Raises:
        Stale: the pool no longer exists, or the namespace has been cleared.
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
    """Declare all leases, then end the declaration.

    Raises:
        RequestError, TransportError: a lease was not accepted. The pool then grants nothing: end the session.
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
    """Slots for new requests while the daemon is away, held by one lease. Used by one thread.

    Args:
        keeper: the lease that holds the slots.
    """

    def __init__(self, keeper: Lease) -> None:
        self._keeper = keeper
        self._capacity_tokens = keeper.capacity_tokens
        self._free: list[int] = keeper.block_table.tolist()
        #: Returned slots on which work may still be queued, with the fence that ends the work.
        self._fenced: list[tuple[FenceSequence, list[int]]] = []
        self._signalled = NO_FENCE

    def take(self, count: int) -> Slots | None:
        """Take `count` slots, or None if fewer are left."""
        if count > len(self._free):
            return None
        taken, self._free = self._free[:count], self._free[count:]
        return np.array(taken, np.int32)

    def give(self, slots: Slots, fence: FenceSequence) -> None:
        """Return slots. They can be taken again once `fence` has signalled."""
        self._fenced.append((fence, slots.tolist()))
        self.signal(self._signalled)

    def signal(self, fence: FenceSequence) -> None:
        """Note that the engine's queued work up to a fence is done."""
        self._signalled = fence
        self._free += [slot for named, slots in self._fenced if named <= fence for slot in slots]
        self._fenced = [(named, slots) for named, slots in self._fenced if named > fence]

    def refill(self) -> None:
        """Replace the slots that other leases have taken, as far as the pool has free ones."""
        had = len(self._free)
        try:
            self._keeper.allocate(self._capacity_tokens)
        except KvcachedError as error:
            _log.info("the reserve has only %d slots for now: %s", had, error)
        self._free += self._keeper.block_table[had:].tolist()

    # The interface of `Declarable`:

    def declaration(self) -> Declaration | None:
        """Declare the slots that are left. Those that wait for a fence go back to the daemon, which waits for it, too.

        They do so even if the declaration fails: the answer may have been lost, and the daemon may use them.
        """
        self._fenced.clear()
        self._keeper.hold_only(np.array(self._free, np.int32))
        return self._keeper.declaration()

    def take_up(self, channel: SessionChannel, lease_id: LeaseId) -> None:
        """See `Lease.take_up`."""
        self._keeper.take_up(channel, lease_id)
