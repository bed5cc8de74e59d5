"""Engines in offload mode: hello, their shard processes that join, and what becomes of an engine's earlier session.

Any number of engines may use one namespace. Their processes use only the slots of copies under way. An engine's earlier
session is over when each of its processes is dead or has joined the later session: by joining, a process declares that
its copies in the earlier session are done. So does a session that stands for several engines after a restart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

from kvcached.config.tables import SLOTS_MAX
from kvcached.core.cache import Cache
from kvcached.core.messages import MemberLost, MembersDied
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.session import OffloadSession
from kvcached.events.token_book import TokenBook
from kvcached.recovery.state_file import NamespaceRecord
from kvcached.service.admission import check_shard, joining, presented
from kvcached.service.sessions import EngineGroup, EngineGroups, Peer
from kvcached_client.blocks.host_layout import (
    PIECE_BYTES_MIN,
    CanonicalLayout,
    HostGeometry,
    host_parts,
    slots_per_slab,
)
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire
from kvcached_client.protocol.attach import JoinedHost
from kvcached_client.types import SessionId, ShardIndex, Verify

#: A namespace in use cannot be forgotten. One process may hold this part of all there may be, and one at least.
PROCESS_NAMESPACES_DIVISOR: Final = 2
#: The daemon keeps a byte for each slot of each namespace, whether it is used or not. So one namespace has a slot for
#: each 4 KiB of the host pool at most, or as many as are cheap; blocks of real models are larger.
_SLOT_BYTES_MIN: Final = 4096
_CHEAP_SLOTS: Final = 1 << 23


@dataclass(frozen=True, slots=True)
class HostShare:
    """The host pool as engines in offload mode map it.

    Attributes:
        descriptor: its sealed memory, which stays the daemon's.
        read_only_descriptor: the same memory for who may only read it.
        verify: which loaded blocks are to be compared with their checksums.
        has_canonical_storage: storage holds blocks in their canonical layout, where their engines declare one.
    """

    descriptor: int
    read_only_descriptor: int
    slabs: int
    slab_bytes: int
    verify: Verify
    has_canonical_storage: bool = False


class Shape(NamedTuple):
    """The layout of a namespace's blocks, which its engines declare and the next daemon needs.

    Attributes:
        fingerprint: of the order of bytes in a block, 16 bytes.
        block_bytes: of one block on one shard.
        replicated: every shard holds the same bytes.
        canonical: the layout in which storage may hold the blocks; None = as they are.
        canonical_root: root under which storage then has them; empty without.
    """

    fingerprint: bytes
    block_bytes: int
    replicated: bool
    canonical: CanonicalLayout | None = None
    canonical_root: bytes = b""

    @classmethod
    def recorded(cls, record: NamespaceRecord) -> Shape:
        """That of a namespace from before a restart."""
        return cls(
            bytes.fromhex(record.fingerprint),
            record.block_bytes,
            record.replicated,
            record.canonical,
            bytes.fromhex(record.canonical_root),
        )


class OffloadAdmission:
    """Opens sessions of engines in offload mode, and lets their shard processes in.

    Args:
        share: None where the configuration has no such engines.
        heartbeat_interval_ms: what engines are told.
        book: the tokens that routers may know.

    Attributes:
        shapes: of namespaces by their root; those that the core has forgotten may be among them.
    """

    def __init__(
        self,
        cache: Cache,
        groups: EngineGroups,
        share: HostShare | None,
        heartbeat_interval_ms: int,
        book: TokenBook | None,
    ) -> None:
        self._cache = cache
        self._groups = groups
        self._share = share
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._book = book
        self._hellos: dict[SessionId, wire.HelloOffload] = {}
        self._departed: list[Peer] = []
        self.shapes: dict[bytes, Shape] = {}

    def hello(self, connection: bytes, request: wire.HelloOffload, now_ms: int) -> tuple[wire.WelcomeOffload, Peer]:
        """Open a session for a process, owned by a connection.

        Raises:
            RequestError: another version, no living process, no such mode here, or no room for its namespace.
        """
        peer = presented(self._groups, request)
        share = self._required_share()
        self._groups.check_free(connection)
        earlier = [
            (group, left)
            for group in self._groups.of_instance(request.instance)
            if (left := _left_by_hello(group, request.instance, peer)) is not None
        ]
        spec = _space(request, share)
        peer.grants.check_namespace(request.label, *self._known_labels(spec))
        self._check_namespaces(peer, spec.root)
        read_only = request.read_only or peer.grants.read_only
        session = self._cache.open_offload(spec, now_ms, read_only=read_only)
        self._note_shape(spec.root, _shape(request))
        self._hellos[session.id] = request
        group = self._groups.open(session.id, connection, peer)
        group.instance = request.instance
        for old, left in earlier:
            self._replace(old, left)
        return self._welcome(request, session, group), peer

    def join(
        self, peer: Peer, session_id: SessionId, token: bytes, shard: ShardIndex
    ) -> tuple[JoinedHost, tuple[int, ...]]:
        """Let a shard process in: the answer and the descriptor to pass on.

        Raises:
            RequestError: no such session or not its token, expired, or no such shard.
        """
        group, session = joining(self._groups, self._cache.offload.sessions, session_id, token)
        share, hello = self._required_share(), self._hellos[session.id]
        peer.grants.check_namespace(hello.label, session.namespace.spec.label)
        check_shard(shard, hello.shards)
        self._groups.join(group, peer, shard)
        self._cache.offload.shard_joined(session.id, shard)
        for old in self._groups.of_instance(group.instance):
            if old is not group:
                own = old.of_engine(group.instance)
                left = [each for each in own if old.shard_of.get(each) == shard and _may_be(each, peer)]
                if left:
                    self._replace(old, left)
        read_only = session.read_only or peer.grants.read_only
        joined = JoinedHost(
            shard=shard,
            shards=hello.shards,
            epoch=self._cache.epoch,
            slabs=share.slabs,
            slab_bytes=share.slab_bytes,
            block_bytes=hello.block_bytes,
            replicated=hello.replicated,
            namespace=session.namespace.spec.root,
            fingerprint=hello.fingerprint,
            verify=share.verify,
            read_only=read_only,
        )
        return joined, (share.read_only_descriptor if read_only else share.descriptor,)

    def leave(self, group: EngineGroup, peer: Peer) -> ShardIndex | None:
        """A shard process touches the host pool no more. Returns its shard, unless another process is that one, too."""
        shard = group.shard_of.pop(peer, None)
        if peer is not group.scheduler:
            self._departed.extend(self._groups.leave(group, [peer]))
        return None if shard in {group.shard_of.get(each) for each in group.members} else shard

    def part(self, group: EngineGroup) -> None:
        """The scheduler says goodbye: the session is over, and shard processes may still copy."""
        self._replace(group, _scheduler_alone(group))

    def take_departed(self) -> list[Peer]:
        """Processes that have left their last session since the previous call: they need not be watched."""
        departed, self._departed = self._departed, []
        return departed

    def info(self) -> wire.OffloadInfo | None:
        """What such engines are offered; None where there is no such mode here."""
        share = self._share
        if share is None:
            return None
        return wire.OffloadInfo(
            slabs=share.slabs,
            slab_bytes=share.slab_bytes,
            namespaces_max=self._cache.offload.namespaces.most,
            verify=share.verify,
        )

    def forget(self, session_id: SessionId) -> None:
        """A session is over."""
        self._hellos.pop(session_id, None)

    def geometry(self, root: bytes) -> HostGeometry:
        """The host pool as the engines of a namespace see it."""
        share, shards = self._required_share(), self._cache.offload.namespaces.by_root[root].spec.shards
        shape = self.shapes[root]
        return HostGeometry(
            slabs=share.slabs,
            slab_bytes=share.slab_bytes,
            shards=shards,
            block_bytes=shape.block_bytes,
            replicated=shape.replicated,
        )

    def _known_labels(self, spec: NamespaceSpec) -> list[str]:
        """Labels that earlier engines have given the namespaces whose blocks one would use: it needs these, too."""
        return [each.spec.label for each in self._cache.offload.namespaces.of_storage(spec.storage_root)]

    def _check_namespaces(self, peer: Peer, root: bytes) -> None:
        """Limit the namespaces of one process, and of one user other than the daemon's own, so that others find room.

        Raises:
            RequestError: it has sessions in as many as it may.
        """
        roots = {
            session.namespace.spec.root
            for session in self._cache.offload.sessions.values()
            if (group := self._groups.of_session(session.id)) is not None and _limited_together(group.scheduler, peer)
        }
        most = max(self._cache.offload.namespaces.most // PROCESS_NAMESPACES_DIVISOR, 1)
        if root not in roots and len(roots) >= most:
            who, kind = ("this process", "process") if peer.grants.is_own else (peer.grants.user, "user")
            raise request_error(
                ErrorCode.LIMIT,
                f"{who} has sessions in {len(roots)} namespaces, and one {kind} may have no more",
                "end some of them, use another process, or configure more namespaces",
            )

    def _note_shape(self, root: bytes, shape: Shape) -> None:
        known = self._cache.offload.namespaces.by_root
        self.shapes = {other: each for other, each in self.shapes.items() if other in known} | {root: shape}

    def _replace(self, old: EngineGroup, left: list[Peer]) -> None:
        """Some processes have left a session, which ends it; if none is left, its slots are free."""
        self._departed.extend(self._groups.leave(old, left))
        self._cache.handle(MembersDied(old.session) if not old.living() else MemberLost(old.session))

    def _required_share(self) -> HostShare:
        if self._share is None:
            raise request_error(
                ErrorCode.UNKNOWN_REPLICA,
                "this daemon serves no engines in offload mode",
                "put an [offload] table into its configuration",
            )
        return self._share

    def _welcome(self, request: wire.HelloOffload, session: OffloadSession, group: EngineGroup) -> wire.WelcomeOffload:
        return wire.WelcomeOffload(
            id=request.id,
            version=wire.PROTOCOL_VERSION,
            session=session.id,
            token=group.token,
            daemon_epoch=self._cache.epoch,
            epoch=self._cache.epoch,
            generation=session.namespace.generation,
            namespace=session.namespace.spec.root,
            heartbeat_interval_ms=self._heartbeat_interval_ms,
            session_ttl_ms=self._cache.session_ttl_ms,
            verify=self._required_share().verify,
            read_only=session.read_only,
            token_ids=self._book is not None and self._book.wants(self._cache.announced_to(session.id), request.label),
        )


def _space(request: wire.HelloOffload, share: HostShare) -> NamespaceSpec:
    """The namespace that an engine declares."""
    parts = host_parts(request.shards, replicated=request.replicated)
    per_slab = slots_per_slab(share.slab_bytes, request.block_bytes, parts)
    most = min(SLOTS_MAX, max(_CHEAP_SLOTS, share.slabs * share.slab_bytes // _SLOT_BYTES_MIN))
    if per_slab * share.slabs > most:
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"the host pool has room for {per_slab * share.slabs} such blocks, {most} are possible",
            "use larger blocks, or a smaller host pool",
        )
    if request.canonical is not None and not request.canonical.divides(request.block_bytes, parts):
        raise request_error(
            ErrorCode.WRONG_LAYOUT,
            f"{request.block_bytes} bytes on each of {parts} shards are not {request.canonical.parts} parts in "
            f"{request.canonical.runs} runs of equal sizes, of {PIECE_BYTES_MIN} bytes at least",
            "declare the canonical layout of these blocks, or none",
        )
    canonical_root = request.canonical_root if share.has_canonical_storage else b""
    return NamespaceSpec(request.root, request.label, request.block_size, request.shards, per_slab, canonical_root)


def _shape(request: wire.HelloOffload) -> Shape:
    return Shape(
        request.fingerprint, request.block_bytes, request.replicated, request.canonical, request.canonical_root
    )


def _scheduler_alone(group: EngineGroup) -> list[Peer]:
    """The scheduler; empty if it has joined as a shard too, because it may then still copy."""
    return [] if group.scheduler in group.shard_of else [group.scheduler]


def _left_by_hello(group: EngineGroup, instance: bytes, peer: Peer) -> list[Peer] | None:
    """Which processes leave an engine's earlier session as this one says hello for it; None where it is not of it."""
    if group.instance:
        return _scheduler_alone(group) if _may_be(group.scheduler, peer) else None
    own = [each for each in group.of_engine(instance) if each not in group.shard_of and _may_be(each, peer)]
    return own or None


def _limited_together(one: Peer, other: Peer) -> bool:
    return _same(one, other) or (one.grants.uid == other.grants.uid and not other.grants.is_own)


def _may_be(earlier: Peer, peer: Peer) -> bool:
    """Whether a process that has shown an engine's secret is one of its earlier ones, or may be: it was not seen."""
    return _same(earlier, peer) or not earlier.is_seen


def _same(one: Peer, other: Peer) -> bool:
    return one is other or one.is_same_process(other)
