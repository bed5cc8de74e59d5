"""What a configuration asks of this machine: memory, users, storage and its disk, a key file, optional packages.

`kvcached check-config` and `kvcached serve` look at the same things, before anything is started. What only the moment
decides, such as memory that others take just now, `check-config` looks at, and `serve` looks at when it takes it.
"""

from __future__ import annotations

import importlib.util
import os
import resource
import shlex
from collections.abc import Iterator, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final, NamedTuple

from pydantic import BaseModel, ByteSize, ValidationError

from kvcached.config.problems import ConfigError, Location, Places, Problem, problems_of
from kvcached.config.schema import Config
from kvcached.config.tables import HostConfig
from kvcached.process.user_names import UnknownUser, resolve
from kvcached.recovery.fd_store import KEPT_MAX
from kvcached.recovery.run_dir import RunDirUnusable, check_run_dir, is_claimed, is_made_by_manager
from kvcached.recovery.state_file import LEDGER_NAME, read_ledger
from kvcached.server.attach import DESCRIPTORS_SHARE
from kvcached.server.connections import limit_needed
from kvcached.storage.backend import DISK, GROUP, StorageUnusable
from kvcached.storage.disk.directory import CAPACITY_BYTES_MIN, DiskSettings, existing_part, refusal
from kvcached.storage.encryption.backend import read_secret
from kvcached.storage.redis.settings import RedisSettings
from kvcached.storage.s3.settings import S3Settings
from kvcached.worker.messages import DESCRIPTORS_MAX
from kvcached_client.doctor.memory_bounds import memory_bounds
from kvcached_client.errors import RequestError
from kvcached_client.protocol.key_files import read_key_file
from kvcached_client.transport.run_dir import RUN_DIR_VARIABLE

_STORAGE: Final = "storage"
_SETTINGS: Final[Location] = (_STORAGE, "settings")
_LOCAL_DISK: Final[Location] = (_STORAGE, "local_disk")
#: Settings of backends of this distribution that are all there is to look at: a service is not asked here.
_SCHEMAS: Final[dict[str, type[BaseModel]]] = {"redis": RedisSettings, "s3": S3Settings}
_SMALLER: Final = "use a smaller size, or raise the limit"
#: What the extra `metrics` brings.
_HTTP_PACKAGES: Final = ("prometheus_client", "h11")


def check_machine(
    config: Config, *, is_trial: bool = False, is_restart: bool = False, is_next: bool = False, predecessor: int = 0
) -> None:
    """Refuse a configuration that this machine cannot serve.

    Args:
        config: right by itself, as `load_config` has found.
        is_trial: nothing is going to be started: memory that others take just now counts, too.
        is_restart: a host pool full of blocks waits for this daemon. A disk, a key file or a package that is away now
            is no reason to lose it: only what no restart can mend is looked at.
        is_next: this daemon is to be started in place of one that still runs, whose pools count as free memory.
        predecessor: the process of that one, which will have unlocked its run directory by then; 0 if not known.

    Raises:
        ConfigError: every reason why not.
    """
    problems = [*_memory(config, is_trial=is_trial), *_storage(config, is_restart=is_restart)]
    if is_trial or is_next:  # what the start itself finds out at its first steps
        problems += [*_limits(config), *_run_dir(config, predecessor, is_next=is_next)]
    if is_next and not problems:
        problems += _next_host(config)
    if not is_restart:  # a name service that is away now costs users their access, and not everybody the blocks
        problems += [*_cuda(config), *_http(config), *_tcp(config), *_access(config)]
    if problems:
        raise ConfigError(problems)


def warnings_of(config: Config) -> Iterator[str]:
    """What the service manager decides, so that it is no reason to refuse a configuration.

    A unit may keep more parts of pools than usual, and a daemon without a manager keeps nothing.
    """
    parts = int(config.host is not None) + sum(replica.shards + 1 for replica in config.replica)  # 1: the headers
    if parts > KEPT_MAX:
        what = f"the pools have {parts} parts, of which `kvcached supervise` or the unit keeps {KEPT_MAX} for a restart"
        fix = "configure fewer shards, or under systemd a larger FileDescriptorStoreMax="
        yield f"{what}: the blocks of the others are lost then; {fix}"
    if is_made_by_manager(config.run_dir):
        what = f"run directory {config.run_dir} is not there, and user {os.geteuid()} cannot make it"
        yield f"{what}; leave that to RuntimeDirectory= of the unit, or make it as root, and give it to this user"
    elif _is_run_dir_anothers(config):
        try:
            check_run_dir(config.run_dir)
        except RunDirUnusable as error:
            what, _, fix = str(error).rpartition("; ")
            yield f"{what}, so that a daemon of this user and environment does not start there; {fix}"


