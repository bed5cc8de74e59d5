"""Starts the sockets of KV cache events, as they are configured."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from kvcached.config.schema import Config
from kvcached.core.cache import Cache
from kvcached.events.server import Endpoints, EventServer
from kvcached.events.stream import EventStream
from kvcached.service.service import Service
from kvcached_client.transport.run_dir import EVENTS_SOCKET_NAME, REPLAY_SOCKET_NAME, socket_path


async def start_events(config: Config, cache: Cache, service: Service, parts: AsyncExitStack) -> None:
    """Publish what changes in the index from now on, if the configuration says so.

    Raises:
        OSError: an endpoint cannot be bound.
    """
    table = config.events
    if table is None:
        return
    stream = EventStream(
        cache.index_changes, cache.announced, topic=table.topic, epoch=cache.epoch, buffer_bytes=table.buffer_bytes,
        now_s=time.time,
    )  # fmt: skip
    server = EventServer(
        stream,
        Endpoints(
            table.endpoint or f"ipc://{socket_path(config.run_dir, EVENTS_SOCKET_NAME)}",
            table.replay_endpoint or f"ipc://{socket_path(config.run_dir, REPLAY_SOCKET_NAME)}",
        ),
    )
    parts.callback(server.close)
    await server.start()
    service.index_changed = server.poke
