"""Admission of engines: hello, rejoin, shard processes that join, and whether the daemon accepts new work.

A device pool has one engine at a time. The next engine is admitted when no process of the last one can write the pool.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

from kvcached.core.cache import Cache
from kvcached.core.managed_session import ManagedSession
from kvcached.core.messages import MembersDied
from kvcached.core.session import OffloadSession
from kvcached.core.slots.states import DAEMON_TRANSITIONS, DaemonState, SessionState
from kvcached.events.token_book import TokenBook
from kvcached.service.replica import Replica, unknown_replica
from kvcached.service.sessions import EngineGroup, EngineGroups, Peer
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import Joined
from kvcached_client.protocol.fields import TELLS_TOKENS
from kvcached_client.types import SessionId, ShardIndex

#: Of version 1; a later optional field comes with a name here.
CAPABILITIES: tuple[str, ...] = (TELLS_TOKENS,)

SessionT = TypeVar("SessionT", ManagedSession, OffloadSession)

_log: Final = logging.getLogger(__name__)


class DrainState:
    """Whether the daemon takes new work: it serves, drains or stops.

    Attributes:
        state: see `DaemonState`.
    """

    def __init__(self) -> None:
        self.state = DaemonState.SERVING

    @property
    def takes_work(self) -> bool:
        """Whether there may be new sessions and leases."""
        return self.state is DaemonState.SERVING

    def enter(self, state: DaemonState) -> bool:
        """Enter a state, if an edge of the table leads there; whether it did."""
        if (self.state, state) not in DAEMON_TRANSITIONS:
            return False
        _log.info("the daemon was %s and is now %s", self.state, state)
        self.state = state
        return True

    def check(self) -> None:
        """Refuse new work while the daemon drains or stops.

        Raises:
            DaemonFailure: `draining`.
        """
        if not self.takes_work:
            raise self.refusal()

    def refusal(self) -> RequestError:
        """The error for new work, and for requests that are pending when the daemon ends."""
        return request_error(
            ErrorCode.DRAINING, f"the daemon is {self.state}", "wait until it serves again, or use another daemon"
        )


class Admission:
    """Opens sessions and lets shard processes in.

    Args:
        heartbeat_interval_ms: what engines are told.
        book: the tokens that routers may know.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        groups: EngineGroups,
        heartbeat_interval_ms: int,
        book: TokenBook | None,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._groups = groups
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._book = book

    def hello(self, connection: bytes, request: wire.Hello, now_ms: int) -> tuple[wire.Welcome, Peer]:
        """Open a session for a process, owned by a connection.

        Raises:
            RequestError: another version, no living process, no such replica or layout, or the pool is taken or down.
        """
        peer = presented(self._groups, request)
        replica = self._replica(request)
        peer.grants.check_replica(replica.name)
        replaced = self._replaced_session(replica.name, connection, peer)
        session = self._cache.open_session(replica.name, now_ms)
        group = self._groups.open(session.id, connection, peer)
        if replaced is not None:  # after the new group is there: its process must stay watched
            self._cache.handle(MembersDied(replaced.id))
        return self._welcome(request.id, request.capabilities, session, group), peer

    def join(
        self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined, tuple[int, ...]]:
        """Let a shard process in: the answer and the descriptors to pass on, which stay the daemon's own.

        Raises:
            RequestError: no such session or not its token, expired, or no such shard.
        """
        group, session = joining(self._groups, self._cache.managed.sessions, session_id, token)
        replica = self._replicas[session.pool.name]
        peer.grants.check_replica(replica.name)
        check_shard(shard, replica.layout.shards)
        descriptors = replica.workers.descriptors(shard)
        self._groups.see(group, peer)
        self._groups.join(group, peer)
        joined = Joined(
            kind="cuda" if replica.cuda_devices else "memfd",
            device=replica.cuda_devices[shard] if replica.cuda_devices else "",
            shard=shard,
            epoch=session.pool.epoch,
            layout=replica.layout,
            slots=replica.slots,
            pool_bytes=replica.layout.pool_bytes(replica.slots),
        )
        return joined, descriptors

    def leave(self, peer: Peer) -> list[Peer]:
        """A shard process no longer uses its pool: its death does not end the session.

        Returns those that are in no other group, as `EngineGroups.leave`.
        """
        left: list[Peer] = []
        for group in self._groups.of_peer(peer):
            if group.scheduler is not peer:
                left += self._groups.leave(group, [peer])
        return left

    def find_earlier(self, connection: bytes, request: wire.Rejoin) -> tuple[EngineGroup, Peer]:
        """The group of a session from before a restart, and the process that resumes it over a connection.

        Raises:
            RequestError: another version or layout, no living process, or nothing is left of that session.
        """
        peer = presented(self._groups, request)
        self._groups.check_free(connection)
        group = self._groups.find_earlier((request.daemon_epoch, request.session), request.token, peer)
        if (session := self._cache.managed.sessions.get(group.session)) is None:
            raise request_error(
                ErrorCode.NO_SESSION, "the session was not on a device pool", "connect, as a new engine does"
            )
        self._groups.see(group, peer)
        replica = self._replicas[session.pool.name]
        peer.grants.check_replica(replica.name)
        check_layout(request.layout, replica)
        if request.namespace != replica.namespace:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                "the namespace was cleared, or has other weights, since the session was opened",
                "connect, as a new engine does",
            )
        return group, peer

    def expired(self, session_id: SessionId) -> bool:
        """A session is over, unless its engine may not have heard that it has rejoined: then it may rejoin again."""
        session = self._cache.managed.sessions.get(session_id)
        may_return = session is not None and session.may_return
        if not may_return:
            self._groups.end(session_id)
        return may_return

    def welcome_back(self, request: wire.Rejoin, session: ManagedSession, group: EngineGroup) -> wire.Welcome:
        """The answer to a `Rejoin` that is granted, which offers no capabilities: those that there are now."""
        return self._welcome(request.id, CAPABILITIES, session, group)

    def _replica(self, request: wire.Hello) -> Replica:
        replica = self._replicas.get(request.replica)
        if replica is None:
            raise unknown_replica(request.replica, self._replicas, "connect with OffloadClient, or add a [[replica]]")
        check_layout(request.layout, replica)
        return replica

    def _replaced_session(self, replica: str, connection: bytes, peer: Peer) -> ManagedSession | None:
        """The expired session that this hello replaces: its process declares that it no longer uses that session.

        Raises:
            Refused: somebody may write into the pool: an active session, or another living process of an expired one.
        """
        owned = self._groups.of_connection(connection)
        for session in self._cache.managed.sessions.values():
            group = self._groups.of_session(session.id)
            if group is None or (session.pool.name != replica and group is not owned):
                continue
            others = group.living(beside=peer)
            if session.state is SessionState.ACTIVE or others or session.pool.name != replica:
                raise _pool_busy(session, group, is_own=not others)
            return session
        return None

    def _welcome(
        self, request_id: int, capabilities: Sequence[str], session: ManagedSession, group: EngineGroup
    ) -> wire.Welcome:
        replica = self._replicas[session.pool.name]
        granted = set(CAPABILITIES)
        if self._book is None or not self._book.wants(self._cache.announced_to(session.id)):
            granted.discard(TELLS_TOKENS)
        return wire.Welcome(
            id=request_id,
            version=wire.PROTOCOL_VERSION,
            session=session.id,
            token=group.token,
            daemon_epoch=self._cache.epoch,
            epoch=session.pool.epoch,
            generation=replica.generation,
            namespace=replica.namespace,
            key_algorithm=replica.key_algorithm,
            layout=replica.layout,
            slots=replica.slots,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            session_ttl_ms=self._cache.session_ttl_ms,
            capabilities=tuple(sorted(granted.intersection(capabilities))),
        )