def memory_needed(config: Config) -> tuple[int, str]:
    """Bytes of all pools, and whose they are, in words."""
    replicas = [replica.host_memory_bytes for replica in config.replica if replica.device == "cpu"]
    names = [f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}"] if replicas else []
    host_bytes = 0
    if config.host is not None:
        names.append("the host pool")
        host_bytes = config.host.slabs * config.host.slab_bytes
    return sum(replicas) + host_bytes, " and ".join(names)


def _memory(config: Config, *, is_trial: bool) -> Iterator[Problem]:
    """Not more than the machine or the cgroup has; in a trial, not more than is left, unless a daemon has its own."""
    needed, names = memory_needed(config)
    bounds = memory_bounds()
    total = min(bounds, key=lambda bound: bound.limit_bytes, default=None)
    left = min(bounds, key=lambda bound: bound.available_bytes, default=None)
    if total is not None and needed > total.limit_bytes:
        has = f"{_size(total.limit_bytes)} in all ({total.source})"
    elif is_trial and left is not None and needed > left.available_bytes and not is_claimed(config.run_dir):
        has = f"{_size(max(0, left.available_bytes))} left ({left.source})"
    else:
        return
    location, value = _largest(config)
    yield config.places.problem(
        location,
        value,
        f"the memory of {names} comes to {_size(needed)}, and there are {has}",
        _SMALLER,
    )


def _next_host(config: Config) -> Iterator[Problem]:
    """Not a host pool for which there is no room: a new one even without any pool of now, of a kept one what is added.

    The start would refuse it.
    """
    if config.host is None:
        return
    ledger = read_ledger(config.run_dir / LEDGER_NAME)
    kept = None if ledger is None else ledger.host
    is_kept = kept is not None and kept.slab_bytes == config.host.slab_bytes
    new_slabs = config.host.slabs - (kept.slabs if kept is not None and is_kept else 0)
    size_bytes = max(0, new_slabs) * config.host.slab_bytes
    rooms = ((each.available_beside(0 if is_kept else size_bytes), each.source) for each in memory_bounds())
    room_bytes, source = min(rooms, default=(size_bytes, ""))
    if size_bytes and size_bytes > room_bytes:
        words = "what the host pool is to get comes to" if is_kept else "the memory of the host pool comes to"
        room = f"{_size(max(0, room_bytes))} left {'beside it' if is_kept else 'without the pools of now'} ({source})"
        what = f"{words} {_size(size_bytes)}, and there are {room}"
        yield config.places.problem(*_host_size(config.host), what, _SMALLER)


def _limits(config: Config) -> Iterator[Problem]:
    """No limit of this process that is too low for what is configured."""
    for limit in _needed_limits(config):
        if (what := limit.refusal()) is not None:
            yield config.places.problem(*limit.asked_by, *what)


def _run_dir(config: Config, predecessor: int, *, is_next: bool) -> Iterator[Problem]:
    """Not a run directory that the start would refuse. One that nobody wrote may be another one in another shell."""
    run_dir = config.run_dir
    if not is_next and (_is_run_dir_anothers(config) or is_made_by_manager(run_dir)):
        return  # `warnings_of` tells it
    try:
        check_run_dir(run_dir, predecessor)
    except RunDirUnusable as error:
        what, _, fix = str(error).rpartition("; ")
        yield config.places.problem(("run_dir",), str(run_dir), what, fix)


def _is_run_dir_anothers(config: Config) -> bool:
    """Whether the daemon may have another one, or it may be of the daemon's user: what is wrong is a warning then."""
    return not _is_run_dir_written(config) or _is_of_service(config.run_dir)


def _is_run_dir_written(config: Config) -> bool:
    """Not by the variable, either: shells set it for engines, and the daemon's environment may have another one."""
    is_of_shell = config.places.source(("run_dir",)) == f"environment {RUN_DIR_VARIABLE}"
    return "run_dir" in config.model_fields_set and not is_of_shell


def _is_of_service(run_dir: Path) -> bool:
    """Whether root looks at what is another user's; not where even root may not look, which the start would tell."""
    try:
        return os.geteuid() == 0 and run_dir.stat().st_uid != 0
    except OSError:
        return False


def _largest(config: Config) -> tuple[Location, object]:
    """The key that asks for most memory."""
    found: list[tuple[int, Location, object]] = []
    for number, replica in enumerate(config.replica):
        key = "pool_bytes" if replica.slots is None else "slots"
        found.append((replica.host_memory_bytes, ("replica", number, key), getattr(replica, key)))
    if config.host is not None:
        found.append((config.host.slabs * config.host.slab_bytes, *_host_size(config.host)))
    _, location, value = max(found, key=lambda each: each[0])
    return location, value


