"""A configured replica at run time: its name, its shape, its memory, the workers that copy; and what a name means."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from kvcached.core.cache import Cache
from kvcached.core.index.tree import PrefixTree
from kvcached.core.messages import AbandonLoad, HurryTransfer, StartTransfer
from kvcached.memory.device_headers import DeviceHeaders
from kvcached.memory.host_pool import MemoryIdentity
from kvcached_client.blocks.header import HeaderKind
from kvcached_client.blocks.host_layout import HostGeometry
from kvcached_client.blocks.layout import Layout
from kvcached_client.errors import ErrorCode, RequestError, request_error
from kvcached_client.protocol.engine import ReplicaInfo
from kvcached_client.types import ShardIndex, WritePolicy

#: Bytes of a namespace's root that tell it from others, as hex digits in reports.
NAMESPACE_SHOWN_BYTES: Final = 8
#: Fewer hex digits of a namespace are too easily meant otherwise.
_DIGITS_MIN: Final = 4
_SHOWN_MAX: Final = 8

#: A shard is through with a transfer: (shard, error or "", corrupt blocks).
Settled = Callable[[ShardIndex, str, tuple[int, ...]], None]


class Workers(Protocol):
    """What the service needs of a replica's workers.

    Attributes:
        generation: of the namespace, for what is ordered from now on.
    """

    generation: int

    def descriptors(self, shard: ShardIndex) -> tuple[int, ...]:
        """What a shard process maps: sealed pool memory, sealed progress page, an eventfd for each of its entries.

        They stay the daemon's own, whatever becomes of the shard's worker.
        """

    @property
    def is_degraded(self) -> bool:
        """Whether they die again and again, so that they are started as rarely as possible, or are on probation."""

    @property
    def restarts(self) -> int:
        """How often they were replaced since the daemon's start."""

    def start(self, transfer: StartTransfer, settled: Settled) -> None:
        """Order a copy on every shard. `settled` is called once per shard, later, in this thread; it never raises."""

    def hurry(self, transfer: HurryTransfer) -> None:
        """Raise the priority of a started copy. Does nothing where it is over."""

    def abandon(self, load: AbandonLoad) -> None:
        """Tell the progress pages that a load failed which was never started."""

    def probe(self, first: int, second: int) -> asyncio.Future[None]:
        """Write, copy and read back through two slots on every shard.

        The future is done when nobody writes into the slots any more, however that came: it may take long. It fails
        with DaemonFailure, which says what failed on which shard.
        """


@dataclass(slots=True, eq=False)
class Replica:
    """What is served under a name. Only clearing it changes anything: namespace, generation, weights version.

    Attributes:
        namespace: 32 bytes, root of every chain of keys; replicas that share it share their prefixes.
        generation: of the namespace.
        root_of: the namespace of a generation and a weights version.
        weights_version: what was set for it; empty = what the configuration says.
        header_namespace: what headers of its blocks in the host pool say, 16 bytes, the same in every generation.
        write_policy: that the configuration says; another one may have been set since.
        memory: of each shard, for who takes it over; empty where nobody can.
        cuda_ordinals: the CUDA devices that have it, as they are configured; none on a CPU.
        cuda_devices: their UUIDs.
        is_kept: this memory is an earlier daemon's, with what its engines had written.
        headers: of the slots of its device pool; None where nobody takes the pool over.
        host_geometry: the host pool as its blocks lie in it; None without a host tier.
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

    @property
    def header_kind(self) -> HeaderKind:
        """What the headers of its blocks, in its present generation, have in common."""
        return HeaderKind(self.header_namespace, bytes.fromhex(self.layout.fingerprint()), self.generation)

    def info(self) -> ReplicaInfo:
        """The replica as `describe` tells it."""
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
    """Refuse a name that no replica has; "" stands for all.

    Raises:
        RequestError: no replica has it.
    """
    if name and name not in replicas:
        raise unknown_replica(name, replicas)


def unknown_replica(name: str, replicas: Iterable[str]) -> RequestError:
    """What is told to who asks for a replica that is not configured."""
    return request_error(
        ErrorCode.UNKNOWN_REPLICA, f"there is no replica {name!r}", f"configured are: {', '.join(sorted(replicas))}"
    )


class NamedNamespace(NamedTuple):
    """A namespace.

    Attributes:
        tree: its index.
        root: of its keys, 32 bytes.
        label: what engines in offload mode call it; "" for that of replicas.
    """

    tree: PrefixTree
    root: bytes
    label: str

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that share it; none for engines in offload mode."""
        return tuple(pool.name for pool in self.tree.pools)


def resolve_namespace(cache: Cache, replicas: Mapping[str, Replica], name: str) -> NamedNamespace:
    """The namespace of a replica, or the one whose hex digits begin so, or that engines in offload mode call so.

    Raises:
        RequestError: there is none, or more than one.
    """
    if name in replicas:
        return NamedNamespace(cache.tree_of(name), replicas[name].namespace, "")
    known = list(_namespaces(cache, replicas))
    found = [each for each in known if len(name) >= _DIGITS_MIN and each.root.hex().startswith(name)]
    found = found or [each for each in known if each.label == name]
    if len(found) == 1:
        return found[0]
    names = [*replicas, *(f"{each.root.hex()[:16]} ({each.label})" for each in known if each.label)]
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
