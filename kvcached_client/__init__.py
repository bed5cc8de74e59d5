"""Client of kvcached, the KV-cache daemon for LLM engines.

Names are imported when they are first used: the daemon's workers, too, take modules from this package, and must not
wait for numpy and ZeroMQ, which they have no use for.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_client.admin import Admin
    from kvcached_client.blocks.layout import KvGroup, Layout
    from kvcached_client.client import Client
    from kvcached_client.errors import (
        BadRequest,
        CircuitOpen,
        DaemonFailure,
        DaemonUnreachable,
        DeadlineExceeded,
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
    from kvcached_client.keys import KeyChain
    from kvcached_client.lease import Lease
    from kvcached_client.pool import MappedPool, map_pool
    from kvcached_client.protocol.engine import LoadTicket
    from kvcached_client.transport.attach import SessionGrant
    from kvcached_client.transport.misses import FailureReason

_HOMES = {
    "transport.attach": ("SessionGrant",),
    "admin": ("Admin",),
    "client": ("Client",),
    "errors": (
        "BadRequest",
        "CircuitOpen",
        "DaemonFailure",
        "DaemonUnreachable",
        "DeadlineExceeded",
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
    "keys": ("KeyChain",),
    "blocks.layout": ("KvGroup", "Layout"),
    "lease": ("Lease",),
    "pool": ("MappedPool", "map_pool"),
    "transport.misses": ("FailureReason",),
    "protocol.engine": ("LoadTicket",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Admin",
    "BadRequest",
    "CircuitOpen",
    "Client",
    "DaemonFailure",
    "DaemonUnreachable",
    "DeadlineExceeded",
    "ErrorCode",
    "FailureReason",
    "Fault",
    "KeyChain",
    "KvGroup",
    "KvcachedError",
    "Layout",
    "Lease",
    "LoadFailed",
    "LoadTicket",
    "MappedPool",
    "NoCapacity",
    "Refused",
    "RequestError",
    "SessionGrant",
    "Stale",
    "TransportError",
    "map_pool",
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
