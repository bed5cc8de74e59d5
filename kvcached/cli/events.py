"""The command `events`: what a daemon tells routers, line by line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from kvcached.cli.options import EPILOG, ExitCode, fail, json_option, run_dir_option
from kvcached.log import escaped

if TYPE_CHECKING:
    from kvcached.events.wire import Event, EventBatch

_SHOWN_KEYS: Final = 4
_SHOWN_NAMESPACE: Final = 16
_RECEIVE_BYTES: Final = 1 << 16
_MESSAGES_MAX: Final = 1 << 30


@click.command(epilog=EPILOG)
@click.option("--topic", default="", show_default="all", help="Only messages whose topic begins with this.")
@click.option(
    "--endpoint",
    show_default="events.sock in the run directory",
    help="Where the daemon publishes: endpoint in [events].",
)
@run_dir_option
@json_option
def events(topic: str, endpoint: str | None, run_dir: Path | None, *, as_json: bool) -> None:
    """Follow the KV cache events of a daemon, one line per event, until Ctrl-C or the daemon's end."""
    last = None
    for number, batch in _batches(endpoint or _default_endpoint(run_dir), topic):
        if last is not None and number > last + 1 and not topic:
            click.echo(f"{number - last - 1} messages were missed", err=True)
        if last is None or number > last:
            last = number
            for event in batch.events:
                click.echo(_as_json(number, batch, event) if as_json else _as_text(number, batch, event))


def _default_endpoint(run_dir: Path | None) -> str:
    from kvcached_client.transport.run_dir import EVENTS_SOCKET_NAME, default_run_dir, socket_path

    return f"ipc://{socket_path(run_dir or default_run_dir(), EVENTS_SOCKET_NAME)}"


def _connect(endpoint: str) -> socket.socket:
    from urllib.parse import urlsplit

    if endpoint.startswith("ipc://"):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(endpoint.removeprefix("ipc://"))
        return connection
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or parts.hostname is None or parts.port is None:
        raise click.UsageError(f"--endpoint {endpoint}: give ipc:///PATH or tcp://HOST:PORT, as in [events]")
    return socket.create_connection((parts.hostname, parts.port))


def _batches(endpoint: str, topic: str) -> Iterator[tuple[int, EventBatch]]:
    """The messages of a publisher and their numbers, until it ends."""
    from kvcached.events.wire import decode_batch
    from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, Reader, subscribe

    try:
        connection = _connect(endpoint)
    except OSError as error:
        fail(
            ExitCode.UNREACHABLE,
            f"{endpoint}: {error.strerror or error} (is there a table [events] in the daemon's configuration?)",
        )
    with connection:
        connection.sendall(GREETING + SUBSCRIBER.ready + subscribe(topic.encode()))
        reader = Reader(SUBSCRIBER)
        while data := connection.recv(_RECEIVE_BYTES):
            messages = reader.read(data, _MESSAGES_MAX)
            while reader.has_more:
                messages += reader.read(b"", _MESSAGES_MAX)
            if reader.violation is not None:
                fail(ExitCode.UNREACHABLE, f"{endpoint} publishes no events: {reader.violation}")
            for message in messages:
                _, number, payload = message.parts
                yield int.from_bytes(number, "big"), decode_batch(payload)
    fail(ExitCode.UNREACHABLE, f"{endpoint}: the daemon has ended")


def _as_text(number: int, batch: EventBatch, event: Event) -> str:
    from kvcached.events.wire import AllBlocksCleared, hashes_of

    at = datetime.fromtimestamp(batch.ts, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    rank = "host" if batch.data_parallel_rank is None else f"rank {batch.data_parallel_rank}"
    where = f"{event.namespace[:_SHOWN_NAMESPACE]} generation {event.generation} {rank}"
    if isinstance(event, AllBlocksCleared):
        return f"{at} {number} {type(event).__name__} {where}"
    keys = [key.hex() for key in hashes_of(event)]
    more = ", ..." if len(keys) > _SHOWN_KEYS else ""
    shown = escaped(f"{', '.join(keys[:_SHOWN_KEYS])}{more}")
    return f"{at} {number} {type(event).__name__} {where} {event.medium} {len(keys)} blocks: {shown}"


def _as_json(number: int, batch: EventBatch, event: Event) -> str:
    from kvcached.events.wire import AllBlocksCleared, BlockStored, hashes_of

    fields: dict[str, object] = {
        "ts": batch.ts,
        "sequence": number,
        "type": type(event).__name__,
        "data_parallel_rank": batch.data_parallel_rank,
        "namespace": event.namespace,
        "generation": event.generation,
    }
    if not isinstance(event, AllBlocksCleared):
        fields |= {"medium": event.medium, "block_hashes": [key.hex() for key in hashes_of(event)]}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields |= {"parent_block_hash": None if parent is None else parent.hex(), "block_size": event.block_size}
    return json.dumps(fields)
