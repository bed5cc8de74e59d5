"""Starts the sockets of KV cache events, as they are configured."""

from __future__ import annotations

import time
from contextlib import AsyncExitStack

from kvcached.config.schema import Config
from kvcached.core.cache import Cache
from kvcached.events.server import Endpoints, EventServer
from kvcached.events.stream import EventStream
from kvcached.process.seqpacket import SocketFile
from kvcached.service.service import Service


async def start_events(config: Config, cache: Cache, service: Service, parts: AsyncExitStack) -> list[SocketFile]:
    """Publish what changes in the index from now on, if the configuration says so; the files of its sockets.

    Raises:
        OSError: an endpoint cannot be bound; nothing is published, and the text begins with the key in `[events]`.
    """
    table = config.events
    if table is None:
        return []
    stream = EventStream(
        cache.index_changes, cache.announced, topic=table.topic, epoch=cache.epoch, buffer_bytes=table.buffer_bytes,
        now_s=time.time,
    )  # fmt: skip
    server = EventServer(stream, Endpoints(*table.endpoints(config.run_dir)))
    parts.callback(server.close)
    try:
        await server.start()
    except OSError:
        server.close()
        service.index_changed = cache.index_changes.clear  # nobody takes them
        raise
    service.index_changed = server.poke
    return server.files
