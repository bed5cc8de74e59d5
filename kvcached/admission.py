"""Who gets a pool: an engine's hello, and its shard processes that join.

A pool has one engine at a time. Another one gets it once nobody of the old one can write any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from kvcached.core.cache import Cache
from kvcached.core.events import MembersDied
from kvcached.core.session import Session
from kvcached.core.states import SessionState
from kvcached.membership import Group, Membership, Peer
from kvcached.replica import Replica
from kvcached_client import protocol as wire
from kvcached_client.attach_protocol import Joined
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.types import SessionId, ShardIndex

CAPABILITIES: tuple[str, ...] = ()  #: of version 1; a later optional field comes with a name here

#: ZeroMQ makes routing ids of five bytes, the first of them zero, for peers that do not choose one.
_ROUTING_ID_LENGTH = 5


class Admission:
    """Opens sessions and lets shard processes in.

    Args:
        heartbeat_interval_ms: what engines are told.
    """

    def __init__(
        self, cache: Cache, replicas: Mapping[str, Replica], membership: Membership, heartbeat_interval_ms: int
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._membership = membership
        self._heartbeat_interval_ms = heartbeat_interval_ms

    def hello(self, connection: bytes, request: wire.Hello, now_ms: int) -> tuple[wire.Welcome, Peer]:
        """Open a session for a process, owned by a connection.

        Raises:
            RequestError: another version, no living process, no such replica or layout, or the pool is taken or down.
        """
        check_version(request.version_min, request.version_max)
        check_connection(connection)
        peer = self._membership.claim(request.member)
        replica = self._replica(request)
        replaced = self._replaced_session(replica.name, connection, peer)
        session = self._cache.open_session(replica.name, now_ms)
        group = self._membership.open(session.id, connection, peer)
        if replaced is not None:  # after the new group is there: its process must stay watched
            self._cache.handle(MembersDied(replaced.id))
        return self._welcome(request.id, request.capabilities, session, group), peer

    def join(
        self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[Joined, tuple[int, ...]]:
        """Let a shard process in: the answer and the descriptors to pass on, which stay the workers' own.

        Raises:
            RequestError: no such session or not its token, expired, no such shard, or it has no worker now.
        """
        group = self._membership.authenticate(session_id, token)
        session = self._active_session(group)
        replica = self._replicas[session.pool.name]
        if shard >= replica.layout.shards:
            raise request_error(
                ErrorCode.BAD_VALUE, f"shard {shard} of {replica.layout.shards}", "shards are counted from 0"
            )
        descriptors = replica.workers.descriptors(shard)
        self._membership.join(group, peer)
        joined = Joined(
            kind="memfd",
            shard=shard,
            epoch=session.pool.epoch,
            layout=replica.layout,
            slots=replica.slots,
            pool_bytes=replica.layout.pool_bytes(replica.slots),
        )
        return joined, descriptors

    def find_earlier(self, connection: bytes, request: wire.Rejoin) -> tuple[Group, Peer]:
        """The group of a session of before a restart, and the process that comes back to it over a connection.

        Raises:
            RequestError: another version or layout, no living process, or nothing is left of that session.
        """
        check_version(request.version_min, request.version_max)
        check_connection(connection)
        peer = self._membership.claim(request.member)
        if self._membership.of_connection(connection) is not None:
            raise request_error(ErrorCode.POOL_BUSY, "this connection has a session", "use a connection for each")
        group = self._membership.find_earlier((request.daemon_epoch, request.session), request.token)
        if (session := self._cache.sessions.get(group.session)) is None:
            raise request_error(
                ErrorCode.NO_SESSION, "the session was not on a device pool", "say hello, as a new engine does"
            )
        replica = self._replicas[session.pool.name]
        check_layout(request.layout, replica)
        if request.namespace != replica.namespace:
            raise request_error(
                ErrorCode.STALE_EPOCH,
                "the namespace was cleared, or has other weights, since the session was opened",
                "say hello, as a new engine does",
            )
        return group, peer

    def welcome_back(self, request: wire.Rejoin, session: Session, group: Group) -> wire.Welcome:
        """The answer to a `Rejoin` that is granted."""
        return self._welcome(request.id, (), session, group)

    def _replica(self, request: wire.Hello) -> Replica:
        replica = self._replicas.get(request.replica)
        if replica is None:
            raise unknown_replica(request.replica, self._replicas)
        check_layout(request.layout, replica)
        return replica

    def _replaced_session(self, replica: str, connection: bytes, peer: Peer) -> Session | None:
        """The expired session that this process's hello replaces: saying it again is its word that the old is over.

        Raises:
            Refused: somebody may write into the pool: an active session, or another living process of an expired one.
        """
        owned = self._membership.of_connection(connection)
        for session in self._cache.sessions.values():
            group = self._membership.of_session(session.id)
            if group is None or (session.pool.name != replica and group is not owned):
                continue
            others = group.living(beside=peer)
            if session.state is SessionState.ACTIVE or others or session.pool.name != replica:
                pids = sorted({member.pid for member in group.living()})
                raise request_error(
                    ErrorCode.POOL_BUSY,
                    f"{session.state} session {session.id} holds replica {session.pool.name!r} for processes {pids}",
                    "say bye in that session, or end its processes, or use another replica",
                )
            return session
        return None

    def _welcome(self, request_id: int, capabilities: Sequence[str], session: Session, group: Group) -> wire.Welcome:
        replica = self._replicas[session.pool.name]
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
            capabilities=tuple(name for name in CAPABILITIES if name in capabilities),
        )

    def _active_session(self, group: Group) -> Session:
        session = self._cache.sessions.get(group.session)
        if session is None or session.state is not SessionState.ACTIVE:
            raise request_error(
                ErrorCode.SESSION_EXPIRED, f"session {group.session} is over", "say hello again, then join"
            )
        return session


def check_version(version_min: int, version_max: int) -> None:
    """Refuse a client that does not speak this daemon's version."""
    if not version_min <= wire.PROTOCOL_VERSION <= version_max:
        raise request_error(
            ErrorCode.UNSUPPORTED_VERSION,
            f"the client speaks {version_min} to {version_max}, the daemon {wire.PROTOCOL_VERSION}",
            "client and daemon must be at most one version apart: upgrade the older",
        )


def check_layout(fingerprint: str, replica: Replica) -> None:
    """Refuse an engine that was built for another layout than the pool has; "" takes whatever there is."""
    if fingerprint and fingerprint != replica.layout.fingerprint():
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"the engine was built for layout {fingerprint}, the pool has {replica.layout.fingerprint()}",
            "give daemon and engine the same model, block size, shards and dtype",
        )


def check_connection(connection: bytes) -> None:
    """Refuse a connection that chose its own routing id: another one could take its place."""
    if len(connection) != _ROUTING_ID_LENGTH or connection[0]:
        raise request_error(
            ErrorCode.BAD_VALUE, "the connection chose its own routing id", "leave ZMQ_ROUTING_ID unset"
        )


def unknown_replica(name: str, replicas: Iterable[str]) -> RequestError:
    """What is told to who asks for a replica that is not configured."""
    return request_error(
        ErrorCode.UNKNOWN_REPLICA, f"there is no replica {name!r}", f"configured are: {', '.join(sorted(replicas))}"
    )
