"""An engine on a device pool goes on with a daemon that was started anew: it says what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcached_client.blocks.block_table import compress_slots
from kvcached_client.errors import DaemonFailure, ErrorCode, Refused, Stale, TransportError
from kvcached_client.protocol import engine as wire
from kvcached_client.types import SessionId
from tests.simulation.attachment import Attachment
from tests.simulation.engine import run_on
from tests.simulation.line import Line
from tests.simulation.managed_device import Device, DeviceShard, HeldLease, ManagedSession
from tests.simulation.process import Process, every
from tests.simulation.scheduler import MS, Broken

if TYPE_CHECKING:
    from tests.simulation.world import World

#: So often it looks for a daemon.
_LOOKS = 12
_LOOK_US = (20 * MS, 500 * MS)
#: So often a declaration is said. What was declared in part is no session to go on with.
_TRIES = 8
#: A rejoin that was repeated after the session that it resumed was over again.
_NOT_TO_BE_HAD = (ErrorCode.UNAUTHENTICATED, ErrorCode.POOL_BUSY)


class Return:
    """From a session whose daemon is dead to one of the next daemon.

    Args:
        session: over, and nobody asks anything in it any more.
        processes: of the engine, the scheduler first.
    """

    def __init__(self, world: World, session: ManagedSession, device: Device, processes: Sequence[Process]) -> None:
        self._world = world
        self._session = session
        self._device = device
        self._scheduler = processes[0]

    async def come_back(self) -> ManagedSession | None:
        """The session to go on with; None where there is none.

        Raises:
            Broken: what was declared is refused, or the memory is another one.
        """
        if self._world.chance.happens(0.5):
            await self._device.written(self._session)
        self._device.end_others(self._session)
        for _ in range(_LOOKS):
            attachment, line = Attachment(self._world, self._scheduler), Line(self._world, self._scheduler)
            try:
                welcome = await self._rejoin(attachment, line)
            except (Refused, Stale, TransportError) as error:
                if isinstance(error, Refused) and error.code not in _NOT_TO_BE_HAD:
                    raise
                line.close()  # without a goodbye: leases are being written
                attachment.hang_up()
                if not isinstance(error, TransportError):
                    self._world.seen["nothing left to come back to"] += 1
                    return None
                await self._scheduler.sleep(self._world.chance.spread(*_LOOK_US), "looks for a daemon again")
            else:
                return await self._go_on(welcome, attachment, line)
        return None

    async def _rejoin(self, attachment: Attachment, line: Line) -> wire.Welcome:
        identified, before = await attachment.identify(), self._session.welcome
        request = wire.Rejoin(
            id=line.next_id(),
            version_min=1,
            version_max=1,
            member=identified.member,
            session=before.session,
            daemon_epoch=before.daemon_epoch,
            token=before.token,
            layout=before.layout.fingerprint(),
            namespace=before.namespace,
            fence=self._session.unsignalled,
        )
        welcome, _ = await line.ask(request, wire.Welcome)
        self._world.seen["engine came back with work queued"] += request.fence > 0
        if welcome.namespace != before.namespace or welcome.generation != before.generation:
            raise Broken(f"a session of generation {before.generation} goes on in one of {welcome.generation}")
        return welcome

    async def _go_on(self, welcome: wire.Welcome, attachment: Attachment, line: Line) -> ManagedSession | None:
        session = ManagedSession(welcome, line, self._session.works)
        session.shards, session.prompts = self._session.shards, self._session.prompts
        session.attachments.append(attachment)
        attachment.on_closed = session.lost
        line.epoch = welcome.epoch
        line.on_give_back = lambda lease: self._device.end_lease(session, self._world.first_name(session, lease), 0)
        try:
            for lease in list(self._session.held.values()):
                await self._declare(session, lease)
            over = wire.DeclareOver(id=line.next_id(), epoch=session.epoch)
            await line.ask(over, wire.DeclareEnded, tries=_TRIES)
            joins = [run_on(shard.process, lambda shard=shard: self._join(session, shard)) for shard in session.shards]  # type: ignore[misc]
            joined = await every(joins)
        except (Stale, TransportError):
            joined = [False]
        if not all(joined):
            self._abandon(session)
            return None
        self._world.seen["engine came back to its leases"] += 1
        return session

    async def _declare(self, session: ManagedSession, lease: HeldLease) -> None:
        there, own = (lease.ready, lease.hit) if lease.is_loading else (lease.depth, lease.depth)
        request = wire.Declare(
            id=session.line.next_id(),
            epoch=session.epoch,
            request=lease.name,
            tokens=lease.chain.token_count,
            hit=own,
        )
        frames = lease.chain.key_range(0, there), _packed(lease.table[:there]), _packed(lease.table[own:])
        try:
            declared, _ = await session.line.ask(request, wire.Declared, frames, tries=_TRIES)
        except Refused as error:
            # The network lets a reply overtake another, which a socket does only where a call was given up: a lease may
            # have got, by a commit that was heard, a slot of a lease whose own commit was not.
            is_unheard = any(other.is_committing for other in self._session.held.values())
            if error.code is not ErrorCode.UNKNOWN_SLOT or not is_unheard:
                raise
            self._world.seen["nothing left to come back to: a commit was not heard"] += 1
            raise Stale(error.code, error.message, error.fix) from error
        lease.id = declared.lease
        session.held[lease.id] = lease
        self._world.seen["lease declared"] += 1
        self._world.seen["lease declared while it was loading"] += lease.is_loading

    async def _join(self, session: ManagedSession, shard: DeviceShard) -> bool:
        attachment = Attachment(self._world, shard.process)
        session.attachments.append(attachment)
        try:
            _, (handle,) = await attachment.join(SessionId(session.number), session.token, shard.index)
        except (Stale, DaemonFailure, TransportError):
            return False
        if self._world.device_memories[handle] is not shard.memory:
            raise Broken(f"session {session.number} goes on in other memory")
        return True

    def _abandon(self, session: ManagedSession) -> None:
        """The engine ends the session before, and with it what is queued."""
        session.over = True
        session.line.tell_goodbye()
        for attachment in session.attachments:
            attachment.hang_up()


def _packed(slots: list[int]) -> bytes:
    return compress_slots(np.array(slots, np.int32))
