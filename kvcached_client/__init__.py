"""Client of kvcached, the KV-cache daemon for LLM engines."""

from kvcached_client.attach import SessionGrant
from kvcached_client.client import Admin, Client
from kvcached_client.errors import (
    BadRequest,
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
from kvcached_client.layout import KvGroup, Layout
from kvcached_client.lease import Lease
from kvcached_client.memory import MappedPool, map_pool
from kvcached_client.protocol import LoadTicket

__all__ = [
    "Admin",
    "BadRequest",
    "Client",
    "DaemonFailure",
    "DaemonUnreachable",
    "DeadlineExceeded",
    "ErrorCode",
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
