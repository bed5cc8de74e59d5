"""Which processes stand behind a session, and what their deaths mean.

A session is a group: the process whose connection said hello, and the shard processes that joined with the session's
token. One of them dying ends the group; its slots are free once all of them are dead, or the only one says so.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, Self

from msgspec import UnsetType

from kvcached.process.access import Grants
from kvcached.process.identity import ProcessIdentity
from kvcached.recovery.state_file import EarlierRecord
from kvcached.service.kept_answers import KeptAnswers
from kvcached.service.known_prompts import KnownPrompts
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import KNOWN_BLOCKS_MIN, TOKEN_SIZE_BYTES
from kvcached_client.types import SessionId, ShardIndex


class Peer(Protocol):
    """A process at the other end of an attach connection."""

    @property
    def pid(self) -> int:
        """Its pid in the daemon's namespace, for messages; 0 where it is not visible, so it is no identity."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """What tells it from later processes; None where that cannot be seen from here."""

    @property
    def grants(self) -> Grants:
        """What its user may do."""

    @property
    def is_seen(self) -> bool:
        """Whether its death would be noticed; else it is from before a restart, and is never dead."""

    def is_dead(self) -> bool:
        """Whether the process has ended, as its pidfd says."""

    def close(self) -> None:
        """Stop watching the process."""

    def is_same_process(self, other: Any) -> bool:  # noqa: ANN401 - any peer from the same source
        """Whether two living peers are known to be the same process."""


class PeerWatch(Protocol):
    """Watches processes for their death."""

    def watch(self, peer: Any) -> None:  # noqa: ANN401 - as below
        """Tell of a process's death, until it is forgotten."""

    def forget(self, peer: Any) -> None:  # noqa: ANN401 - the same peers that it brought, whatever class they have
        """Stop watching a process that is in no session."""


@dataclass(slots=True, eq=False)
class EngineGroup:
    """One session's processes.

    Attributes:
        token: secret that shard processes and heartbeats present.
        connection: routing id of the connection that owns the session.
        scheduler: the process at the other end of that connection.
        answers: kept for retries over that connection.
        prompts: what it has acquired.
        members: every process that can write the session's slots; dead ones stay until the session ends.
        instance: in offload mode, the engine's own id, the same in each hello; empty in a group of several engines.
        shard_of: in offload mode, which shard a member is.
        engine_of: in a group of several engines, of which one a member is: its instance.
        found: what it was before a restart; None for one that was opened or has been resumed since.
        resumed_as: by which name its engine has resumed it. Until the engine is known to have heard of the present
            name, the same process may resume it by this one again.
        is_over: the session has expired or has lost a member. Its living processes may still write its slots; after a
            restart the session cannot be resumed.
    """

    session: SessionId
    token: bytes
    connection: bytes
    scheduler: Peer
    answers: KeptAnswers
    prompts: KnownPrompts
    members: list[Peer] = field(default_factory=list)
    instance: bytes = b""
    shard_of: dict[Peer, ShardIndex] = field(default_factory=dict)
    engine_of: Mapping[Peer, bytes] = field(default_factory=dict)
    found: FoundSession | None = None
    resumed_as: EarlierName | None = None
    is_over: bool = False

    def living(self, *, beside: Peer | None = None) -> list[Peer]:
        """Members that live, without those known to be the same process as `beside`."""
        return [
            member
            for member in self.members
            if not member.is_dead() and (beside is None or not member.is_same_process(beside))
        ]

    def of_engine(self, instance: bytes) -> list[Peer]:
        """The members that are processes of this engine."""
        return [member for member in self.members if self.engine_of.get(member, self.instance) == instance]

    def others(self) -> list[Peer]:
        """Members that live beside the scheduler, which speaks for those that are not seen: it has shown the secret."""
        return [member for member in self.living(beside=self.scheduler) if member.is_seen]


class EarlierName(NamedTuple):
    """By which a daemon before this one, or an engine of then, knows a session.

    Attributes:
        earlier: the epoch of that daemon, and the session's id there.
        token_digest: sha256 of its token there.
    """

    earlier: tuple[int, int]
    token_digest: bytes

    @classmethod
    def recorded(cls, record: EarlierRecord | UnsetType) -> Self | None:
        """What the daemon before has written down, if anything."""
        if isinstance(record, UnsetType):
            return None
        return cls((record.epoch, record.id), bytes.fromhex(record.token_digest))

    def is_shown_by(self, earlier: tuple[int, int], token_digest: bytes) -> bool:
        """Whether somebody who shows this knows the session."""
        return self.earlier == earlier and hmac.compare_digest(self.token_digest, token_digest)


