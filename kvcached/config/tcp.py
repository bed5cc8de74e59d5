"""The table of a configuration that opens a TCP port: where, the daemon's key, and the keys that are let in."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field
from pydantic.functional_validators import AfterValidator

from kvcached.config.base_table import Table
from kvcached.config.problems import mistake
from kvcached.config.tables import FileBeside, TcpAddress, parse_address
from kvcached_client.protocol.key_files import key_of

#: People, dashboards and routers of one node.
CLIENTS_MAX: Final = 256
_LISTEN_FIX: Final = 'give "ADDRESS:PORT", as "10.0.0.5:9420", or "[::]:9420" for all addresses'


def _check_listen(listen: str) -> str:
    parse_address(listen, _LISTEN_FIX)
    return listen


def _check_key(text: str) -> str:
    try:
        key_of(text)
    except ValueError:
        raise mistake("is no public key", "copy it from `kvcached keys show FILE`: 40 characters") from None
    return text


class TcpClient(Table):
    """``[[tcp.client]]``: a key that is let in, and what it may do."""

    name: str = Field(min_length=1, max_length=64, description="Whose key it is, for the log and for messages.")
    public_key: Annotated[str, AfterValidator(_check_key)] = Field(
        max_length=64, description="As `kvcached keys show` prints it on that client's machine."
    )
    role: Literal["operate", "look"] = Field(description="What it may do, as users of `[access]` with this role.")


def _all_different(clients: tuple[TcpClient, ...]) -> tuple[TcpClient, ...]:
    if len(clients) > CLIENTS_MAX:
        raise mistake(f"there are {len(clients)} clients", f"name {CLIENTS_MAX} at most, each as [[tcp.client]]")
    for key in ("name", "public_key"):
        values = [getattr(client, key) for client in clients]
        for index, value in enumerate(values):
            if value in values[:index]:
                at = ("tcp", "client", index, key)
                raise mistake("is an earlier client's, too", "give each client a name and a key of its own", at, value)
    return clients


class TcpConfig(Table):
    """``[tcp]``: reports and operators' commands for other machines, by CURVE. Without the table nothing listens."""

    listen: Annotated[str, AfterValidator(_check_listen)] = Field(
        max_length=256,
        description='Where: "ADDRESS:PORT", or "[ADDRESS]:PORT" for IPv6; an address of this machine, or "0.0.0.0" or'
        ' "[::]" for all of them. Needs kvcached-daemon[curve].',
    )
    key_file: FileBeside = Field(
        description="File with the daemon's secret key, which only the daemon's user can read: `kvcached keys make`. A"
        " relative path starts at this file's directory."
    )
    client: Annotated[tuple[TcpClient, ...], AfterValidator(_all_different)] = Field(
        strict=False, min_length=1, description="The keys that are let in. There is no port without any."
    )

    @property
    def address(self) -> TcpAddress:
        """Where it listens."""
        return parse_address(self.listen, _LISTEN_FIX)[0]
