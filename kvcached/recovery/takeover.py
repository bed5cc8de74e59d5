"""Takes over what the daemon before has left in its pools: their blocks, and the sessions of living engines.

The memory itself was kept (`kvcached.recovery.inheritance`). Headers say which blocks it holds, and the ledger which
sessions there were. All of this happens before the sockets open. The session of an engine that still lives is expired
here, and its slots wait until the engine has rejoined or is dead. Whatever does not match the configuration is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from msgspec import UNSET

from kvcached.core.cache import Cache
from kvcached.core.namespaces import NamespaceSpec
from kvcached.core.restart.restore import Owner, RestoredCache, StoredBlocks
from kvcached.core.slots.ranges import no_ranges
from kvcached.memory.host_pool import HostHeaders
from kvcached.process.identity import ProcessIdentity, pid_namespace
from kvcached.process.peer import PeerProcess, UnseenProcess
from kvcached.recovery.generations import recorded_policy, spec_of
from kvcached.recovery.scan import UNKNOWN_OWNER, FoundBlocks, FoundClaims, scan, scan_device
from kvcached.recovery.state_file import HostPoolRecord, Ledger, NamespaceRecord, SessionRecord
from kvcached.service.offload.admission import Shape
from kvcached.service.replica import NAMESPACE_SHOWN_BYTES, Replica
from kvcached.service.sessions import EarlierName, FoundSession, Peer
from kvcached_client.blocks.header import NAMESPACE_BYTES, HeaderKind
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.types import ShardIndex

#: Why blocks of a replica that is configured are not found again.
_OTHER_NAMESPACE: Final = (
    "its namespace is another one now: its model, revision, block size, layout or weights have changed, or another "
    "daemon has cleared it"
)

_log: Final = logging.getLogger(__name__)


class _Members(NamedTuple):
    """The processes of a session that still live.

    Attributes:
        peers: which shard each is, None for a scheduler.
        engine_of: of which engine each is, by its instance.
    """

    peers: list[tuple[Peer, ShardIndex | None]]
    engine_of: dict[Peer, bytes]


_Living: TypeAlias = Mapping[Owner, tuple[SessionRecord, _Members]]


@dataclass(slots=True)
class Takeover:
    """The result of `take_over`.

    Attributes:
        blocks: number of host copies that are in the index again.
        device_blocks: number of blocks of device pools that are.
        shapes: layouts of the namespaces of engines in offload mode, by root.
        sessions: sessions of engines that still live.
    """

    blocks: int = 0
    device_blocks: int = 0
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    sessions: list[FoundSession] = field(default_factory=list)

    @property
    def is_any(self) -> bool:
        """Whether there is anything that would be lost with the memory."""
        return bool(self.blocks or self.device_blocks or self.sessions)


def take_over(
    ledger: Ledger,
    cache: Cache,
    replicas: Sequence[Replica],
    headers: HostHeaders | None,
    *,
    canonical: bool = False,
) -> Takeover:
    """Fill a new cache with the blocks and sessions that the daemon before has left.

    Args:
        ledger: that daemon's.
        cache: a cache of the present configuration that has served no request.
        replicas: the configured replicas, with kept or new memory.
        headers: those of the host pool; None if it is not the pool that the ledger names.
        canonical: storage holds blocks in their canonical layout, where there is one.
    """
    revival, taken = RestoredCache(cache), Takeover()
    sees = _sees_processes_of(ledger)
    found = {(each.epoch, each.id): (each, _living(each, sees=sees)) for each in ledger.sessions}
    living = {owner: (record, members) for owner, (record, members) in found.items() if members.peers}
    if headers is not None:
        _take_replicas(ledger, replicas, headers, revival)
        if cache.offload.namespaces.most:
            _take_namespaces(ledger, headers, revival, taken, living, canonical=canonical)
        elif ledger.namespaces:
            _log.warning(
                "%d namespaces of engines in offload mode are dropped, and their blocks are lost: [offload] is no "
                "longer configured",
                len(ledger.namespaces),
            )
    _take_sleeping(ledger, cache)
    _take_devices(ledger, replicas, revival)
    kept = {replica.name for replica in replicas if replica.is_kept}
    for owner, (record, (peers, engine_of)) in living.items():
        session = None
        if record.mode == "device" and record.place in kept:
            session = revival.pool_session(record.place)
        elif record.mode == "offload" and bytes.fromhex(record.place) in taken.shapes:
            session = revival.offload_session(owner, bytes.fromhex(record.place))
        if session is not None:
            digest, instance = bytes.fromhex(record.token_digest), bytes.fromhex(record.instance)
            is_over = record.is_over or len(peers) < len(record.members)
            resumed_as = EarlierName.recorded(record.resumed_as)
            several = {} if instance else engine_of
            taken.sessions.append(FoundSession(session, owner, digest, instance, peers, is_over, resumed_as, several))
        else:  # no session has the memory that it writes to
            for peer, _ in peers:
                peer.close()
    taken.blocks, taken.device_blocks = revival.blocks, revival.device_blocks
    return taken


def _take_replicas(ledger: Ledger, replicas: Sequence[Replica], headers: HostHeaders, revival: RestoredCache) -> None:
    """Take over the host copies of each namespace whose configuration is unchanged, once for all its replicas."""
    recorded = {record.name: record for record in ledger.replicas}
    done: set[bytes] = set()
    for replica in replicas:
        record = recorded.get(replica.name)
        namespace = replica.namespace
        geometry = replica.host_geometry
        if record is None or record.namespace != namespace.hex() or namespace in done or geometry is None:
            continue
        done.add(namespace)
        slabs = list(ledger.host.allocated.get(record.namespace, ())) if ledger.host is not None else []
        revival.replica(replica.name, slabs, stored(scan(headers.table, geometry, replica.header_kind, slabs)))
    _warn_of_left(ledger, {replica.name for replica in replicas}, done)


def _warn_of_left(ledger: Ledger, names: Collection[str], done: Collection[bytes]) -> None:
    """Say whose host copies were not taken over, and why."""
    for record in ledger.replicas:
        if bytes.fromhex(record.namespace) not in done and ledger.host and ledger.host.allocated.get(record.namespace):
            why = _OTHER_NAMESPACE if record.name in names else "no replica of this name is configured"
            words = "the blocks of replica %(replica)s in the host pool are lost: %(why)s"
            _log.warning(words, {"replica": record.name, "why": why})


def _take_sleeping(ledger: Ledger, cache: Cache) -> None:
    """Replicas whose device pools the daemon before has left asleep sleep on: whoever uses the memory still does."""
    for record in ledger.replicas:
        if record.asleep and record.name in cache.pools:
            cache.sleeps.asleep(record.name)


def _take_devices(ledger: Ledger, replicas: Iterable[Replica], revival: RestoredCache) -> None:
    """Take over the blocks of each device pool whose namespace is unchanged; its headers name no other namespace."""
    namespaces = {record.name: record.namespace for record in ledger.replicas}
    for replica in replicas:
        if replica.headers is None:
            continue
        used = no_ranges()
        if replica.is_kept and namespaces.get(replica.name) == replica.namespace.hex():
            used = revival.device_pool(replica.name, stored(scan_device(replica.headers.table, replica.header_kind)))
        elif replica.is_kept:
            words = "the blocks of replica %(replica)s in its device pool are lost: %(why)s"
            _log.warning(words, {"replica": replica.name, "why": _OTHER_NAMESPACE})
        replica.headers.keep_only(used)


class _Owners(NamedTuple):
    """The sessions that may still write to slots of a namespace."""

    living: Collection[Owner]  #: sessions of the ledger of which a process lives
    unknown: Owner  #: stands for any of these sessions
    ledger_epoch: int  #: that of the daemon that wrote the ledger


def _take_namespaces(
    ledger: Ledger,
    headers: HostHeaders,
    revival: RestoredCache,
    taken: Takeover,
    living: _Living,
    *,
    canonical: bool,
) -> None:
    for number, record in enumerate(ledger.namespaces):
        if ledger.host is None or not _has_its_layout(ledger.host, record):
            fields = {"namespace": record.root[: 2 * NAMESPACE_SHOWN_BYTES], "label": record.label}
            _log.warning("namespace %(namespace)s (%(label)r) is dropped: its blocks have another layout now", fields)
            continue
        engines = {owner: members for owner, (session, members) in living.items() if session.place == record.root}
        spec = spec_of(record, canonical=canonical)
        taken.shapes[root := spec.root] = Shape.recorded(record)
        unknown = (0, number)
        owners = _Owners(engines, unknown, ledger.epoch)
        claimants = _take_space(record, spec, ledger.host, headers, revival, owners)
        if unknown in claimants:  # one of the living engines is writing, and the claim does not say which
            session_id = revival.offload_session(unknown, root)
            everybody = [member for members in engines.values() for member in members.peers]
            engine_of = {peer: engine for members in engines.values() for peer, engine in members.engine_of.items()}
            taken.sessions.append(FoundSession(session_id, unknown, b"", b"", everybody, engine_of=engine_of))


def _take_space(
    record: NamespaceRecord,
    spec: NamespaceSpec,
    host: HostPoolRecord,
    headers: HostHeaders,
    revival: RestoredCache,
    owners: _Owners,
) -> Collection[Owner]:
    """Take over the host copies of an offload namespace; returns which sessions may still write."""
    generation = revival.generation(spec.storage_root)
    kind = HeaderKind(spec.root[:NAMESPACE_BYTES], bytes.fromhex(record.fingerprint), generation)
    slabs = list(host.allocated.get(record.root, ()))
    if slabs and generation != record.generation:
        fields = {"namespace": record.root[: 2 * NAMESPACE_SHOWN_BYTES], "label": record.label}
        _log.warning(
            "the blocks of namespace %(namespace)s (%(label)r) in the host pool are lost: it is in another generation "
            "now, by another layout of [storage] or because it was cleared",
            fields,
        )
    found = scan(headers.table, _geometry(host, record), kind, slabs)
    claims = _claims(found.claims, owners)
    policy = recorded_policy(record, revival.namespaces_policy)
    revival.namespace(spec, slabs, stored(found), claims, policy)
    return claims.keys()


def is_writer_left_out(ledger: Ledger, *, has_offload: bool) -> bool:
    """Whether a process may live that writes to the host pool, and `take_over` would not restore its session.

    Nobody would then set its slots aside: this daemon could not give the pool to others.

    Args:
        ledger: of the daemon before.
        has_offload: whether this daemon serves engines in offload mode.
    """
    if ledger.host is None:
        return False
    restored = {each.root for each in ledger.namespaces if has_offload and _has_its_layout(ledger.host, each)}
    left_out = [each for each in ledger.sessions if each.mode == "offload" and each.place not in restored]
    if not left_out:
        return False
    sees = _sees_processes_of(ledger)
    peers = [peer for record in left_out for peer, _ in _living(record, sees=sees).peers]
    for peer in peers:
        peer.close()
    return bool(peers)


def is_written_behind(ledger: Ledger, headers: HostHeaders, slabs: int) -> bool:
    """Whether an engine that may live was writing to a slab that a pool of so many slabs has no more.

    Nobody would then remember its claim, and a later, larger pool would give the slot to others.

    Args:
        ledger: of the daemon before.
        headers: of all slabs that it had.
        slabs: how many there are to be.
    """
    host = ledger.host
    if host is None:
        return False
    for record in ledger.namespaces:
        gone = [slab for slab in host.allocated.get(record.root, ()) if slab >= slabs]
        if not gone:
            continue
        sees, living = _sees_processes_of(ledger), set()
        for session in (each for each in ledger.sessions if each.place == record.root):
            peers = _living(session, sees=sees).peers
            living |= {(session.epoch, session.id)} if peers else set()
            for peer, _ in peers:
                peer.close()
        kind = HeaderKind(b"", b"", record.generation)  # claims are the same for every kind
        found = scan(headers.table, _geometry(host, record), kind, gone)
        if _claims(found.claims, _Owners(living, UNKNOWN_OWNER, ledger.epoch)):
            return True
    return False


def _has_its_layout(host: HostPoolRecord, record: NamespaceRecord) -> bool:
    """Whether the blocks of a namespace lie in the host pool as they did."""
    return _geometry(host, record).slots_per_slab == record.slots_per_slab


def _geometry(host: HostPoolRecord, space: NamespaceRecord) -> HostGeometry:
    return HostGeometry(
        slabs=host.slabs,
        slab_bytes=host.slab_bytes,
        shards=space.shards,
        block_bytes=space.block_bytes,
        replicated=space.replicated,
    )


def _sees_processes_of(ledger: Ledger) -> bool:
    """Whether the process ids of the ledger are those of this pid namespace.

    A daemon in another container may have another one. Ids of the earlier one then say nothing here, and none of its
    processes may be taken for dead. (A namespace of the same inode as one that has ended finds them dead, as they are.)
    """
    if ledger.pid_namespace in {0, pid_namespace()}:
        return True
    _log.warning("the earlier daemon ran in another pid namespace: it is not seen which of its engines still live")
    return False


def _living(record: SessionRecord, *, sees: bool) -> _Members:
    members = _Members([], {})
    for each in record.members:
        peer = _peer(each.process if sees else None)
        if peer is not None:
            members.peers.append((peer, None if each.shard is None else ShardIndex(each.shard)))
            if engine := bytes.fromhex(record.instance if each.instance is UNSET else each.instance):
                members.engine_of[peer] = engine
    return members


def _peer(process: ProcessIdentity | None) -> Peer | None:
    return UnseenProcess() if process is None else PeerProcess.found(process)


def _claims(claims: FoundClaims, owners: _Owners) -> dict[Owner, npt.NDArray[np.int64]]:
    """The slots of each session that may still write. If the shards of a slot name several, any: only one got it.

    While any engine lives, slots whose claim is damaged (`UNKNOWN_OWNER`) belong to `owners.unknown`. So do slots whose
    claim is younger than the ledger: a daemon that took over was killed after it had written its claims to the headers,
    and before it wrote its ledger. It served no request, so they are claims of the ledger's sessions under new ids.
    """
    owner_of: dict[int, Owner] = {}
    for slot, epoch, session in zip(
        claims.slots.tolist(), claims.epochs.tolist(), claims.sessions.tolist(), strict=True
    ):
        owner = (epoch, session)
        if owner in owners.living:
            owner_of[slot] = owner
        elif owners.living and (owner == UNKNOWN_OWNER or epoch > owners.ledger_epoch):
            owner_of.setdefault(slot, owners.unknown)
    slots: dict[Owner, list[int]] = {}
    for slot, owner in owner_of.items():
        slots.setdefault(owner, []).append(slot)
    return {owner: np.array(held, np.int64) for owner, held in slots.items()}


def stored(found: FoundBlocks) -> StoredBlocks:
    """The found blocks in the form that the core takes: ordered by age instead of by epoch and transfer."""
    ages = np.empty(len(found), np.int64)
    ages[np.lexsort((found.transfers, found.epochs))] = np.arange(len(found))
    return StoredBlocks(found.keys, found.parents, found.depths, found.slots, ages)
