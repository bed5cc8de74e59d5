"""The configuration: what a daemon serves, and every limit with its unit and its reason.

A value comes from a command-line option, else from an environment variable ``KVCACHED_<KEY>``, else from the TOML file,
else from the default here. `docs/configuration.md` is the same in words. Rules:

* Everything is checked before anything is started, and mistakes are reported together, each with its fix. Rules between
  keys come last: they need tables whose keys are right by themselves.
* No coercion, no unknown key, in the file and in the environment alike: a typing error must not become a default.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, ValidationInfo, model_validator
from pydantic.functional_validators import AfterValidator

from kvcached.config.access import AccessConfig
from kvcached.config.base_table import Table
from kvcached.config.events import EventsConfig, check_endpoints
from kvcached.config.problems import ConfigError, Location, Places, key_lines, mistake, problems_of
from kvcached.config.replica import FilePath, ReplicaConfig
from kvcached.config.sources import overlay_environment, read_config_file
from kvcached.config.tables import HostConfig, HttpConfig, OffloadConfig, StorageConfig, WritePolicyName
from kvcached.config.tcp import TcpConfig
from kvcached_client.transport.run_dir import (
    ATTACH_SOCKET_NAME,
    EVENTS_SOCKET_NAME,
    REPLAY_SOCKET_NAME,
    RPC_SOCKET_NAME,
    SOCKET_PATH_BYTES_MAX,
    default_run_dir,
)
from kvcached_client.types import LogLevel

REPLICAS_MAX: Final = 64
#: Keys of a replica that speak of the host tier.
HOST_KEYS: Final = ("free_watermark_percent", "load_threshold_blocks", "load_quota_blocks", "write_policy")
#: Fewer beats than this in a session's lifetime, and one late thread ends a healthy session.
HEARTBEATS_PER_TTL_MIN: Final = 3
#: What the daemon and its processes make in the run directory for themselves, whatever is configured.
_OWN_FILES: Final = re.compile(
    r"(attach|rpc)\.sock|(daemon|storage)\.lock|ledger\.json.*|stopped|storage\.log.*|worker-.*"
)

LogFormat = Literal["plain", "json"]


def _absolute(path: Path) -> Path:
    if not path.is_absolute():
        raise mistake("is no absolute path", "start it with /, for daemon and engines start in different directories")
    return path


def _not_too_many(replicas: tuple[ReplicaConfig, ...]) -> tuple[ReplicaConfig, ...]:
    if len(replicas) > REPLICAS_MAX:
        raise mistake(f"there are {len(replicas)} replicas", f"name {REPLICAS_MAX} at most, each as [[replica]]")
    return replicas


def check_policies(replicas: Sequence[tuple[str, bytes, WritePolicyName]]) -> None:
    """Refuse two policies for one namespace.

    Args:
        replicas: name, namespace and policy of each, in their order.

    Raises:
        PydanticCustomError: two replicas share a namespace and differ in their policy.
    """
    first: dict[bytes, tuple[str, WritePolicyName]] = {}
    for index, (name, namespace, policy) in enumerate(replicas):
        other, known = first.setdefault(namespace, (name, policy))
        if known != policy:
            raise mistake(
                f"is another one than that of replica {other!r} ({known}), which shares its blocks",
                "give both the same",
                ("replica", index, "write_policy"),
                policy,
            )


class Config(Table):
    """The whole configuration of one daemon."""

    run_dir: Annotated[FilePath, AfterValidator(_absolute)] = Field(
        default_factory=default_run_dir,
        description="Directory of the sockets and of the workers' logs. Default: the first of these that is set:"
        " $KVCACHED_RUN_DIR, $RUNTIME_DIRECTORY, $XDG_RUNTIME_DIR/kvcached, /tmp/kvcached-<uid>.",
    )
    log_level: LogLevel = Field(default="info", description="Log messages of this level and above.")
    log_format: LogFormat = Field(default="plain", description="plain is for people, json prints one object per line.")
    heartbeat_interval_ms: int = Field(
        default=2000,
        ge=100,
        le=60_000,
        description="Pause between a session's heartbeats. Heartbeats only detect a stopped or hung process; the"
        " daemon notices a death at once.",
    )
    session_ttl_ms: int = Field(
        default=30_000,
        ge=300,
        le=3_600_000,
        description="A session that is silent for longer expires: its slots are set aside until its processes are"
        " dead. Choose more than the longest pause of an engine, such as compilation or garbage collection.",
    )
    worker_ready_deadline_ms: int = Field(
        default=30_000,
        ge=1000,
        le=600_000,
        description="If a worker is not ready after this time, the start fails. Touching memory takes about 0.7 s"
        " per GiB, up to 1 GiB.",
    )
    shutdown_deadline_ms: int = Field(
        default=5000,
        ge=100,
        le=60_000,
        description="On a clean stop, engines have this long to release their leases; workers that have not ended by"
        " then, or a second later (two where a CUDA device hangs), are killed. Less than the 10 s that"
        " container runtimes grant.",
    )
    replies_kept_per_session: int = Field(
        default=1024,
        ge=256,
        le=65_536,
        description="Answers that the daemon keeps per session for retries with the same request id. The last"
        " `allocate` or `commit` of each lease is kept beside them until the lease's release, and so are as many"
        " answers to preparations of copies in offload mode.",
    )
    pin_quota_percent: int = Field(
        default=25,
        ge=0,
        le=90,
        description="Largest part of a pool, and of a namespace's host slots, that may be pinned.",
    )
    host: HostConfig | None = Field(
        default=None, description="The host tier; without this table there is no host tier."
    )
    offload: OffloadConfig | None = Field(
        default=None,
        description="Serve engines in offload mode, which keep their own device memory and share the host pool, such"
        " as vLLM; without this table they are refused.",
    )
    storage: StorageConfig | None = Field(
        default=None, description="The tier below the host pool; without this table there is no storage."
    )
    http: HttpConfig | None = Field(
        default=None,
        description="Status page, metrics and health over HTTP; without this table nothing listens for HTTP.",
    )
    access: AccessConfig = Field(
        default_factory=AccessConfig, description="What users other than the daemon's own may do."
    )
    tcp: TcpConfig | None = Field(
        default=None,
        description="Reports and operators' commands for other machines; without this table there is no TCP port.",
    )
    events: EventsConfig | None = Field(
        default=None, description="KV cache events for routers; without this table none are published."
    )
    replica: Annotated[tuple[ReplicaConfig, ...], AfterValidator(_not_too_many)] = Field(
        default=(),
        strict=False,
        description="The device pools. At least one, or `[offload]`, or both.",
    )

    _places: Places = PrivateAttr(default_factory=Places)

    @property
    def has_canonical_storage(self) -> bool:
        """Whether storage holds blocks in their canonical layout, where their engines declare one."""
        return self.storage is not None and self.storage.layout == "canonical"

    @property
    def places(self) -> Places:
        """Where its values come from, for messages about them."""
        return self._places

    @model_validator(mode="after")
    def _keep_places(self, info: ValidationInfo) -> Self:
        self._places = (info.context or {}).get("places", Places())
        return self

    @model_validator(mode="after")
    def _check_there_is_something(self) -> Self:
        if not self.replica and self.offload is None:
            raise mistake(
                "is missing, and so is [offload]",
                "name the pools to serve, each as [[replica]], or add [offload]",
                ("replica",),
            )
        if self.offload is not None and self.host is None:
            raise mistake("does nothing without [host]", "add [host], or remove it", ("offload",))
        if self.storage is not None and self.host is None:
            raise mistake("does nothing without [host]", "add [host], or remove it", ("storage",))
        return self

    @model_validator(mode="after")
    def _check_places(self) -> Self:
        if self.events is not None:
            tables = {"http.listen": self.http, "tcp.listen": self.tcp}
            others = {key: table.address for key, table in tables.items() if table is not None}
            check_endpoints(self.events, self.run_dir, others)
        for location, place in self._chosen_places():
            directory, name = os.path.split(os.path.normpath(place.removeprefix("unix:").removeprefix("ipc://")))
            if directory == os.path.normpath(self.run_dir) and _OWN_FILES.fullmatch(name):
                what = "is a file of the daemon's own in run_dir"
                raise mistake(what, "give the socket another name", location, place)
        return self

    def _chosen_places(self) -> Iterator[tuple[Location, str]]:
        """Where sockets and ports besides the daemon's own are, as written."""
        if self.http is not None:
            yield ("http", "listen"), self.http.listen
        if self.events is not None:
            first, second = self.events.endpoints(self.run_dir)
            yield ("events", "endpoint"), first
            yield ("events", "replay_endpoint"), second

    @model_validator(mode="after")
    def _check_socket_paths(self) -> Self:
        """All that the run directory holds, so that the start finds nothing that this has not."""
        workers = [f"worker-{each.name}-{each.shards - 1}.sock" for each in self.replica]
        events = [] if self.events is None else [EVENTS_SOCKET_NAME, REPLAY_SOCKET_NAME]
        paths = [f"{self.run_dir}/{name}" for name in (ATTACH_SOCKET_NAME, RPC_SOCKET_NAME, *events, *workers)]
        longest = max(paths, key=len)
        if (size_bytes := len(os.fsencode(longest))) > SOCKET_PATH_BYTES_MAX:
            raise mistake(
                f"makes a socket path of {size_bytes} bytes, {SOCKET_PATH_BYTES_MAX} are possible ({longest})",
                "use a shorter run_dir or replica name" if workers else "use a shorter run_dir",
                ("run_dir",),
                str(self.run_dir),
            )
        return self

    @model_validator(mode="after")
    def _check_together(self) -> Self:
        shortest_ms = HEARTBEATS_PER_TTL_MIN * self.heartbeat_interval_ms
        if self.session_ttl_ms < shortest_ms:
            raise mistake(
                f"is less than {HEARTBEATS_PER_TTL_MIN} times heartbeat_interval_ms ({self.heartbeat_interval_ms})",
                f"use {shortest_ms} or more, or a shorter heartbeat_interval_ms",
                ("session_ttl_ms",),
                self.session_ttl_ms,
            )
        names = [replica.name for replica in self.replica]
        for index, name in enumerate(names):
            if name in names[:index]:
                at = ("replica", index, "name")
                raise mistake("names an earlier replica, too", "give each a name of its own", at, name)
        if self.host is None:
            for index, replica in enumerate(self.replica):
                for name in HOST_KEYS:
                    value = getattr(replica, name)
                    if value != ReplicaConfig.model_fields[name].default:
                        at = ("replica", index, name)
                        raise mistake("does nothing without [host]", "add [host], or remove it", at, value)
        else:
            layouts = {replica.name: replica.layout for replica in self.replica}
            check_policies([(replica.name, replica.namespace(0), replica.write_policy) for replica in self.replica])
            namespaces = {replica.namespace(0) for replica in self.replica}
            self.host.check(layouts, namespaces=len(namespaces) + (self.offload is not None))
        return self


def load_config(
    path: Path, *, options: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None
) -> Config:
    """The configuration of a file, the environment over it, the options over both.

    Args:
        path: a TOML file.
        options: values of command-line options by key; these win.
        environment: variables; default: the process's own.

    Raises:
        ConfigError: the file cannot be read, or anything in the three is wrong. Every mistake is in it; only those
            between keys are looked for last, once each key is right by itself.
    """
    text, settings = read_config_file(path)
    overlays = overlay_environment(settings, os.environ if environment is None else environment)
    for key, value in (options or {}).items():
        overlays[key,] = f"option --{key.replace('_', '-')}"
        settings[key] = value
    places = Places(str(path), key_lines(text), overlays, settings)
    try:
        return Config.model_validate(settings, context={"directory": path.parent, "places": places})
    except ValidationError as error:
        raise ConfigError(problems_of(error, Config, places)) from None