def _host_size(host: HostConfig) -> tuple[Location, object]:
    """The key that says how large the host pool is."""
    key = "memory_percent" if host.size_bytes is None else "size_bytes"
    return ("host", key), getattr(host, key)


def _storage(config: Config, *, is_restart: bool) -> Iterator[Problem]:
    if config.storage is None:
        return
    places, storage = config.places, config.storage
    installed = sorted(entry_points(group=GROUP).names)
    if storage.backend not in installed:
        what = f"there is no such backend; installed: {', '.join(installed) or 'none'}"
        fix = "name one of these, or install the package that brings it"
        yield places.problem((_STORAGE, "backend"), storage.backend, what, fix)
    elif storage.backend == DISK:
        yield from _disk(places, storage.settings, _SETTINGS, is_restart=is_restart)
    elif (schema := _SCHEMAS.get(storage.backend)) is not None:
        yield from _mistakes(config, schema)
    if storage.local_disk is not None and storage.backend == DISK:
        fix = "remove [storage.local_disk], or name another backend"
        yield places.problem((_STORAGE, "backend"), DISK, "has no use for a disk in front of it", fix)
    elif storage.local_disk is not None:
        yield from _disk(places, storage.local_disk, _LOCAL_DISK, is_restart=is_restart)
    if storage.key_file is not None and not is_restart:
        yield from _key_file(config, storage.key_file)


def _mistakes(config: Config, schema: type[BaseModel]) -> Iterator[Problem]:
    try:
        schema.model_validate({} if config.storage is None else config.storage.settings)
    except ValidationError as error:
        yield from problems_of(error, schema, config.places, _SETTINGS)


def _disk(places: Places, table: Mapping[str, Any], at: Location, *, is_restart: bool) -> Iterator[Problem]:
    try:
        settings = DiskSettings.model_validate(table)
    except ValidationError as error:
        yield from problems_of(error, DiskSettings, places, at)
        return
    if is_restart:
        return
    if (refused := refusal(settings.directory)) is not None:
        yield places.problem((*at, "directory"), str(settings.directory), *refused)
        return
    system = os.statvfs(existing_part(settings.directory))
    disk_bytes, floor_bytes = system.f_frsize * system.f_blocks, settings.free_space_floor_bytes
    if settings.capacity_bytes > disk_bytes:
        what = f"is more than the whole file system of {settings.directory} has ({_size(disk_bytes)})"
        yield places.problem((*at, "capacity_bytes"), settings.capacity_bytes, what, "use a smaller capacity")
    # Where floor and capacity together are too much, blocks are evicted sooner. This is about none being stored, ever.
    elif floor_bytes + CAPACITY_BYTES_MIN > disk_bytes:
        what = f"leaves no room on the whole file system of {settings.directory} ({_size(disk_bytes)})"
        fix = "use a smaller floor, or a directory on a larger file system"
        yield places.problem((*at, "free_space_floor_bytes"), floor_bytes, what, fix)


def _key_file(config: Config, path: Path) -> Iterator[Problem]:
    at, value = (_STORAGE, "key_file"), str(path)
    if importlib.util.find_spec("cryptography") is None:
        what, fix = "needs the package cryptography", "pip install cryptography"
        yield config.places.problem(at, value, what, fix)
    try:
        read_secret(path)
    except StorageUnusable as error:
        what, _, fix = str(error).removeprefix("encryption: ").partition("; ")
        yield _without_secret(config, at, value, what, fix)


def _without_secret(config: Config, at: Location, value: str, what: str, fix: str) -> Problem:
    """A problem with a file of a secret: where its name may be the secret itself, the words have none, either."""
    if config.places.may_be_secret(at, value):
        for name in (shlex.quote(value), value):
            what, fix = what.replace(name, "FILE"), fix.replace(name, "FILE")
        fix += "; what is written there is not repeated, in case it is the secret itself"
    return config.places.problem(at, value, what, fix)


def _cuda(config: Config) -> Iterator[Problem]:
    """The package that workers reach devices by; they run in this interpreter, too."""
    if importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None:
        return
    for number, replica in enumerate(config.replica):
        if replica.device == "cuda":
            what, fix = "needs the package cuda-bindings", "pip install cuda-bindings"
            yield config.places.problem(("replica", number, "device"), replica.device, what, fix)


