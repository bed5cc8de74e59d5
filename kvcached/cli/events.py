"""The command `events`: what a daemon tells routers, line by line."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final, NoReturn

import click

from kvcached.cli.options import EPILOG, ExitCode, fail, json_option, run_dir_option
from kvcached.log import escaped

if TYPE_CHECKING:
    from kvcached.events.wire import Event, EventBatch

_SHOWN_KEYS: Final = 4
_SHOWN_NAMESPACE: Final = 16
_KEY_END: Final = (1 << 64) - 1
_RECEIVE_BYTES: Final = 1 << 16
_MESSAGES_MAX: Final = 1 << 30
_PARTS: Final = 3  #: of a message
#: Why nobody listens at an endpoint. The daemon alone knows which of these it is.
_NOBODY: Final = (
    "the daemon's configuration has no table [events], or names another endpoint there; or the socket was removed, or"
    " could not be opened when the daemon started: `kvcached health` tells these two"
)
#: The daemon takes commands of 1024 bytes, and a subscription has ten beside its topic.
_TOPIC_BYTES_MAX: Final = 1014


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
    where, wanted = endpoint or _default_endpoint(run_dir), _topic_bytes(topic)
    last = None
    for number, payload in _messages(where, _address(where), wanted):
        if last is not None and number > last + 1 and not topic:
            click.echo(f"{number - last - 1} messages were missed", err=True)
        if last is None or number > last:
            last = number
            for line in _lines(where, number, payload, as_json=as_json):
                click.echo(line)


def _default_endpoint(run_dir: Path | None) -> str:
    from kvcached_client import RequestError
    from kvcached_client.transport.run_dir import EVENTS_SOCKET_NAME, default_run_dir, socket_path

    try:
        return f"ipc://{socket_path(run_dir or default_run_dir(), EVENTS_SOCKET_NAME)}"
    except RequestError as error:
        fail(ExitCode.USAGE, str(error))


def _topic_bytes(topic: str) -> bytes:
    """The topic as publishers compare it; one that a daemon cannot be asked for is wrong usage."""
    try:
        wanted = topic.encode()
    except UnicodeEncodeError:
        raise click.UsageError(f"--topic {topic!r} is no text in UTF-8") from None
    if len(wanted) > _TOPIC_BYTES_MAX:
        raise click.UsageError(f"--topic has {len(wanted)} bytes: give at most {_TOPIC_BYTES_MAX}")
    return wanted


def _address(endpoint: str) -> str | tuple[str, int]:
    """The path of a socket, or host and port; what is neither is wrong usage."""
    if endpoint.startswith("ipc://"):
        return endpoint.removeprefix("ipc://")
    from kvcached_client.transport.run_dir import host_and_port

    address = host_and_port(endpoint)
    if address is None:
        raise click.UsageError(f"--endpoint {endpoint!r}: give ipc:///PATH or tcp://HOST:PORT, as in [events]")
    return address


def _connect(address: str | tuple[str, int]) -> socket.socket:
    if not isinstance(address, str):
        return socket.create_connection(address)
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(address)
    except OSError:
        connection.close()
        raise
    return connection


def _messages(endpoint: str, address: str | tuple[str, int], topic: bytes) -> Iterator[tuple[int, bytes]]:
    """The messages of a publisher, each with its number, until the connection ends: then so does the program."""
    from kvcached.events.peers import NUMBER_BYTES
    from kvcached_client.protocol.zmtp import GREETING, SUBSCRIBER, Reader, subscribe

    try:
        connection = _connect(address)
    except OSError as error:
        fail(ExitCode.UNREACHABLE, f"{endpoint}: {error.strerror or error}: {_NOBODY}")
    reader, why = Reader(SUBSCRIBER), ""
    with connection:
        try:  # an error of stdout is raised in the loop over this, and not here
            connection.sendall(GREETING + SUBSCRIBER.ready + subscribe(topic))
            while data := connection.recv(_RECEIVE_BYTES):
                messages = reader.read(data, _MESSAGES_MAX)
                while reader.has_more:
                    messages += reader.read(b"", _MESSAGES_MAX)
                if reader.violation is not None:
                    _fail_no_events(endpoint, str(reader.violation))
                for parts in (message.parts for message in messages):
                    if len(parts) != _PARTS or len(parts[1]) != NUMBER_BYTES:
                        _fail_no_events(endpoint, "a message that is not topic, number and payload")
                    yield int.from_bytes(parts[1], "big"), parts[2]
        except OSError as error:
            why = f" ({error.strerror or error})"
    if reader.is_ready:
        fail(ExitCode.UNREACHABLE, f"{endpoint}: the daemon has ended{why}")
    fail(
        ExitCode.UNREACHABLE,
        f"{endpoint}: the connection was refused: there are too many connections, or the daemon has ended{why}",
    )


def _fail_no_events(endpoint: str, why: str) -> NoReturn:
    fail(ExitCode.UNREACHABLE, f"{endpoint} publishes no events: {why}")


def _lines(endpoint: str, number: int, payload: bytes, *, as_json: bool) -> list[str]:
    """The events of a message as they are printed; one that cannot be read, or has no time, ends the program."""
    import msgspec

    from kvcached.events.wire import decode_batch

    shown = _as_json if as_json else _as_text
    try:
        batch = decode_batch(payload)
        return [shown(number, batch, event) for event in batch.events]
    except (msgspec.DecodeError, ValueError, OverflowError, OSError, RecursionError) as error:
        _fail_no_events(endpoint, str(error))


def _as_text(number: int, batch: EventBatch, event: Event) -> str:
    from kvcached.events.wire import AllBlocksCleared, hashes_of

    at = datetime.fromtimestamp(batch.ts, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    rank = "host" if batch.data_parallel_rank is None else f"rank {batch.data_parallel_rank}"
    where = f"{escaped(event.namespace[:_SHOWN_NAMESPACE])} generation {event.generation} {rank}"
    if isinstance(event, AllBlocksCleared):
        return f"{at} {number} {type(event).__name__} {where}"
    keys = [_shown(key) for key in hashes_of(event)]
    more = ", ..." if len(keys) > _SHOWN_KEYS else ""
    shown = f"{', '.join(keys[:_SHOWN_KEYS])}{more}"
    return f"{at} {number} {type(event).__name__} {where} {escaped(str(event.medium))} {len(keys)} blocks: {shown}"


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
        fields |= {"medium": event.medium, "block_hashes": [_shown(key) for key in hashes_of(event)]}
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        fields |= {
            "parent_block_hash": None if parent is None else _shown(parent),
            "token_ids": event.token_ids,
            "block_size": event.block_size,
        }
    return json.dumps(fields, allow_nan=False)


def _shown(key: bytes | int) -> str:
    """A key as hex digits: those of a whole one, or the last 16 of them."""
    return key.hex() if isinstance(key, bytes) else f"{key & _KEY_END:016x}"
