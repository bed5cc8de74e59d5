"""The table of a configuration that says where KV cache events are published."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated, Final, Literal
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.functional_validators import AfterValidator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached.config.tables import SIZE, TcpAddress
from kvcached_client.transport.run_dir import (
    EVENTS_SOCKET_NAME,
    REPLAY_SOCKET_NAME,
    SOCKET_PATH_BYTES_MAX,
    socket_path,
)

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_IPC: Final = "ipc://"


def _endpoint(value: str) -> str:
    if value.startswith(f"{_IPC}/"):
        size = len(os.fsencode(value.removeprefix(_IPC)))
        if size > SOCKET_PATH_BYTES_MAX:
            raise mistake(f"makes a socket path of {size} bytes", f"use one of {SOCKET_PATH_BYTES_MAX} at most")
        return value
    try:
        parts = urlsplit(value)
        is_good = parts.scheme == "tcp" and parts.hostname in _LOOPBACK and bool(parts.port) and not parts.path
    except ValueError:
        is_good = False
    if not is_good:
        raise mistake(
            "is no endpoint that events can have",
            "use ipc:///ABSOLUTE/PATH, or tcp://127.0.0.1:PORT: nothing protects a port that other machines reach",
        )
    return value


class EventsNamespace(Table):
    """``[[events.namespace]]``: what is told of some namespaces, and as what."""

    label: str = Field(
        min_length=1,
        max_length=256,
        description="The namespaces: the label that engines in offload mode give them (the model), or the name of the"
        " first replica in one. A shell pattern, as in `llama-*`; the first match counts.",
    )
    token_ids: bool = Field(
        default=False,
        description="Whether routers are told the tokens of blocks, too. llm-d and Dynamo need them; whoever reads the"
        " events then reads prompts.",
    )
    topics: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        default=(),
        strict=False,
        max_length=16,
        description="Whole topics of its messages, in place of `topic` and the label. Each message is published once"
        " for each of them.",
    )


class EventsConfig(Table):
    """``[events]``: KV cache events for routers. Without the table none are published."""

    endpoint: Annotated[str, Field(max_length=256), AfterValidator(_endpoint)] | None = Field(
        default=None,
        description="Where events are published: ipc:///PATH, for the daemon's user only, or tcp://127.0.0.1:PORT,"
        " for every user of this machine. Default: events.sock in run_dir.",
    )
    replay_endpoint: Annotated[str, Field(max_length=256), AfterValidator(_endpoint)] | None = Field(
        default=None,
        description="Where subscribers ask for what they have missed, and for snapshots. Default: replay.sock in"
        " run_dir.",
    )
    topic: str = Field(
        default="",
        max_length=128,
        description="What the topic of every message begins with; the namespace's label follows. llm-d expects"
        " `kv@NODE@`.",
    )
    buffer_bytes: Annotated[int, Field(ge=1 << 16, le=1 << 32), SIZE] = Field(
        default=16 << 20, description="Memory for messages that subscribers may ask for again."
    )
    block_hashes: Literal["int", "bytes"] = Field(
        default="int",
        description="How keys are told: int, the last 8 bytes as an unsigned integer, as vLLM does unless it is told"
        " otherwise, and as Dynamo needs them; bytes, all 16.",
    )
    namespace: tuple[EventsNamespace, ...] = Field(
        default=(), strict=False, max_length=64, description="What is told of some namespaces."
    )

    def may_tell_tokens(self, label: str) -> bool:
        """Whether routers may know the tokens of a namespace with this label."""
        rule = self._rule(label)
        return rule is not None and rule.token_ids

    def topics(self, label: str) -> tuple[str, ...]:
        """The topics of messages about a namespace with this label."""
        rule = self._rule(label)
        return (self.topic + label,) if rule is None or not rule.topics else rule.topics

    def _rule(self, label: str) -> EventsNamespace | None:
        return next((rule for rule in self.namespace if fnmatchcase(label, rule.label)), None)

    def endpoints(self, run_dir: Path) -> tuple[str, str]:
        """Where events are published, and where subscribers ask; without an endpoint, in a daemon's run directory."""
        return (
            self.endpoint or f"{_IPC}{socket_path(run_dir, EVENTS_SOCKET_NAME)}",
            self.replay_endpoint or f"{_IPC}{socket_path(run_dir, REPLAY_SOCKET_NAME)}",
        )


def check_endpoints(events: EventsConfig, run_dir: Path, others: Mapping[str, TcpAddress | str]) -> None:
    """Refuse endpoints at one place, and one where another table of the configuration listens.

    Args:
        events: the table.
        run_dir: of the daemon.
        others: addresses or paths of sockets, by their keys.

    Raises:
        PydanticCustomError: two want one place.
    """
    first, second = events.endpoints(run_dir)
    taken = {key: {place} for key, place in others.items()}
    for key, endpoint in (("endpoint", first), ("replay_endpoint", second)):
        places = set(_places(endpoint))
        for other, held in taken.items():
            if any(_meet(place, each) for place in places for each in held):
                raise mistake(f"is the place of {other}, too", "give each its own", ("events", key), endpoint)
        taken[key] = places


def _places(endpoint: str) -> Iterator[TcpAddress | str]:
    """The path of an endpoint, or its addresses."""
    if endpoint.startswith(_IPC):
        yield os.path.normpath(endpoint.removeprefix(_IPC))
        return
    parts = urlsplit(endpoint)
    hosts = ("127.0.0.1", "::1") if parts.hostname == "localhost" else (parts.hostname or "",)
    for host in hosts:
        yield TcpAddress(host, parts.port or 0)


def _meet(place: TcpAddress | str, other: TcpAddress | str) -> bool:
    """Whether only one of both can be bound: 0.0.0.0 and :: are every address of their family."""
    if isinstance(place, str) or isinstance(other, str):
        return place == other
    every = "::" if ":" in place.host else "0.0.0.0"  # noqa: S104 - to compare with
    return place.port == other.port and other.host in {place.host, every}
