"""The table ``[access]`` of a configuration: what users other than the daemon's own may do."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import Field

from kvcached.config.base_table import Table

UserName: TypeAlias = Annotated[str, Field(min_length=1, max_length=64)]
#: A shell pattern of names.
NamePattern: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]


class EngineAccess(Table):
    """``[[access.engine]]``: users who may run engines, and on what."""

    users: tuple[UserName, ...] = Field(
        strict=False,
        min_length=1,
        description='Names or numbers of users; with @ of groups, as in ["vllm", "10002", "@gpu"].',
    )
    replicas: tuple[NamePattern, ...] = Field(
        default=("*",),
        strict=False,
        description="Replicas whose device pools they may use: shell patterns of names. []: none.",
    )
    namespaces: tuple[NamePattern, ...] = Field(
        default=("*",),
        strict=False,
        description="Namespaces that they may use in offload mode: shell patterns of the labels that engines give"
        " them (the model), as in `llama-*`. []: none, so they get no host memory.",
    )
    read_only: bool = Field(
        default=False,
        description="In offload mode they load blocks and store none; the kernel lets them read the host pool, not"
        " write it.",
    )


class AccessConfig(Table):
    """``[access]``: what users other than the daemon's own may do. The daemon's own user may do everything."""

    operate: tuple[UserName, ...] = Field(
        default=(),
        strict=False,
        description="Who may change what the daemon does (pause, drain, clear, set-weights, set-policy, set-log-level,"
        " pin, sleep, storage, …), and look: names or numbers of users; with @ of groups.",
    )
    look: tuple[UserName, ...] = Field(
        default=("root",),
        strict=False,
        description="Who may read reports (health, stats, check, tree, inspect, explain, storage status): as operate.",
    )
    engine: tuple[EngineAccess, ...] = Field(
        default=(), strict=False, description="Who may run engines. They share the pools with all other engines."
    )
