"""Settings of the backend `redis`, and where the server is."""

from __future__ import annotations

from typing import Annotated, Final, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

from kvcached.config.problems import mistake
from kvcached.storage.settings import AbsolutePath

_PORT: Final = 6379
#: No server has more than 2^31 databases.
_DATABASE_DIGITS_MAX: Final = 9
_SCHEMES: Final = ("redis", "rediss", "unix")


class Server(NamedTuple):
    """Where a server is: a host and a port, or the path of a socket."""

    host: str
    port: int
    path: str
    database: int
    is_encrypted: bool

    def __str__(self) -> str:
        """For messages; without what a url may hold beside it."""
        return self.path or f"{self.host}:{self.port}"


def _no_server(what: str, fix: str) -> PydanticCustomError:
    return mistake(what, fix, is_secret=True)  # the url may hold a password


def server_of(url: str) -> Server:
    """The server that a url names.

    Raises:
        PydanticCustomError: it names none, or holds what other settings are for. The message does not repeat it.
    """
    try:
        parts = urlsplit(url)
        port = _PORT if parts.port is None else parts.port
    except ValueError:
        raise _no_server("is no url", "write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH") from None
    if parts.scheme not in _SCHEMES:
        raise _no_server("is no url of a server", "write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH")
    if "@" in parts.netloc:
        raise _no_server("has a user or a password", "name the user in username, and a file in password_file")
    if parts.query or parts.fragment:
        raise _no_server("has more than a server and the number of a database", "leave out what begins with ? or #")
    if parts.scheme == "unix":
        if parts.netloc or not parts.path.strip("/"):
            raise _no_server("has no absolute path of a socket", "write unix:///PATH")
        return Server("", 0, parts.path, 0, is_encrypted=False)
    if not parts.hostname:
        raise _no_server("names no host", f"write {parts.scheme}://HOST:PORT")
    if port == 0:
        raise _no_server("has the port 0, which no server has", f"write {parts.scheme}://HOST:PORT")
    database = parts.path.strip("/") or "0"
    if not database.isascii() or not database.isdigit() or len(database) > _DATABASE_DIGITS_MAX:
        raise _no_server("has a path that is no number of a database", f"write {parts.scheme}://HOST:PORT")
    return Server(parts.hostname, port, "", int(database), is_encrypted=parts.scheme == "rediss")


def _named(url: str) -> str:
    server_of(url)
    return url


class RedisSettings(BaseModel):
    """Settings of one server, which any number of daemons use."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    url: Annotated[str, AfterValidator(_named)] = Field(
        description="redis://HOST:PORT, rediss://HOST:PORT (TLS) or unix:///PATH; of TCP also /NUMBER of a database."
    )
    password_file: AbsolutePath | None = Field(
        default=None,
        description="A file with the password; only its owner may have read permission. Read at each connection.",
    )
    username: str | None = Field(
        default=None, min_length=1, max_length=256, description="The user of the password; without it, the default one."
    )
    ca_file: AbsolutePath | None = Field(
        default=None,
        description="Certificates in PEM that the server's may be signed by, beside those that the system trusts.",
    )
    certificate_file: AbsolutePath | None = Field(
        default=None, description="The certificate in PEM that the daemon shows to the server."
    )
    key_file: AbsolutePath | None = Field(
        default=None,
        description="The key of certificate_file in PEM, not encrypted; only its owner may have read permission.",
    )
    prefix: str = Field(
        default="kvcached",
        pattern=r"^[A-Za-z0-9._:-]{1,64}$",
        description="What all keys begin with. Daemons with the same prefix share blocks.",
    )
    ttl_s: int | None = Field(
        default=None,
        strict=True,
        ge=1,
        le=10 * 365 * 86_400,
        description="Blocks expire this many seconds after being stored.",
    )
    threads: int = Field(
        default=4, strict=True, ge=1, le=64, description="Concurrent reads and writes, each by its own connection."
    )

    @field_validator("username")
    @classmethod
    def _has_password(cls, username: str | None, known: ValidationInfo) -> str | None:
        if username is not None and known.data.get("password_file", "") is None:
            raise mistake("has no password", "name its file in password_file")
        return username

    @field_validator("ca_file", "certificate_file", "key_file")
    @classmethod
    def _has_tls(cls, path: AbsolutePath | None, known: ValidationInfo) -> AbsolutePath | None:
        url = known.data.get("url")
        if path is not None and url is not None and not server_of(url).is_encrypted:
            raise mistake("has no effect without TLS", "begin url with rediss://, or leave it out")
        return path

    @field_validator("key_file")
    @classmethod
    def _has_certificate(cls, path: AbsolutePath | None, known: ValidationInfo) -> AbsolutePath | None:
        if path is not None and known.data.get("certificate_file", "") is None:
            raise mistake("has no certificate", "name its file in certificate_file")
        return path

    @property
    def server(self) -> Server:
        """Where it is."""
        return server_of(self.url)