class FoundSession(NamedTuple):
    """A session from before a restart, with a process that still lives.

    Attributes:
        id: of its session here, which is expired.
        earlier: what it was: the epoch of the daemon that opened it, and its id there.
        token_digest: sha256 of its token there.
        instance: in offload mode, what it calls itself; empty where it stands for several engines.
        members: its living processes; which shard each is, None for the scheduler.
        is_over: see `EngineGroup`; so is one of whose members some are dead.
        resumed_as: see `EngineGroup`: its engine knows it by this name or by the one above.
        engine_of: see `EngineGroup`.
    """

    id: SessionId
    earlier: tuple[int, int]
    token_digest: bytes
    instance: bytes
    members: list[tuple[Peer, ShardIndex | None]]
    is_over: bool = False
    resumed_as: EarlierName | None = None
    engine_of: Mapping[Peer, bytes] = MappingProxyType({})

    @property
    def names(self) -> list[EarlierName]:
        """By which its engine may know it."""
        return [EarlierName(self.earlier, self.token_digest), *([self.resumed_as] if self.resumed_as else [])]


class EngineGroups:
    """Tokens, groups and connections. Holds no sockets and decides nothing about slots.

    Args:
        answers_kept: how many answers of each session are kept for retries.
        known_blocks_min: prompts of so many blocks and more are remembered.

    Attributes:
        version: grows whenever a group or its members change.
    """

    def __init__(self, answers_kept: int, known_blocks_min: int = KNOWN_BLOCKS_MIN) -> None:
        self._answers_kept = answers_kept
        self._known_blocks_min = known_blocks_min
        self.version = 0
        self._candidates: dict[bytes, Peer] = {}  #: member token -> a process that identified itself
        self._by_session: dict[SessionId, EngineGroup] = {}
        self._of_connection: dict[bytes, EngineGroup] = {}

    def identify(self, peer: Peer) -> bytes:
        """A token that lets this process say hello; asking again gives the same."""
        for token, candidate in self._candidates.items():
            if candidate is peer:
                return token
        token = secrets.token_bytes(TOKEN_SIZE_BYTES)
        self._candidates[token] = peer
        return token

    def claim(self, token: bytes) -> Peer:
        """The process that holds a member token. A token stays good until its process is gone.

        Raises:
            RequestError: no living process holds it.
        """
        peer = self._candidates.get(token)
        if peer is None or peer.is_dead():
            raise request_error(
                ErrorCode.UNAUTHENTICATED,
                "the member token is not that of a living process",
                "connect again",
            )
        return peer

    def open(self, session: SessionId, connection: bytes, peer: Peer) -> EngineGroup:
        """A new group of one process, owned by a connection."""
        group = self._new(session, connection, peer, [peer])
        self._of_connection[connection] = group
        return group

    def restore(self, found: FoundSession) -> EngineGroup:
        """The group of a session from before a restart. No connection owns it yet.

        Its scheduler is the member that is no shard, or where that is dead, any.
        """
        peers = [peer for peer, _ in found.members]
        scheduler = next((peer for peer, shard in found.members if shard is None), peers[0])
        group = self._new(found.id, b"", scheduler, peers)
        group.instance, group.found, group.is_over = found.instance, found, found.is_over
        group.shard_of = {peer: shard for peer, shard in found.members if shard is not None}
        group.engine_of = found.engine_of
        return group

    def _new(self, session: SessionId, connection: bytes, scheduler: Peer, members: list[Peer]) -> EngineGroup:
        token, answers = secrets.token_bytes(TOKEN_SIZE_BYTES), KeptAnswers(self._answers_kept)
        prompts = KnownPrompts(self._known_blocks_min, lambda: len(self._by_session))
        group = EngineGroup(session, token, connection, scheduler, answers, prompts, members)
        self._by_session[session] = group
        for each in self._by_session.values():
            each.prompts.trim()
        self.version += 1
        return group

    def find_earlier(self, earlier: tuple[int, int], token: bytes, peer: Peer) -> EngineGroup:
        """The group of a session from before a restart, for a process that shows the token that it had.

        One that has been resumed is found for the process that has resumed it.

        Raises:
            RequestError: the session is over, or had another token. Both errors are the same, so that guessing tells
                nothing.
        """
        digest = hashlib.sha256(token).digest()
        for group in self._by_session.values():
            if group.is_over:
                continue
            if group.found is not None and any(name.is_shown_by(earlier, digest) for name in group.found.names):
                return group
            is_resumed = group.resumed_as is not None and group.resumed_as.is_shown_by(earlier, digest)
            if is_resumed and group.scheduler.is_same_process(peer):
                return group
        raise request_error(
            ErrorCode.NO_SESSION,
            f"session {earlier[1]} of epoch {earlier[0]} is over, or its token was another",
            "connect, as a new engine does",
        )

    def resume(self, group: EngineGroup, connection: bytes, peer: Peer, name: EarlierName) -> list[Peer]:
        """The scheduler of a group from before a restart has come back; its connection owns the group from now on.

        If it has come back already, nothing that it was told then is good any more. Returns the members removed that
        are in no other group.
        """
        departed: list[Peer] = []
        if group.resumed_as is not None:
            self._of_connection.pop(group.connection, None)
            group.token, group.answers = secrets.token_bytes(TOKEN_SIZE_BYTES), KeptAnswers(self._answers_kept)
            departed = self.leave(group, [group.scheduler]) if group.scheduler is not peer else []
        group.connection, group.scheduler, group.found, group.resumed_as = connection, peer, None, name
        if peer not in group.members:
            group.members.append(peer)
        self._of_connection[connection] = group
        self.version += 1
        return departed

    def see(self, group: EngineGroup, peer: Peer) -> None:
        """A process has shown the secret of a group: it is one of those that were not seen, first the scheduler."""
        unseen = [member for member in (group.scheduler, *group.members) if not member.is_seen]
        if not unseen or peer in group.members:
            return
        group.members[group.members.index(unseen[0])] = peer
        if group.scheduler is unseen[0]:
            group.scheduler = peer
        self.version += 1

    def join(self, group: EngineGroup, peer: Peer, shard: ShardIndex | None = None) -> None:
        """A shard process enters a group whose token it has shown; twice is once. `shard`: `EngineGroup.shard_of`."""
        if peer not in group.members:
            group.members.append(peer)
        if shard is not None:
            group.shard_of[peer] = shard
        self.version += 1

    def authenticate(self, session: SessionId, token: bytes) -> EngineGroup:
        """The group of a session, for who shows its token.

        Raises:
            RequestError: no such session, or it has another token. Both errors are the same, so that guessing tells
                nothing.
        """
        group = self._by_session.get(session)
        if group is None or not hmac.compare_digest(group.token, token):
            raise request_error(
                ErrorCode.NO_SESSION,
                f"session {session} is not open, or its token is another",
                "close the client and connect again",
            )
        return group

    def of_connection(self, connection: bytes) -> EngineGroup | None:
        """The group that a connection owns."""
        return self._of_connection.get(connection)

    def check_free(self, connection: bytes) -> None:
        """Refuse a further session for a connection that owns one."""
        if connection in self._of_connection:
            raise request_error(ErrorCode.POOL_BUSY, "this connection has a session", "use a connection for each")

    def owner(self, connection: bytes) -> EngineGroup:
        """As `of_connection`, for requests that need a session.

        Raises:
            RequestError: the connection owns none.
        """
        group = self._of_connection.get(connection)
        if group is None:
            raise request_error(
                ErrorCode.NO_SESSION,
                "this connection has no session, or none any more: it was silent for too long, or lost a process",
                "close the client and connect again",
            )
        return group

    def of_peer(self, peer: Peer) -> list[EngineGroup]:
        """Every group that a process is a member of."""
        return [group for group in self._by_session.values() if peer in group.members]

    def of_session(self, session: SessionId) -> EngineGroup | None:
        """The group of a session, or None once it is over."""
        return self._by_session.get(session)

    def part(self, group: EngineGroup, scheduler: Peer) -> list[Peer]:
        """Remove the scheduler's process after its goodbye. Returns the members removed that are in no other group."""
        left = [each for each in group.members if not each.is_seen or each.is_same_process(scheduler)]
        return self.leave(group, left)

    @property
    def groups(self) -> list[EngineGroup]:
        """Every group."""
        return list(self._by_session.values())

    def of_instance(self, instance: bytes) -> list[EngineGroup]:
        """The groups with processes of one engine in offload mode, earlier ones first."""
        return [group for group in self._by_session.values() if group.of_engine(instance)]

    def leave(self, group: EngineGroup, peers: list[Peer]) -> list[Peer]:
        """Remove members that no longer use the group's slots. Returns those that are in no other group."""
        self.version += 1
        group.members = [member for member in group.members if member not in peers]
        return [peer for peer in peers if not self.of_peer(peer)]

    def end(self, session: SessionId) -> None:
        """A session has expired, or has lost a member: see `EngineGroup.is_over`."""
        group = self._by_session.get(session)
        if group is not None and not group.is_over:
            group.is_over = True
            self.version += 1

    def close(self, session: SessionId) -> list[Peer]:
        """Forget a group; returns its processes that are in no other."""
        group = self._by_session.pop(session, None)
        if group is None:
            return []
        self.version += 1
        if self._of_connection.get(group.connection) is group:
            del self._of_connection[group.connection]
        return [member for member in group.members if not self.of_peer(member)]

    def retire(self, peer: Peer) -> None:
        """Revoke the member tokens of a process that has ended or closed its connection."""
        self._candidates = {token: owner for token, owner in self._candidates.items() if owner is not peer}
