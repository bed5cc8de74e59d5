"""Writes the state that the next daemon needs, before any reply or order that depends on it.

When a daemon is killed, the service manager keeps the memory of its pools, and its run directory holds this state. If
the state cannot be written, it is removed: a cold start is safe, a start from outdated state is not.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import UNSET, structs

from kvcached.config.tables import StorageLayout
from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import (
    BlocksUncached,
    Event,
    SlabAllocated,
    SlotsHandedOut,
    SlotsReclaimed,
    StorageLost,
    StorageReady,
    Ticked,
)
from kvcached.core.slots.ranges import Ranges
from kvcached.core.slots.states import NO_MEMORY, SlotState
from kvcached.process.identity import pid_namespace
from kvcached.recovery.recorder import Recorder
from kvcached.recovery.state_file import (
    EarlierRecord,
    HostPoolRecord,
    Ledger,
    LedgerFile,
    MemberRecord,
    NamespaceRecord,
    ReplicaRecord,
    SessionRecord,
)
from kvcached.service.offload.admission import OffloadAdmission
from kvcached.service.pending import Later
from kvcached.service.replica import Replica
from kvcached.service.sessions import EarlierName, EngineGroup, EngineGroups, Peer
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import HealthPart

#: No version of the state.
_NOTHING: Final = (-1, -1)
#: Where an outdated ledger stays: the next daemon would believe it.
_STOP_FIRST: Final = "stop the daemon in order and delete it before the next start"

_log: Final = logging.getLogger(__name__)


class Headers(Protocol):
    """The headers beside the slots of the host pool."""

    def clear_slab(self, slab: int, geometry: HostGeometry) -> None:
        """Zero the headers of a slab that gets another namespace."""

    def claim(self, slots: npt.NDArray[np.int64], geometry: HostGeometry, epoch: int, session: int) -> None:
        """A session's processes may be writing these slots."""

    def find(self, keys: bytes, geometry: HostGeometry, slabs: Iterable[int]) -> npt.NDArray[np.int64]:
        """The slots of some slabs whose headers name blocks with these keys, whether the slots hold them or not."""

    def forget(self, slots: npt.NDArray[np.int64], geometry: HostGeometry) -> None:
        """Clear the headers of slots that nobody has."""

    def try_end(self, slab: int, size_bytes: int) -> str:
        """Write and read the last bytes of a slab, which nobody has: what was wrong, or ""."""

    def trim(self) -> None:
        """Give back what lies behind the last slab."""


@dataclass(frozen=True, slots=True)
class StatePlace:
    """The state file, and the parts of the state that do not change while the daemon runs.

    Attributes:
        boot: which boot of the machine it is.
        host: the host pool's memory, nothing allocated; None without a host tier.
        layout: of storage, as it is configured.
        is_shared: daemons of several machines share storage.
    """

    file: LedgerFile
    boot: str
    host: HostPoolRecord | None
    layout: StorageLayout = "engine"
    is_shared: bool = False


