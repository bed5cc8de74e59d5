"""What an earlier daemon has left becomes this one's: host copies by their headers, engines by the ledger.

Done before the sockets open. An engine of before that still lives gets nothing back here: it is an expired session,
whose slots wait until it has introduced itself anew or is dead. Whatever does not fit the configuration is left behind.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from kvcached.attach.peer import PeerProcess, UnseenProcess
from kvcached.attached_admission import Shape
from kvcached.core.attached_state import SpaceSpec
from kvcached.core.cache import Cache
from kvcached.core.restore import StoredBlocks
from kvcached.core.revival import Owner, Revival
from kvcached.generations import recorded_policy
from kvcached.ledger import HostPoolRecord, Ledger, ProcessIdentity, SessionRecord, SpaceRecord
from kvcached.membership import FoundSession, Peer
from kvcached.recovery import UNKNOWN_OWNER, FoundBlocks, FoundClaims, scan
from kvcached.replica import Replica
from kvcached.worker.host_memory import HostHeaders
from kvcached_client.host_geometry import HostGeometry
from kvcached_client.host_header import NAMESPACE_BYTES, HeaderKind
from kvcached_client.types import ShardIndex

_Member: TypeAlias = tuple[Peer, ShardIndex | None]
_Living: TypeAlias = Mapping[Owner, tuple[SessionRecord, list[_Member]]]

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class Takeover:
    """What was taken over.

    Attributes:
        blocks: host copies that are in the index again.
        shapes: of namespaces of engines in attached mode, by their root.
        sessions: engines that still live.
    """

    blocks: int = 0
    shapes: dict[bytes, Shape] = field(default_factory=dict)
    sessions: list[FoundSession] = field(default_factory=list)


def take_over(ledger: Ledger, cache: Cache, replicas: Sequence[Replica], headers: HostHeaders | None) -> Takeover:
    """Fill a cache that has served nobody with what an earlier daemon has left.

    Args:
        ledger: of that daemon.
        cache: new, of the present configuration.
        replicas: those that are configured, with their workers, adopted or new.
        headers: of the host pool; None where that is none of what the ledger is about.
    """
    revival, taken = Revival(cache), Takeover()
    cache.attached.spaces.first_generation = ledger.first_generation
    living = {(record.epoch, record.id): (record, peers) for record in ledger.sessions if (peers := _living(record))}
    if headers is not None:
        _take_replicas(ledger, replicas, headers, revival)
        if cache.attached.spaces.most:
            _take_spaces(ledger, headers, revival, taken, living)
    adopted = {replica.name for replica in replicas if replica.workers.adopted}
    for owner, (record, peers) in living.items():
        session = None
        if record.mode == "device" and record.place in adopted:
            session = revival.pool_session(record.place)
        elif record.mode == "attached" and bytes.fromhex(record.place) in taken.shapes:
            session = revival.attached_session(owner, bytes.fromhex(record.place))
        if session is not None:
            digest, instance = bytes.fromhex(record.token_digest), bytes.fromhex(record.instance)
            taken.sessions.append(FoundSession(session, owner, digest, instance, peers))
        else:  # whatever it writes into is nobody's any more
            for peer, _ in peers:
                peer.close()
    taken.blocks = revival.blocks
    return taken


def _take_replicas(ledger: Ledger, replicas: Iterable[Replica], headers: HostHeaders, revival: Revival) -> None:
    """The host copies of each namespace that is configured as it was, once for all its replicas."""
    recorded = {record.name: record for record in ledger.replicas}
    done: set[bytes] = set()
    for replica in replicas:
        record = recorded.get(replica.name)
        namespace = replica.namespace
        geometry = replica.host_geometry
        if record is None or record.namespace != namespace.hex() or namespace in done or geometry is None:
            continue
        done.add(namespace)
        kind = HeaderKind(replica.header_namespace, bytes.fromhex(replica.layout.fingerprint()), replica.generation)
        slabs = list(ledger.host.lent.get(record.namespace, ())) if ledger.host is not None else []
        revival.replica(replica.name, slabs, stored(scan(headers.table, geometry, kind, slabs)))


def _take_spaces(ledger: Ledger, headers: HostHeaders, revival: Revival, taken: Takeover, living: _Living) -> None:
    for number, record in enumerate(ledger.spaces):
        if ledger.host is None or _geometry(ledger.host, record).slots_per_slab != record.slots_per_slab:
            _log.warning("namespace %r is left behind: its blocks would be laid out otherwise now", record.label)
            continue
        engines = {owner: peers for owner, (session, peers) in living.items() if session.place == record.root}
        root = bytes.fromhex(record.root)
        taken.shapes[root] = Shape(bytes.fromhex(record.fingerprint), record.block_bytes, replicated=record.replicated)
        unknown = (0, number)
        claimants = _take_space(record, ledger.host, headers, revival, engines, unknown)
        if unknown in claimants:  # one of the engines is writing: which, nobody can say
            session_id = revival.attached_session(unknown, root)
            everybody = [member for peers in engines.values() for member in peers]
            taken.sessions.append(FoundSession(session_id, unknown, b"", b"", everybody))


def _take_space(
    record: SpaceRecord,
    host: HostPoolRecord,
    headers: HostHeaders,
    revival: Revival,
    engines: Collection[Owner],
    unknown: Owner,
) -> Collection[Owner]:
    """Returns who may still be writing."""
    root = bytes.fromhex(record.root)
    spec = SpaceSpec(root, record.label, record.block_size, record.shards, record.slots_per_slab)
    kind = HeaderKind(root[:NAMESPACE_BYTES], bytes.fromhex(record.fingerprint), record.generation)
    slabs = list(host.lent.get(record.root, ()))
    found = scan(headers.table, _geometry(host, record), kind, slabs)
    claims = _claims(found.claims, engines, unknown)
    policy = recorded_policy(record, revival.spaces_policy)
    revival.space(spec, record.generation, slabs, stored(found), claims, policy)
    return claims.keys()


def _geometry(host: HostPoolRecord, space: SpaceRecord) -> HostGeometry:
    return HostGeometry(
        slabs=host.slabs,
        slab_bytes=host.slab_bytes,
        shards=space.shards,
        block_bytes=space.block_bytes,
        replicated=space.replicated,
    )


def _living(record: SessionRecord) -> list[_Member]:
    found = ((_peer(each.process), each.shard) for each in record.members)
    return [(peer, None if shard is None else ShardIndex(shard)) for peer, shard in found if peer is not None]


def _peer(process: ProcessIdentity | None) -> Peer | None:
    return UnseenProcess() if process is None else PeerProcess.found(process)


def _claims(claims: FoundClaims, engines: Collection[Owner], unknown: Owner) -> dict[Owner, npt.NDArray[np.int64]]:
    """The slots of each living owner. Where the shards of a slot name several, any: only one was told of it.

    While any engine lives, slots of an owner whom no shard names are those of `unknown`.
    """
    owner_of: dict[int, Owner] = {}
    for slot, epoch, session in zip(
        claims.slots.tolist(), claims.epochs.tolist(), claims.sessions.tolist(), strict=True
    ):
        if (epoch, session) in engines:
            owner_of[slot] = (epoch, session)
        elif (epoch, session) == UNKNOWN_OWNER and engines:
            owner_of.setdefault(slot, unknown)
    slots: dict[Owner, list[int]] = {}
    for slot, owner in owner_of.items():
        slots.setdefault(owner, []).append(slot)
    return {owner: np.array(held, np.int64) for owner, held in slots.items()}


def stored(found: FoundBlocks) -> StoredBlocks:
    """Blocks as the core takes them: by age, not by epoch and transfer."""
    ages = np.empty(len(found), np.int64)
    ages[np.lexsort((found.transfers, found.epochs))] = np.arange(len(found))
    return StoredBlocks(found.keys, found.parents, found.depths, found.slots, ages)
