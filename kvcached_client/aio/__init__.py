"""The client for engines in an asyncio event loop: the calls of `kvcached_client.Client`, awaited."""

from kvcached_client.aio.client import AsyncClient
from kvcached_client.aio.lease import AsyncLease

__all__ = ["AsyncClient", "AsyncLease"]
