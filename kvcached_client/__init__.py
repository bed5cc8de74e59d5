"""Client of kvcached, the KV-cache daemon for LLM engines.

Everything that engines use is here, but for what needs more than this package's dependencies: `kvcached_client.tensors`
and `kvcached_client.transformers` (torch), and `kvcached_client.cuda`.

Names are imported when they are first used: the daemon's workers, too, take modules from this package, and must not
wait for numpy and ZeroMQ, which they have no use for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_client.admin import Admin
    from kvcached_client.aio.client import AsyncClient
    from kvcached_client.aio.lease import AsyncLease
    from kvcached_client.batch import CallBatch
    from kvcached_client.blocks.block_table import slot_mapping
    from kvcached_client.blocks.canonical import canonical_layout
    from kvcached_client.blocks.host_layout import CanonicalLayout, OffloadLayout
    from kvcached_client.blocks.jobs import BlockJob, JobSpan
    from kvcached_client.blocks.layout import KvGroup, Layout, layout_from_model_config
    from kvcached_client.blocks.memory_locks import lock_memory
    from kvcached_client.blocks.pages import EnginePages
    from kvcached_client.client import Client
    from kvcached_client.copy_process.client import CopyProcess
    from kvcached_client.copy_process.engine_memory import EngineMemory
    from kvcached_client.copy_process.messages import Outcome
    from kvcached_client.errors import (
        BadRequest,
        CircuitOpen,
        DaemonFailure,
        DaemonSilent,
        DaemonUnreachable,
        DeadlineExceeded,
        DeviceError,
        ErrorCode,
        Fault,
        KvcachedError,
        LoadFailed,
        NoCapacity,
        Refused,
        RequestError,
        Stale,
        TransportError,
    )
    from kvcached_client.keys import KeyChain, namespace_root
    from kvcached_client.lease import Lease
    from kvcached_client.offload import OffloadClient, new_instance
    from kvcached_client.offload_shard import OffloadShard
    from kvcached_client.pool import MappedPool, map_pool
    from kvcached_client.prefetch import PrefetchResult
    from kvcached_client.protocol.engine import LoadTicket
    from kvcached_client.protocol.grants import Hold, Offered, Piece, PreparedLoad, PreparedStore
    from kvcached_client.transport.attach import SessionGrant
    from kvcached_client.transport.misses import FailureReason
    from kvcached_client.transport.run_dir import default_run_dir
    from kvcached_client.transport.steps import BatchedCall

_HOMES = {
    "admin": ("Admin",),
    "aio.client": ("AsyncClient",),
    "aio.lease": ("AsyncLease",),
    "batch": ("CallBatch",),
    "blocks.block_table": ("slot_mapping",),
    "blocks.canonical": ("canonical_layout",),
    "blocks.host_layout": ("CanonicalLayout", "OffloadLayout"),
    "blocks.jobs": ("BlockJob", "JobSpan"),
    "blocks.layout": ("KvGroup", "Layout", "layout_from_model_config"),
    "blocks.memory_locks": ("lock_memory",),
    "blocks.pages": ("EnginePages",),
    "client": ("Client",),
    "copy_process.client": ("CopyProcess",),
    "copy_process.engine_memory": ("EngineMemory",),
    "copy_process.messages": ("Outcome",),
    "errors": (
        "BadRequest",
        "CircuitOpen",
        "DaemonFailure",
        "DaemonSilent",
        "DaemonUnreachable",
        "DeadlineExceeded",
        "DeviceError",
        "ErrorCode",
        "Fault",
        "KvcachedError",
        "LoadFailed",
        "NoCapacity",
        "Refused",
        "RequestError",
        "Stale",
        "TransportError",
    ),
    "keys": ("KeyChain", "namespace_root"),
    "lease": ("Lease",),
    "offload": ("OffloadClient", "new_instance"),
    "offload_shard": ("OffloadShard",),
    "pool": ("MappedPool", "map_pool"),
    "prefetch": ("PrefetchResult",),
    "protocol.engine": ("LoadTicket",),
    "protocol.grants": ("Hold", "Offered", "Piece", "PreparedLoad", "PreparedStore"),
    "transport.attach": ("SessionGrant",),
    "transport.misses": ("FailureReason",),
    "transport.run_dir": ("default_run_dir",),
    "transport.steps": ("BatchedCall",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Admin",
    "AsyncClient",
    "AsyncLease",
    "BadRequest",
    "BatchedCall",
    "BlockJob",
    "CallBatch",
    "CanonicalLayout",
    "CircuitOpen",
    "Client",
    "CopyProcess",
    "DaemonFailure",
    "DaemonSilent",
    "DaemonUnreachable",
    "DeadlineExceeded",
    "DeviceError",
    "EngineMemory",
    "EnginePages",
    "ErrorCode",
    "FailureReason",
    "Fault",
    "Hold",
    "JobSpan",
    "KeyChain",
    "KvGroup",
    "KvcachedError",
    "Layout",
    "Lease",
    "LoadFailed",
    "LoadTicket",
    "MappedPool",
    "NoCapacity",
    "Offered",
    "OffloadClient",
    "OffloadLayout",
    "OffloadShard",
    "Outcome",
    "Piece",
    "PrefetchResult",
    "PreparedLoad",
    "PreparedStore",
    "Refused",
    "RequestError",
    "SessionGrant",
    "Stale",
    "TransportError",
    "canonical_layout",
    "default_run_dir",
    "layout_from_model_config",
    "lock_memory",
    "map_pool",
    "namespace_root",
    "new_instance",
    "slot_mapping",
]


def __getattr__(name: str) -> object:
    home = _HOME_OF.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