def _http(config: Config) -> Iterator[Problem]:
    missing = [package for package in _HTTP_PACKAGES if importlib.util.find_spec(package) is None]
    if config.http is not None and missing:
        what, fix = f"needs the package {missing[0]}", f"pip install {' '.join(missing)}"
        yield config.places.problem(("http", "listen"), config.http.listen, what, fix)


def _tcp(config: Config) -> Iterator[Problem]:
    if config.tcp is None:
        return
    if importlib.util.find_spec("nacl") is None:
        what, fix = "needs the package PyNaCl", "pip install PyNaCl"
        yield config.places.problem(("tcp", "listen"), config.tcp.listen, what, fix)
    try:
        read_key_file(config.tcp.key_file)
    except RequestError as error:
        at, value = ("tcp", "key_file"), str(config.tcp.key_file)
        what = error.message.removeprefix(f"key file {value}").lstrip(": ")
        yield _without_secret(config, at, value, what, error.fix)


def _access(config: Config) -> Iterator[Problem]:
    """Whom the configuration names. Defaults that nobody wrote are no mistake of it: the daemon leaves them out."""
    access = config.access
    lists: list[tuple[Location, tuple[str, ...]]] = [
        *((("access", key), getattr(access, key)) for key in ("operate", "look") if key in access.model_fields_set),
        *((("access", "engine", number, "users"), each.users) for number, each in enumerate(access.engine)),
    ]
    for location, names in lists:
        for name in names:
            try:
                resolve(name)
            except UnknownUser as error:
                yield config.places.problem(location, list(names), f"{name!r} {error}", error.fix)


def _size(size_bytes: int) -> str:
    return ByteSize(size_bytes).human_readable()


#: Of the daemon without workers and engines: sockets, event loop, files, the storage process.
_DESCRIPTORS_MIN: Final = 32
#: Of one shard: its memory and its page, its worker and its connection. A start takes some of the reserve for a moment.
_DESCRIPTORS_PER_WORKER: Final = DESCRIPTORS_MAX + 3
#: At the socket that has the smallest share of those that an engine needs. An engine of a node with eight devices has
#: nine processes.
_CONNECTIONS_MIN: Final = 16
#: The ledger, logs, and the lock files.
_FILE_BYTES_MIN: Final = 1 << 20


class LimitTooLow(Exception):
    """The message names the limit, what is needed, and how to raise it."""


class _Limit(NamedTuple):
    """A limit of this process, and what is needed of it.

    Attributes:
        number: the kernel's.
        needed: how much.
        what: it is a limit of, in words.
        how: it is raised.
        asked_by: the key that asks for most of it, and its value.
    """

    number: int
    needed: int
    what: str
    how: str
    asked_by: tuple[Location, object]

    def refusal(self) -> tuple[str, str] | None:
        """Why the hard limit does not suffice, and what to do; None where it does."""
        _, hard = resource.getrlimit(self.number)
        if hard == resource.RLIM_INFINITY or hard >= self.needed:
            return None
        what = f"the limit of {self.what} is {hard}, and this configuration needs {self.needed}"
        return what, f"raise it: {self.how}"


def raise_limits(config: Config) -> None:
    """Raise soft limits to the hard ones: memory files and descriptors are many more than a shell's commands have.

    Raises:
        LimitTooLow: the hard ones do not suffice for what is configured.
    """
    for limit in _needed_limits(config):
        if (refusal := limit.refusal()) is not None:
            raise LimitTooLow("; ".join(refusal))
        _, hard = resource.getrlimit(limit.number)
        resource.setrlimit(limit.number, (hard, hard))


def _needed_limits(config: Config) -> tuple[_Limit, _Limit]:
    own = _DESCRIPTORS_MIN + sum(replica.shards for replica in config.replica) * _DESCRIPTORS_PER_WORKER
    shards = [(("replica", number, "shards"), replica.shards) for number, replica in enumerate(config.replica)]
    pools = [replica.layout.pool_bytes(replica.slot_count) for replica in config.replica]
    host_bytes = 0 if config.host is None else config.host.slabs * config.host.slab_bytes
    return (
        _Limit(
            resource.RLIMIT_NOFILE,
            limit_needed(own, _CONNECTIONS_MIN, DESCRIPTORS_SHARE),
            "open files",
            "ulimit -Hn, or LimitNOFILE= of the unit",
            max(shards, key=lambda each: each[1], default=((), None)),
        ),
        _Limit(
            resource.RLIMIT_FSIZE,
            max([_FILE_BYTES_MIN, host_bytes, *pools]),
            "the size of files",
            "ulimit -Hf, or LimitFSIZE= of the unit",
            _largest(config),
        ),
    )
