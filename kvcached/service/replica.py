"""A configured replica at run time: name, layout, memory and workers. And which namespace a name means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol, TypeVar

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import AbandonLoad, HurryTransfer, StartTransfer
from kvcached.log import escaped
from kvcached.memory.device_headers import DeviceHeaders
from kvcached.memory.host_pool import MemoryIdentity
from kvcached_client.blocks.header import HeaderKind
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import HostRegistration, ReplicaInfo
from kvcached_client.types import ShardIndex, WritePolicy

#: How many bytes of a namespace's root reports show, in hex digits.
NAMESPACE_SHOWN_BYTES: Final = 8
#: A name with fewer characters is not taken as hex digits of a namespace: it may well be a label.
_DIGITS_MIN: Final = 4
_SHOWN_MAX: Final = 8
_LOST_MEMORY: Final = "the memory of its device pool is lost, and is made anew when no engine has a session on it"

#: Called when a shard has finished a transfer: (shard, error or "", corrupt blocks).
Settled = Callable[[ShardIndex, str, tuple[int, ...]], None]


class Workers(Protocol):
    """What the service needs of a replica's workers.

    Attributes:
        generation: the namespace's, for copies that start from now on.
    """

    generation: int

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: the sealed pool memory, the sealed progress page, and an eventfd for each entry.

        The daemon owns these descriptors; they remain open when the shard's worker dies.
        """

    @property
    def is_degraded(self) -> bool:
        """Whether the workers die again and again, so that they are restarted rarely or are on probation."""

    @property
    def last_loss(self) -> str:
        """How the last workers were lost, in a line; empty if none were."""

    @property
    def restarts(self) -> int:
        """How often the workers were restarted since the daemon's start."""

    @property
    def registered(self) -> tuple[HostRegistration, ...]:
        """How much of the host pool the devices of the shards reach; none on a CPU, or while workers start."""

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Start a transfer. `settled` is called once per shard, later, in this thread. It never raises."""

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started transfer. Does nothing if the transfer has ended."""

    def abandon(self, load: AbandonLoad) -> None:
        """Report a load that was never started as failed on the progress pages."""

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Write, copy and read back through two slots on every shard.

        The future is done when no worker writes to the slots any more, which may take long. If a step failed, its
        exception is a DaemonFailure that names the step and the shard.
        """

    def unprobed(self) -> str:
        """Which workers have not answered a probe, and what their processes do, in words; empty if all have."""


class HeldMemory(NamedTuple):
    """The memory of an awake replica's device pool, and the workers on it.

    Attributes:
        memory: which memory each shard has, for the next daemon; empty if no daemon can take it over.
        cuda_devices: the UUIDs of the CUDA devices that have it; none on a CPU.
        headers: those of the device pool's slots; None if no daemon can take the pool over.
    """

    workers: Workers
    memory: tuple[MemoryIdentity, ...] = ()
    cuda_devices: tuple[str, ...] = ()
    headers: DeviceHeaders | None = None


class PoolHolder(Protocol):
    """Holds the memory of a replica's device pool. Each call begins when the one before it is over.

    What is called then is called later, in this thread, unless the daemon ends before.
    """

    @property
    def trouble(self) -> str:
        """Why it has no memory, or why no workers could be started on it; empty if it has both, or sleeps."""

    def end_workers(self, ended: Callable[[], None]) -> None:
        """End the workers; they are not started again."""

    def give_back(self, given: Callable[[], None]) -> None:
        """Clear the headers, have the service manager forget the memory, and close it."""

    def make(self, generation: int, made: Callable[[HeldMemory | RequestError], None]) -> None:
        """Make new memory and start workers on it, for a generation of the namespace. On an error nothing is left."""

    def make_when_possible(self, generation: int, made: Callable[[HeldMemory], None]) -> None:
        """As `make`, again and again until the devices make memory, and workers run on it."""


@dataclass(slots=True, eq=False)
class Replica:
    """A configured replica. Clearing it changes its namespace, generation and weights version; nothing else changes.

    But for its memory and its workers: see `hold`.

    Attributes:
        namespace: 32 bytes, the root of every chain of keys. Replicas with the same namespace share their prefixes.
        generation: the namespace's.
        root_of: computes the namespace of a generation and a weights version.
        weights_version: as `set-weights` has set it; empty = that of the configuration.
        header_namespace: 16 bytes, the namespace in the headers of its blocks; the same in every generation.
        write_policy: that of the configuration; `set-policy` may have set another one since.
        holder: of its memory.
        memory, headers: as of `HeldMemory`; nothing while it is asleep.
        cuda_devices: as of `HeldMemory`; while it is asleep, those that it had last.
        waits_for_device: its memory is lost, and is made anew when its devices can make it.
        cuda_ordinals: the configured CUDA device of each shard; empty on a CPU.
        is_kept: the memory is from before the restart and still holds what engines wrote.
        host_geometry: how the replica's blocks lie in the host pool; None without a host pool.
    """

    name: str
    device: str
    model: str
    key_algorithm: str
    layout: Layout
    slots: int
    namespace: bytes
    generation: int
    workers: Workers
    holder: PoolHolder
    root_of: Callable[[int, str], bytes]
    weights_version: str = ""
    header_namespace: bytes = bytes(16)
    host_geometry: HostGeometry | None = None
    write_policy: WritePolicy = WritePolicy.WRITE_THROUGH
    memory: tuple[MemoryIdentity, ...] = ()
    cuda_ordinals: tuple[int, ...] = ()
    cuda_devices: tuple[str, ...] = ()
    is_kept: bool = False
    headers: DeviceHeaders | None = None
    waits_for_device: bool = False
    _fingerprint: bytes = field(init=False)

    def __post_init__(self) -> None:
        self._fingerprint = bytes.fromhex(self.layout.block_fingerprint())

    def hold(self, held: HeldMemory | None) -> None:
        """It has this memory and these workers from now on; None: none, and its workers have ended."""
        self.is_kept = False
        self.memory, self.headers = (), None
        if held is not None:
            self.workers, self.memory, self.cuda_devices, self.headers = held
            self.workers.generation = self.generation

    @property
    def is_degraded(self) -> bool:
        """Whether its workers die again and again, or could not be started."""
        return self.workers.is_degraded or bool(self.trouble)

    @property
    def last_loss(self) -> str:
        """How its last workers were lost, while they die again and again."""
        return self.workers.last_loss if self.workers.is_degraded else ""

    @property
    def trouble(self) -> str:
        """As `PoolHolder.trouble`, until what has gone wrong is well again."""
        return self.holder.trouble or (_LOST_MEMORY if self.waits_for_device else "")

    @property
    def header_kind(self) -> HeaderKind:
        """The fields that the headers of all its blocks have in common in the present generation."""
        return HeaderKind(self.header_namespace, self._fingerprint, self.generation)

    def info(self) -> ReplicaInfo:
        """The replica as `describe` reports it."""
        return ReplicaInfo(
            name=self.name,
            layout=self.layout,
            fingerprint=self.layout.fingerprint(),
            slots=self.slots,
            bytes_per_block=self.layout.bytes_per_block(),
            device=self.device,
            model=self.model,
            key_algorithm=self.key_algorithm,
            namespace=self.namespace.hex(),
            generation=self.generation,
            weights_version=self.weights_version,
        )


def check_replica(name: str, replicas: Mapping[str, Replica]) -> None:
    """Refuse the name of an unknown replica; "" stands for all replicas.

    Raises:
        RequestError: no replica has this name.
    """
    if name and name not in replicas:
        raise unknown_replica(name, replicas, "name none, which means all of it")


def unknown_replica(name: str, replicas: Collection[str], otherwise: str) -> RequestError:
    """The error for a request that names a replica which is not configured; `otherwise` is what to do without any."""
    named = f"configured are: {', '.join(sorted(replicas))}"
    fix = named if replicas else f"this daemon has no replicas, only namespaces of engines in offload mode: {otherwise}"
    return request_error(ErrorCode.UNKNOWN_REPLICA, f"there is no replica {name!r}", fix)


class NamedNamespace(NamedTuple):
    """A namespace that a request has named.

    Attributes:
        tree: its index.
        root: the root of its keys, 32 bytes.
        label: the name that engines in offload mode gave it; "" for a namespace of replicas.
    """

    tree: PrefixTree
    root: bytes
    label: str

    @property
    def replicas(self) -> tuple[str, ...]:
        """The replicas that share the namespace; none for one of engines in offload mode."""
        return tuple(pool.name for pool in self.tree.pools)


class UnknownNamespace(NamedTuple):
    """A namespace that a request has named, and that no engine has declared to this daemon.

    Attributes:
        root: the root of its keys, 32 bytes.
        label: what reports call it.
    """

    root: bytes
    label: str = "unknown"


_Named = TypeVar("_Named", bound=NamedNamespace | UnknownNamespace)


def resolve_namespace(cache: Cache, replicas: Mapping[str, Replica], name: str) -> NamedNamespace:
    """The namespace that a name means: a replica's name, the first hex digits of a namespace, or a label.

    Raises:
        RequestError: the name means no namespace, or more than one.
    """
    if name in replicas:
        return NamedNamespace(cache.tree_of(name), replicas[name].namespace, "")
    return _meant(name, list(_namespaces(cache, replicas)), replicas)


def resolve_any_namespace(
    cache: Cache, replicas: Mapping[str, Replica], name: str, roots: Collection[bytes]
) -> NamedNamespace | UnknownNamespace:
    """As `resolve_namespace`, also for namespaces of which only the roots are known: their hex digits."""
    if name in replicas:
        return resolve_namespace(cache, replicas, name)
    known = list(_namespaces(cache, replicas))
    unknown = sorted(set(roots) - {each.root for each in known})
    every: list[NamedNamespace | UnknownNamespace] = [*known, *map(UnknownNamespace, unknown)]
    return _meant(name, every, replicas)


def _meant(name: str, known: list[_Named], replicas: Iterable[str]) -> _Named:
    found = [each for each in known if len(name) >= _DIGITS_MIN and each.root.hex().startswith(name)]
    found = found or [each for each in known if each.label == name and not isinstance(each, UnknownNamespace)]
    if len(found) == 1:
        return found[0]
    names = [*replicas, *(f"{each.root.hex()[:16]} ({escaped(each.label)})" for each in known if each.label)]
    raise request_error(
        ErrorCode.UNKNOWN_REPLICA,
        f"{len(found)} namespaces are meant by {name!r}; there are: {', '.join(names[:_SHOWN_MAX]) or 'none'}",
        "give a replica's name, or as many hex digits of a namespace as tell it from others",
    )


def _namespaces(cache: Cache, replicas: Mapping[str, Replica]) -> Iterator[NamedNamespace]:
    seen: set[bytes] = set()
    for name, replica in replicas.items():
        if replica.namespace not in seen:
            seen.add(replica.namespace)
            yield NamedNamespace(cache.tree_of(name), replica.namespace, "")
    for root, space in cache.offload.namespaces.by_root.items():
        yield NamedNamespace(space.tree, root, space.spec.label)
