"""Which processes stand behind a session, and what their deaths mean.

A session is a group: the process whose connection said hello, and the shard processes that joined with the session's
token. One of them dying ends the group; its slots are free once all of them are dead, or the only one says so.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from kvcached.ledger import ProcessIdentity
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import TOKEN_SIZE_BYTES
from kvcached_client.types import SessionId, ShardIndex


class Peer(Protocol):
    """A process at the other end of an attach connection."""

    @property
    def pid(self) -> int:
        """Its pid in the daemon's namespace, for messages; 0 where it is not visible, so it is no identity."""

    @property
    def identity(self) -> ProcessIdentity | None:
        """What tells it from later processes; None where that cannot be seen from here."""

    def is_dead(self) -> bool:
        """Whether the process has ended, as its pidfd says."""

    def close(self) -> None:
        """Nobody needs to know any more whether it lives."""

    def is_same_process(self, other: Any) -> bool:  # noqa: ANN401 - any peer from the same source
        """Whether two living peers are surely one process."""


@dataclass(slots=True, eq=False)
class Group:
    """One session's processes.

    Attributes:
        token: what its shard processes and heartbeats show.
        connection: routing id of the connection that owns the session.
        scheduler: the process of that connection.
        members: every process that can touch the pool, dead ones included until the end.
        instance: in attached mode, what the engine calls itself in every hello.
        shard_of: in attached mode, which shard a member is.
        found: what it was before a restart; None for one that was opened since.
    """

    session: SessionId
    token: bytes
    connection: bytes
    scheduler: Peer
    members: list[Peer] = field(default_factory=list)
    instance: bytes = b""
    shard_of: dict[Peer, ShardIndex] = field(default_factory=dict)
    found: FoundSession | None = None

    def living(self, *, beside: Peer | None = None) -> list[Peer]:
        """Members that are not dead, and not surely the same process as `beside`."""
        return [
            member
            for member in self.members
            if not member.is_dead() and (beside is None or not member.is_same_process(beside))
        ]


class FoundSession(NamedTuple):
    """An engine of before a restart that still lives.

    Attributes:
        id: of its session here, which is expired.
        earlier: what it was: the epoch of the daemon that opened it, and its id there.
        token_digest: sha256 of its token there.
        instance: in attached mode, what it calls itself.
        members: its living processes; which shard each is, None for the scheduler.
    """

    id: SessionId
    earlier: tuple[int, int]
    token_digest: bytes
    instance: bytes
    members: list[tuple[Peer, ShardIndex | None]]