def _pool_busy(session: ManagedSession, group: EngineGroup, *, is_own: bool) -> RequestError:
    """The refusal of a hello. `is_own`: no other process than the one that says hello is in the session."""
    pids = sorted({member.pid for member in group.living()})
    message = f"{session.state} session {session.id} holds replica {session.pool.name!r} for processes {pids}"
    fix = "close that session, or end its processes, or use another replica"
    if is_own:
        message += ", which is this process: a client of it was not closed, or was interrupted"
        fix = "close that client; if nothing holds it any more, its session expires when its heartbeats have ended"
    if 0 in pids:
        fix += "; process 0 is not seen here: its engine has to rejoin, or the daemon to start without its memory"
    return request_error(ErrorCode.POOL_BUSY, message, fix)


def presented(groups: EngineGroups, request: wire.Hello | wire.HelloOffload | wire.Rejoin) -> Peer:
    """The process that asks for a session.

    Raises:
        RequestError: it speaks another version of the protocol, or shows no member token of a living process.
    """
    if not request.version_min <= wire.PROTOCOL_VERSION <= request.version_max:
        raise request_error(
            ErrorCode.UNSUPPORTED_VERSION,
            f"the client speaks {request.version_min} to {request.version_max}, the daemon {wire.PROTOCOL_VERSION}",
            "client and daemon must be at most one version apart: upgrade the older",
        )
    return groups.claim(request.member)


def joining(
    groups: EngineGroups, sessions: Mapping[SessionId, SessionT], session_id: SessionId, token: bytes
) -> tuple[EngineGroup, SessionT]:
    """The group and the session that a shard process with the session's token asks to join.

    Raises:
        RequestError: there is no such session, it has another token, or it has expired.
    """
    group, session = groups.authenticate(session_id, token), sessions.get(session_id)
    if session is None or session.state is not SessionState.ACTIVE:
        raise request_error(
            ErrorCode.SESSION_EXPIRED, f"session {session_id} is over", "connect again, then join that session"
        )
    return group, session


def check_shard(shard: ShardIndex, shards: int) -> None:
    """Refuse a shard that the session does not have."""
    if shard >= shards:
        raise request_error(ErrorCode.BAD_VALUE, f"shard {shard} of {shards}", "shards are counted from 0")


def check_layout(fingerprint: str, replica: Replica) -> None:
    """Refuse an engine that was built for another layout than the pool has; "" accepts any layout."""
    if fingerprint and fingerprint != replica.layout.fingerprint():
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"the engine was built for layout {fingerprint}, the pool has {replica.layout.fingerprint()}",
            "give daemon and engine the same model, block size, shards and dtype",
        )
