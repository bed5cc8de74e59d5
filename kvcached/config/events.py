"""The table of a configuration that says where KV cache events are published."""

from __future__ import annotations

import os
from typing import Annotated, Final
from urllib.parse import urlsplit

from pydantic import Field
from pydantic.functional_validators import AfterValidator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached.config.tables import SIZE
from kvcached_client.transport.run_dir import SOCKET_PATH_BYTES_MAX

_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def _endpoint(value: str) -> str:
    if value.startswith("ipc:///"):
        size = len(os.fsencode(value.removeprefix("ipc://")))
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