class Membership:
    """Tokens, groups and connections. Holds no sockets and decides nothing about slots.

    Attributes:
        version: grows whenever a group or its members change.
    """

    def __init__(self) -> None:
        self.version = 0
        self._candidates: dict[bytes, Peer] = {}  #: member token -> a process that identified itself
        self._groups: dict[SessionId, Group] = {}
        self._of_connection: dict[bytes, Group] = {}

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
            Refused: nobody holds it.
        """
        peer = self._candidates.get(token)
        if peer is None or peer.is_dead():
            raise request_error(
                ErrorCode.UNAUTHENTICATED,
                "the member token is not that of a living process",
                "attach first, then say hello",
            )
        return peer

    def open(self, session: SessionId, connection: bytes, peer: Peer) -> Group:
        """A new group of one process, owned by a connection."""
        group = Group(session, secrets.token_bytes(TOKEN_SIZE_BYTES), connection, peer, [peer])
        self._groups[session] = group
        self._of_connection[connection] = group
        self.version += 1
        return group

    def restore(self, found: FoundSession) -> Group:
        """The group of a session of before a restart. No connection owns it.

        Its scheduler is the member that is no shard, or where that is dead, any.
        """
        peers = [peer for peer, _ in found.members]
        scheduler = next((peer for peer, shard in found.members if shard is None), peers[0])
        group = Group(
            found.id, secrets.token_bytes(TOKEN_SIZE_BYTES), b"", scheduler, peers, found.instance, found=found
        )
        group.shard_of = {peer: shard for peer, shard in found.members if shard is not None}
        self._groups[found.id] = group
        self.version += 1
        return group

    def find_earlier(self, earlier: tuple[int, int], token: bytes) -> Group:
        """The group of a session of before a restart, for who shows the token that it had.

        Raises:
            Stale: nothing is left of it, or its token was another. Both read the same to a peer that guesses.
        """
        digest = hashlib.sha256(token).digest()
        for group in self._groups.values():
            found = group.found
            if found is not None and found.earlier == earlier and hmac.compare_digest(found.token_digest, digest):
                return group
        raise request_error(
            ErrorCode.NO_SESSION,
            f"nothing is left of session {earlier[1]} of epoch {earlier[0]}, or its token was another",
            "say hello, as a new engine does",
        )

    def resume(self, group: Group, connection: bytes, peer: Peer) -> None:
        """The scheduler of a group of before a restart is back, over a connection that owns it from now on."""
        group.connection, group.scheduler, group.found = connection, peer, None
        if peer not in group.members:
            group.members.append(peer)
        self._of_connection[connection] = group
        self.version += 1

    def join(self, group: Group, peer: Peer, shard: ShardIndex | None = None) -> None:
        """A shard process enters a group whose token it has shown; twice is once. `shard`: see `Group.shard_of`."""
        if peer not in group.members:
            group.members.append(peer)
        if shard is not None:
            group.shard_of[peer] = shard
        self.version += 1

    def authenticate(self, session: SessionId, token: bytes) -> Group:
        """The group of a session, for who shows its token.

        Raises:
            Stale: no such session, or not its token. Both read the same to a peer that guesses.
        """
        group = self._groups.get(session)
        if group is None or not hmac.compare_digest(group.token, token):
            raise request_error(
                ErrorCode.NO_SESSION,
                f"session {session} is not open, or its token is another",
                "attach and say hello again",
            )
        return group

    def of_connection(self, connection: bytes) -> Group | None:
        """The group that a connection owns."""
        return self._of_connection.get(connection)

    def of_peer(self, peer: Peer) -> list[Group]:
        """Every group that a process is a member of."""
        return [group for group in self._groups.values() if peer in group.members]

    def of_session(self, session: SessionId) -> Group | None:
        """The group of a session, or None once it is over."""
        return self._groups.get(session)

    def part(self, group: Group, scheduler: Peer) -> list[Peer]:
        """The scheduler's process said goodbye: only the others are members still. Returns those that left."""
        self.version += 1
        left = [member for member in group.members if member is scheduler or member.is_same_process(scheduler)]
        group.members = [member for member in group.members if member not in left]
        return [member for member in left if not self.of_peer(member)]

    @property
    def groups(self) -> list[Group]:
        """All of them."""
        return list(self._groups.values())

    def of_instance(self, instance: bytes) -> list[Group]:
        """The groups of one engine in attached mode, earlier ones first."""
        return [group for group in self._groups.values() if group.instance == instance]

    def leave(self, group: Group, peers: list[Peer]) -> list[Peer]:
        """These members will not touch a slot of the group any more. Returns those that are in no other group."""
        self.version += 1
        group.members = [member for member in group.members if member not in peers]
        return [peer for peer in peers if not self.of_peer(peer)]

    def close(self, session: SessionId) -> list[Peer]:
        """Forget a group; returns its processes that are in no other."""
        group = self._groups.pop(session, None)
        if group is None:
            return []
        self.version += 1
        if self._of_connection.get(group.connection) is group:
            del self._of_connection[group.connection]
        return [member for member in group.members if not self.of_peer(member)]

    def retire(self, peer: Peer) -> None:
        """A process is gone, or will not come back: its member tokens are worth nothing."""
        self._candidates = {token: owner for token, owner in self._candidates.items() if owner is not peer}
