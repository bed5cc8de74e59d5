"""What a successor would have to know, written down before anybody is told of it.

A daemon that is killed leaves the host pool's memory with the service manager and this in its run directory. Where it
cannot be written it is removed: a cold start is safe, one from an outdated ledger is not.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvcached.attached_admission import AttachedAdmission
from kvcached.core.cache import Cache
from kvcached.core.tree import PrefixTree
from kvcached.ledger import (
    HostPoolRecord,
    Ledger,
    LedgerFile,
    MemberRecord,
    ReplicaRecord,
    SessionRecord,
    SpaceRecord,
    WorkerRecord,
)
from kvcached.membership import Group, Membership
from kvcached.replica import Replica

_log: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Shelf:
    """Where the ledger is kept, and what in it does not change while the daemon runs.

    Attributes:
        boot: which boot of the machine it is.
        host: the host pool's memory, nothing lent; None without a host tier.
    """

    file: LedgerFile
    boot: str
    host: HostPoolRecord | None


class Books:
    """Writes the ledger whenever it has changed.

    Args:
        shelf: None where nothing is to be handed on: tests, tools.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        membership: Membership,
        attached: AttachedAdmission,
        shelf: Shelf | None,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._membership = membership
        self._attached = attached
        self._shelf = shelf
        self._workers_version = 0
        self._written = (-1, -1, -1)

    def note_workers(self) -> None:
        """A replica's workers are others now."""
        self._workers_version += 1

    def keep(self) -> None:
        """Write what has changed since the last time. Comes before the reply or the order that tells of it."""
        version = (self._cache.version, self._membership.version, self._workers_version)
        if self._shelf is None or version == self._written:
            return
        try:
            self._shelf.file.write(self._ledger(self._shelf))
        except OSError as error:
            _log.error("the ledger cannot be written, so that a crash would lose the cache: %s", error)
            self._remove(self._shelf)
        self._written = version

    def _remove(self, shelf: Shelf) -> None:
        try:
            shelf.file.remove()
        except OSError as error:
            _log.critical("nor removed; stop the daemon in order and delete it before the next start: %s", error)

    def _ledger(self, shelf: Shelf) -> Ledger:
        return Ledger(
            boot=shelf.boot,
            epoch=self._cache.epoch,
            host=None if shelf.host is None else _with_lent(shelf.host, self._cache),
            first_generation=self._cache.attached.spaces.first_generation,
            spaces=tuple(self._spaces()),
            replicas=tuple(_replica(each, self._cache.tree_of(each.name)) for each in self._replicas.values()),
            workers=tuple(self._workers()),
            sessions=tuple(filter(None, map(self._session, self._membership.groups))),
        )

    def _spaces(self) -> Iterable[SpaceRecord]:
        for root, space in self._cache.attached.spaces.by_root.items():
            shape = self._attached.shapes[root]
            yield SpaceRecord(
                root=root.hex(),
                label=space.spec.label,
                fingerprint=shape.fingerprint.hex(),
                block_size=space.spec.block_size,
                shards=space.spec.shards,
                block_bytes=shape.block_bytes,
                replicated=shape.replicated,
                slots_per_slab=space.spec.host_slots_per_slab,
                generation=space.generation,
                write_policy=space.tree.write_policy,
                configured_policy=self._cache.attached.spaces.write_policy,
            )

    def _workers(self) -> Iterable[WorkerRecord]:
        for replica in self._replicas.values():
            for shard, process in replica.workers.processes.items():
                yield WorkerRecord(replica=replica.name, shard=shard, process=process)

    def _session(self, group: Group) -> SessionRecord | None:
        attached, managed = self._cache.attached.sessions.get(group.session), self._cache.sessions.get(group.session)
        digest = hashlib.sha256(group.token).hexdigest()
        members = tuple(
            MemberRecord(process=member.identity, shard=group.shard_of.get(member)) for member in group.members
        )
        if attached is not None:
            return SessionRecord(
                id=group.session,
                epoch=self._cache.epoch,
                mode="attached",
                place=attached.space.spec.root.hex(),
                instance=group.instance.hex(),
                token_digest=digest,
                members=members,
            )
        if managed is not None:
            place = managed.pool.name
            return SessionRecord(
                id=group.session,
                epoch=self._cache.epoch,
                mode="device",
                place=place,
                token_digest=digest,
                members=members,
            )
        return None


def _with_lent(record: HostPoolRecord, cache: Cache) -> HostPoolRecord:
    lent: dict[str, tuple[int, ...]] = {}
    for tree in cache.trees:
        if tree.host is not None and tree.host.slabs:
            root = tree.namespace.hex()
            lent[root] = (*lent.get(root, ()), *sorted(tree.host.slabs))
    return HostPoolRecord(
        device=record.device, inode=record.inode, slabs=record.slabs, slab_bytes=record.slab_bytes, lent=lent
    )


def _replica(replica: Replica, tree: PrefixTree) -> ReplicaRecord:
    return ReplicaRecord(
        name=replica.name,
        fingerprint=replica.layout.fingerprint(),
        namespace=replica.namespace.hex(),
        generation=replica.generation,
        weights_version=replica.weights_version,
        slots=replica.slots,
        write_policy=tree.write_policy,
        configured_policy=replica.write_policy,
    )