class StateWriter:
    """Writes the ledger whenever it has changed, and has the record of generations written.

    Args:
        state_place: None if no state is kept, as in tests and tools.
        later: sets timers.

    Attributes:
        recorder: of generations.
        trouble: why the ledger cannot be written; empty while it can.
        is_outdated: nor can it be removed, so that the next daemon would believe an earlier state.
    """

    def __init__(
        self,
        cache: Cache,
        replicas: Mapping[str, Replica],
        groups: EngineGroups,
        admission: OffloadAdmission,
        state_place: StatePlace | None,
        later: Later,
    ) -> None:
        self._cache = cache
        self._replicas = replicas
        self._groups = groups
        self._offload_admission = admission
        self._state_place = state_place
        self.recorder = Recorder(cache.generations, later)
        self.trouble = ""
        self.is_outdated = False
        self._written = _NOTHING

    def heard(self, event: Event) -> None:
        """Storage is ready: write the record of generations to it, until it is lost. With time, try again."""
        if isinstance(event, StorageReady):
            self.recorder.open()
        elif isinstance(event, StorageLost):
            self.recorder.close()
        elif isinstance(event, Ticked) and self.trouble:
            self._written = _NOTHING  # once in a tick and not for each request, which waits for the attempt

    def health(self) -> list[HealthPart]:
        """A failed part while the ledger cannot be written. It tells of the last attempt, and makes none."""
        detail = f"cannot be written, so a crash would lose the cache: {self.trouble}"
        return [HealthPart(part="ledger", ok=False, detail=detail)] if self.trouble else []

    def keep(self) -> None:
        """Write the state if it has changed, before the reply or order that depends on it.

        The write of the record of generations is only started; the recorder tells when it is done.
        """
        self.recorder.keep()
        version = (self._cache.version, self._groups.version)
        if self._state_place is None or version == self._written:
            return
        try:
            self._state_place.file.write(self._ledger(self._state_place))
        except OSError as error:
            self._fail(self._state_place, error)
        else:
            if self.trouble:
                _log.info("the ledger is written again")
            self.trouble, self.is_outdated = "", False
        self._written = version

    def forget_editions(self, roots: Iterable[bytes]) -> None:
        """Other daemons have left these editions of namespaces, as each clear of a replica leaves one."""
        self._cache.generations.forget(roots)

    def check_clear(self) -> None:
        """See that no later daemon can bring back what was cleared.

        Raises:
            RequestError: one could, because the ledger is outdated and stays.
        """
        if self.is_outdated:
            raise request_error(
                ErrorCode.INTERNAL,
                f"the namespace is cleared, but a crash of the daemon would bring its blocks back: {self.trouble}",
                "see that the run directory can be written, and clear it again",
            )

    def _fail(self, state_place: StatePlace, error: OSError) -> None:
        """Remove the ledger, which is outdated. What is wrong is logged once, not for each attempt."""
        trouble, left = f"{error.strerror or error}; see to the run directory", ""
        try:
            state_place.file.remove()
        except OSError as also:
            left = also.strerror or str(also)
            trouble += f". The outdated one cannot be removed: {left}; {_STOP_FIRST}"
        self.is_outdated = bool(left)
        if trouble == self.trouble:
            return
        self.trouble = trouble
        _log.error("the ledger cannot be written; a crash would lose the cache: %s", error)
        if left:
            _log.critical("nor removed; %s: %s", _STOP_FIRST, left)

    def _ledger(self, state_place: StatePlace) -> Ledger:
        namespaces = tuple(self._namespaces())
        return Ledger(
            boot=state_place.boot,
            epoch=self._cache.epoch,
            pid_namespace=pid_namespace(),
            layout=state_place.layout if any(each.canonical_root for each in namespaces) else UNSET,
            shared=1 if state_place.is_shared else UNSET,
            host=None if state_place.host is None else _with_allocated(state_place.host, self._cache),
            namespaces=namespaces,
            replicas=tuple(_replica(each, self._cache) for each in self._replicas.values()),
            sessions=tuple(filter(None, map(self._session, self._groups.groups))),
        )

    def _namespaces(self) -> Iterable[NamespaceRecord]:
        for root, space in self._cache.offload.namespaces.by_root.items():
            shape = self._offload_admission.shapes[root]
            yield NamespaceRecord(
                root=root.hex(),
                label=space.spec.label,
                fingerprint=shape.fingerprint.hex(),
                block_size=space.spec.block_size,
                shards=space.spec.shards,
                block_bytes=shape.block_bytes,
                replicated=shape.replicated,
                canonical=shape.canonical,
                canonical_root=shape.canonical_root.hex(),
                slots_per_slab=space.spec.host_slots_per_slab,
                generation=space.generation,
                write_policy=space.tree.write_policy,
                configured_policy=self._cache.offload.namespaces.write_policy,
            )

    def _session(self, group: EngineGroup) -> SessionRecord | None:
        mode: Literal["offload", "device"]
        name = EarlierName((self._cache.epoch, group.session), hashlib.sha256(group.token).digest())
        resumed_as: EarlierName | None = None
        session = group.session
        if (offload := self._cache.offload.sessions.get(session)) is not None:
            mode, place = "offload", offload.namespace.spec.root.hex()
        elif (managed := self._cache.managed.sessions.get(session)) is not None:
            mode, place = "device", managed.pool.name
            resumed_as = group.resumed_as if managed.may_return else None
            if group.found is not None:  # its engine does not know this daemon yet
                name, resumed_as = group.found.names[0], group.found.resumed_as
        else:
            return None
        return SessionRecord(
            id=name.earlier[1],
            epoch=name.earlier[0],
            mode=mode,
            place=place,
            instance=group.instance.hex(),
            token_digest=name.token_digest.hex(),
            members=_members(group),
            is_over=group.is_over,
            resumed_as=UNSET if resumed_as is None else _earlier(resumed_as),
        )


def _earlier(name: EarlierName) -> EarlierRecord:
    epoch, session = name.earlier
    return EarlierRecord(id=session, epoch=epoch, token_digest=name.token_digest.hex())


def _members(group: EngineGroup) -> tuple[MemberRecord, ...]:
    """Each process of a group once, in the order of its members: a process has a connection for each of its mappings.

    The next daemon waits for as many processes as are written down. Where it is not known whether two that cannot be
    seen from here are the same process, they are two: it would otherwise take slots that one may write for free when
    the other one is dead.
    """
    found: list[tuple[Peer, MemberRecord]] = []
    for peer in group.members:
        engine = group.engine_of.get(peer)
        instance = UNSET if engine is None else engine.hex()
        record = MemberRecord(process=peer.identity, shard=group.shard_of.get(peer), instance=instance)
        if not any(record == other and _is_one_process(peer, known) for known, other in found):
            found.append((peer, record))
    return tuple(record for _, record in found)


def _is_one_process(peer: Peer, other: Peer) -> bool:
    """Whether two peers of equal identities, or of none, are known to be one process."""
    if peer.identity is not None:
        return True
    return peer.is_seen and other.is_seen and peer.is_same_process(other)


