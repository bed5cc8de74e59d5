"""Who looks at a daemon: ``python -m benchmarks.lookers RUN_DIR HTTP_SOCKET``, until it is ended.

An open status page, a scraper, `kvcached top` and a router that reads events, each as often as the real one asks.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Final

import zmq
import zmq.asyncio

from kvcached_client import Admin

#: As the status page asks.
PAGE_S: Final = {"/status.json": 1.0, "/tree.json": 5.0}
#: Four times as often as Prometheus by default.
SCRAPE_S: Final = 15.0
#: As `kvcached top` asks by default.
TOP_S: Final = 2.0
_DEADLINE_MS: Final = 10_000


async def fetch(socket: str, path: str) -> bytes:
    """A page, over a connection of its own."""
    reader, writer = await asyncio.open_unix_connection(socket)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
    try:
        answer = await reader.read()
    finally:
        writer.close()
    if not answer.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"{path}: {answer[:100]!r}")
    return answer


async def _again(socket: str, path: str, pause_s: float) -> None:
    while True:
        await fetch(socket, path)
        await asyncio.sleep(pause_s)


async def _top(run_dir: Path) -> None:
    def ask() -> None:
        with Admin.connect(run_dir, deadline_ms=_DEADLINE_MS) as admin:
            admin.stats()

    while True:
        await asyncio.to_thread(ask)
        await asyncio.sleep(TOP_S)


async def _follow_events(endpoint: str) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.SUB) as subscriber:
        subscriber.subscribe(b"")
        subscriber.connect(endpoint)
        while True:
            await subscriber.recv_multipart()


async def main(run_dir: str, http_socket: str) -> None:
    """Look until one of them fails, or the process is ended."""
    async with asyncio.TaskGroup() as group:
        for path, pause_s in (*PAGE_S.items(), ("/metrics", SCRAPE_S)):
            group.create_task(_again(http_socket, path, pause_s))
        group.create_task(_top(Path(run_dir)))
        group.create_task(_follow_events(f"ipc://{run_dir}/events.sock"))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
