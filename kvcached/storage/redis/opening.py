"""Opens the backend `redis`, if packages, settings and server are what it needs."""

from __future__ import annotations

import logging
import ssl
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

from kvcached.storage.backend import Storage, StorageMisconfigured, StorageUnusable
from kvcached.storage.redis.settings import RedisSettings
from kvcached.storage.secret_file import read_private
from kvcached.storage.settings import checked

if TYPE_CHECKING:
    from kvcached.storage.redis.nodes import Nodes

#: What the extra `redis` brings.
PACKAGES: Final = "redis hiredis"

_log: Final = logging.getLogger(__name__)
_TIMEOUT_S: Final = 5.0
#: Scripts that may write where the server has no memory left.
_VERSION_MIN: Final = 7


def open_redis(settings: dict[str, object]) -> Storage:
    """The backend `redis`.

    Raises:
        StorageMisconfigured: a package is missing, settings are wrong, or the server refuses its user.
        StorageUnusable: the server cannot be used now.
    """
    valid = checked(RedisSettings, settings, "redis")
    if missing := [name for name in PACKAGES.split() if find_spec(name) is None]:
        what = f"the backend redis needs the package {missing[0]}"
        raise StorageMisconfigured(f"{what}: pip install {PACKAGES}")
    from kvcached.storage.redis.backend import RedisStorage  # noqa: PLC0415 - needs optional packages
    from kvcached.storage.redis.nodes import Nodes  # noqa: PLC0415 - the same

    _check_certificates(valid)
    nodes = Nodes(valid)
    try:
        _check_server(valid, nodes)
        _check_permissions(valid, nodes)
    except StorageUnusable:
        nodes.close()
        raise
    return RedisStorage(valid, nodes)


def _check_certificates(settings: RedisSettings) -> None:
    """Name the file that is at fault, which the error of a connection does not."""
    if settings.key_file is not None:
        read_private(settings.key_file, "redis storage: key_file")
    for name, path in (("ca_file", settings.ca_file), ("certificate_file", settings.certificate_file)):
        context = ssl.create_default_context()
        try:
            if path is not None and name == "ca_file":
                context.load_verify_locations(cafile=path)
            elif path is not None:
                context.load_cert_chain(path, settings.key_file, password="")
        except OSError as error:  # SSLError is one
            fix = "name a file in PEM that the daemon's user can read"
            raise StorageUnusable(f"redis storage: {name}: {path}: {error.strerror or error}; {fix}") from error


def _check_server(settings: RedisSettings, nodes: Nodes) -> None:
    """Ask the server what it is.

    Raises:
        StorageMisconfigured: it is none that can be used, or refuses its user.
        StorageUnusable: it cannot be reached now, or cannot be written now.
    """
    from redis.exceptions import AuthenticationError, NoPermissionError, RedisError  # noqa: PLC0415 - optional

    where = f"redis storage: {settings.server}"
    try:
        with nodes.first.taken(_TIMEOUT_S) as exchange:
            info = _fields(exchange.ask(b"INFO"))
        is_cluster = info.get("cluster_enabled") == "1"
        if is_cluster and settings.server.path:
            raise StorageMisconfigured(f"{where} is a node of a cluster; name a host and a port in url")
        if is_cluster:
            nodes.spread(time.monotonic() + _TIMEOUT_S)
    except AuthenticationError as error:
        fix = "set username and password_file as the server has them"
        raise StorageMisconfigured(f"{where} refuses the user: {error}; {fix}") from error
    except NoPermissionError as error:
        raise StorageMisconfigured(f"{where}: {error}; give the user the permissions in docs/storage.md") from error
    except (RedisError, OSError) as error:
        if "DB index" in str(error):
            raise StorageMisconfigured(f"{where}: {error}; name a database that it has in url") from error
        raise StorageUnusable(f"{where}: {_said(error)}; start the server, or name another one in url") from error
    if int(info.get("redis_version", "").partition(".")[0] or _VERSION_MIN) < _VERSION_MIN:
        raise StorageMisconfigured(f"{where} is too old; use Valkey, or Redis {_VERSION_MIN} or newer")
    if info.get("role") == "slave" and not is_cluster:
        raise StorageUnusable(f"{where} is a replica, which may not be written; name the primary in url")
    if info.get("maxmemory_policy") == "allkeys-random":
        _log.warning("%s may evict the record of generations: set maxmemory-policy to allkeys-lru", where)


def _check_permissions(settings: RedisSettings, nodes: Nodes) -> None:
    """Use each command once. Whatever else a server answers, it is no matter of permissions: that it is full, say.

    Raises:
        StorageMisconfigured: the user may not use one.
        StorageUnusable: a server cannot be reached now.
    """
    from redis.exceptions import NoPermissionError  # noqa: PLC0415 - needs optional packages

    from kvcached.storage.redis.backend import uses_of  # noqa: PLC0415 - the same
    from kvcached.storage.redis.connections import UNREACHABLE  # noqa: PLC0415 - the same

    commands = uses_of(settings)
    where = f"redis storage: {settings.server}"
    try:
        until_s = time.monotonic() + _TIMEOUT_S
        for server in nodes.all(until_s):
            where = f"redis storage: {server.server}"
            with server.taken(_TIMEOUT_S, until_s) as exchange:
                exchange.send(commands)
                replies = [exchange.read() for _ in commands]
            for (name, *_), reply in zip(commands, replies, strict=True):
                if isinstance(reply, NoPermissionError):
                    fix = "give the user all that the line ACL SETUSER in docs/storage.md has, with this prefix"
                    raise StorageMisconfigured(f"{where} refuses {name.decode()}: {reply}; {fix}")
    except UNREACHABLE as error:
        if isinstance(error, StorageUnusable):
            raise
        raise StorageUnusable(f"{where}: {_said(error)}; start the server, or name another one in url") from error


def _fields(info: bytes) -> dict[str, str]:
    from kvcached.storage.redis.fullness import fields_of  # noqa: PLC0415 - needs optional packages

    return fields_of(info)


def _said(error: Exception) -> str:
    """What a library says, as a part of a sentence."""
    return str(error).rstrip(".")