def _with_allocated(record: HostPoolRecord, cache: Cache) -> HostPoolRecord:
    allocated: dict[str, tuple[int, ...]] = {}
    for tree in cache.trees:
        if tree.host is not None and tree.host.slabs:
            root = tree.namespace.hex()
            allocated[root] = (*allocated.get(root, ()), *sorted(tree.host.slabs))
    return structs.replace(record, allocated=allocated)


def _replica(replica: Replica, cache: Cache) -> ReplicaRecord:
    return ReplicaRecord(
        name=replica.name,
        fingerprint=replica.layout.fingerprint(),
        namespace=replica.namespace.hex(),
        generation=replica.generation,
        weights_version=replica.weights_version,
        slots=replica.slots,
        memory=replica.memory,
        cuda_ordinals=replica.cuda_ordinals,
        cuda_devices=replica.cuda_devices,
        headers=None if replica.headers is None else replica.headers.identity,
        write_policy=cache.tree_of(replica.name).write_policy,
        configured_policy=replica.write_policy,
        asleep=cache.pools[replica.name].state in NO_MEMORY and not replica.waits_for_device,
    )


class DeviceBlocks:
    """Writes the headers of device pools: which block each slot holds.

    Args:
        cache: whose pools they are.
        replicas: with the headers.
    """

    def __init__(self, cache: Cache, replicas: Mapping[str, Replica]) -> None:
        self._changes = cache.header_changes
        self._epoch = cache.epoch
        self._replicas = replicas

    def write(self) -> None:
        """Write the changes, before any effect, order and reply that the core has decided on after them."""
        if not self._changes:
            return
        for change in self._changes:
            replica = self._replicas[change.pool]
            if replica.headers is None:
                continue
            if isinstance(change, BlocksUncached):
                replica.headers.clear(change.slots)
            else:
                kind, (_, depth, parent, keys, slots) = replica.header_kind, change
                replica.headers.write(kind, depth, parent, keys, slots, self._epoch)
        self._changes.clear()


class HostClaims:
    """Writes the headers of the host pool: which session may be writing each slot.

    Args:
        headers: None where nothing is to be handed on.
        cache: whose slabs hold what.
    """

    def __init__(
        self, headers: Headers | None, replicas: Mapping[str, Replica], admission: OffloadAdmission, cache: Cache
    ) -> None:
        self._headers = headers
        self._replicas = replicas
        self._offload_admission = admission
        self._cache = cache

    def write(self, effect: SlabAllocated | SlotsHandedOut | SlotsReclaimed) -> None:
        """Carry out one effect.

        A slab is wiped before the ledger says whose it is: what lies in it must not be taken for theirs. Claims are
        there before the reply that hands the slots out. What nobody has reported may have been removed meanwhile, so
        its headers go; where the namespace is forgotten, so are its slabs.
        """
        is_gone = isinstance(effect, SlotsReclaimed) and effect.namespace not in self._cache.offload.namespaces.by_root
        if self._headers is None or is_gone:
            return
        geometry = self.geometry(effect.namespace)
        if isinstance(effect, SlabAllocated):
            self._headers.clear_slab(effect.slab, geometry)
        elif isinstance(effect, SlotsReclaimed):
            self._headers.forget(slots_of(effect.slots), geometry)
        else:
            self._headers.claim(slots_of(effect.slots), geometry, self._cache.epoch, effect.session)

    def trim(self) -> None:
        """A process is dead: what it has written behind the end of the pool takes up no memory any more."""
        if self._headers is not None:
            self._headers.trim()

    def forget(self, tree: PrefixTree, keys: bytes) -> None:
        """Blocks were removed on request: the next daemon must not find them in slots that are free.

        Nor those that were evicted before, whose headers stand there until others need their slots, nor in slots that
        are set aside for an expired session: one more claim of it takes the place of what its processes have written.
        """
        if self._headers is None or tree.host is None:
            return
        geometry, host = self.geometry(tree.namespace), tree.host
        found = self._headers.find(keys, geometry, host.slabs)
        is_free = np.array([host.holds(slot, 1, SlotState.FREE) for slot in found.tolist()], bool)
        self._headers.forget(found[is_free], geometry)
        for session in self._cache.offload.sessions.values():
            for _, slots in session.quarantined if session.namespace.spec.root == tree.namespace else ():
                set_aside = np.intersect1d(found, slots_of(slots))
                self._headers.claim(set_aside, geometry, self._cache.epoch, session.id)

    def geometry(self, namespace: bytes) -> HostGeometry:
        """The host pool as the blocks of a namespace lie in it."""
        for replica in self._replicas.values():
            if replica.namespace == namespace and replica.host_geometry is not None:
                return replica.host_geometry
        return self._offload_admission.geometry(namespace)


def slots_of(ranges: Ranges[int]) -> npt.NDArray[np.int64]:
    """The slots one by one."""
    pairs = np.array(ranges, np.int64).reshape(-1, 2)
    before = np.cumsum(pairs[:, 1]) - pairs[:, 1]
    return np.repeat(pairs[:, 0] - before, pairs[:, 1]) + np.arange(int(pairs[:, 1].sum()))
