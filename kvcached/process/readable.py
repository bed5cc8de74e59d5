"""Waiting for a descriptor in the event loop: a message, a closed connection, or, of a pidfd, a death."""

from __future__ import annotations

import asyncio


async def readable(descriptor: int) -> None:
    """Wait until a descriptor is readable."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def tell() -> None:
        loop.remove_reader(descriptor)
        ready.set_result(None)

    loop.add_reader(descriptor, tell)
    try:
        await ready
    finally:
        loop.remove_reader(descriptor)
