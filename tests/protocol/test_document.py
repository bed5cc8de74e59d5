"""docs/protocol.md says what the code does: every verb, field, default, code and limit, and nothing else."""

from __future__ import annotations

import json
import re
import resource
from typing import get_args

import msgspec
import pytest

from kvcached.server import attach, connections, held, local, tcp
from kvcached.server.connections import ConnectionLimits
from kvcached_client.blocks import layout
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import attach as attach_protocol
from kvcached_client.protocol import engine as protocol
from tests.project.source_tree import ROOT

DOCUMENT = (ROOT / "docs" / "protocol.md").read_text()

MESSAGES: dict[str, type[msgspec.Struct]] = {
    kind.__struct_config__.tag: kind
    for union in (protocol.Request, protocol.Reply, attach_protocol.AttachRequest, attach_protocol.AttachReply)
    for kind in get_args(union)
}
NESTED: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind
    for kind in (
        layout.Layout,
        layout.KvGroup,
        protocol.LoadTicket,
        protocol.StoreOffer,
        protocol.StoreOutcome,
        protocol.PoolStats,
        protocol.HostRegistration,
        protocol.HitEstimate,
        protocol.HostStats,
        protocol.TenantStats,
        protocol.EnginePoolStats,
        protocol.HealthPart,
        protocol.LocalDisk,
        protocol.ReplicaInfo,
        protocol.TreeNode,
        protocol.BlockPlace,
        protocol.Explanation,
        protocol.OffloadInfo,
    )
}
STRUCTS = {**MESSAGES, **NESTED}
LIMITS = [
    name
    for name in vars(protocol)
    if name.endswith("_MAX") and name.isupper() and not name.startswith("PROTOCOL_VERSION")
] + ["KNOWN_BLOCKS_MIN", "TOKEN_SIZE_BYTES", "PROGRESS_SLOTS"]


def sections() -> dict[str, str]:
    """The text under each heading that is a name in backticks."""
    parts = re.split(r"^#{2,4} (.+)$", DOCUMENT, flags=re.MULTILINE)
    return {
        title.strip("`"): text for title, text in zip(parts[1::2], parts[2::2], strict=True) if title.startswith("`")
    }


def rows(text: str) -> list[list[str]]:
    """Cells of the table rows whose first cell is a name in backticks."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def test_document_has_a_section_for_every_message() -> None:
    """Each request, reply, attach message and nested map has its section, and no section is left over."""
    assert sections().keys() == STRUCTS.keys()


def default_of(field: msgspec.structs.FieldInfo) -> object:
    """What a field is where a message leaves it out."""
    return field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()


@pytest.mark.parametrize("name", STRUCTS)
def test_document_lists_every_field_with_its_default(name: str) -> None:
    """A section's table has the message's fields, and a default exactly where the code has the same one."""
    told = {}
    for field, kind, meaning in rows(sections()[name]):
        _, _, default = kind.partition(" = ")
        told[field.strip("`")] = json.loads(default) if default else None
        assert meaning
    actual = {
        field.encode_name: None if field.required else msgspec.to_builtins(default_of(field))
        for field in msgspec.structs.fields(STRUCTS[name])
    }
    assert told == {field: [] if default == () else default for field, default in actual.items()}


@pytest.mark.parametrize("name", [tag for tag, kind in MESSAGES.items() if kind in get_args(protocol.Request)])
def test_document_links_every_request_to_its_reply(name: str) -> None:
    """Each request's section says which reply answers it."""
    (reply,) = re.findall(r"Reply:\s+\[`(\w+)`\]\(#\1\)", sections()[name])
    assert MESSAGES[reply] in get_args(protocol.Reply)


def test_document_lists_every_error_code_with_its_fault() -> None:
    """The table of errors has every code, with the fault that the code's exception has."""
    table = DOCUMENT.split("\n## Errors\n")[1].split("\n## ")[0]
    told = {code.strip("`"): fault for code, fault, meaning, todo in rows(table) if meaning and todo}
    assert told == {code.value: request_error(code, "", "").fault.value for code in ErrorCode}


def test_document_lists_every_limit_with_its_value() -> None:
    """The table of limits has the constants of the code, with their values."""
    table = DOCUMENT.split("\n## Limits\n")[1].split("\n## ")[0]
    told = {name.strip("`"): int(value) for name, value, _ in rows(table)}
    limits = {name: getattr(protocol, name) for name in LIMITS}
    limits["ATTACH_MESSAGE_SIZE_BYTES_MAX"] = attach_protocol.ATTACH_MESSAGE_SIZE_BYTES_MAX
    assert told == limits


def test_document_tells_what_connections_may_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The numbers of the text on peers are those that the sockets have where files are plenty."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 20, 1 << 20))
    rpc, door = (ConnectionLimits.within(each.CONNECTIONS_MAX, 0.25) for each in (local, attach))
    port = ConnectionLimits.within(tcp.CONNECTIONS_MAX, tcp.DESCRIPTORS_SHARE)
    half_open_s, held_mib = connections.HALF_OPEN_S_MAX, held.HELD_BYTES_MAX >> 20

    for told in (
        f"It has {half_open_s:g} s for that. A socket keeps {connections.HALF_OPEN_MAX} half-open",
        f"up to {rpc.per_process} connections to the RPC socket and {door.per_process} to the attach socket",
        f"and all processes together {rpc.connections} and {door.connections}.",
        f"It may have {attach.USER_PEERS_MAX} processes attached.",
        f"At the TCP port there are {port.connections} places",
        f"more than\n  {held_mib} MiB together",
        f"count as those of one process, and have {held.USER_HELD_BYTES_MAX >> 20} MiB.",
    ):
        assert told in DOCUMENT, told
    assert (rpc.per_user, rpc.reserved) == (rpc.connections // 4, rpc.connections // 8)
    assert {each.half_open for each in (rpc, door, port)} == {connections.HALF_OPEN_MAX}
    threats = (ROOT / "SECURITY.md").read_text()
    assert f"half-open connections have {half_open_s:g} s and {connections.HALF_OPEN_MAX} places" in threats


def test_document_links_lead_somewhere() -> None:
    """Every link inside the page has its heading."""
    headings = {
        re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        for title in re.findall(r"^#+ (.+)$", DOCUMENT, flags=re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", DOCUMENT)) <= headings


def test_document_names_the_current_version() -> None:
    """The page is about the version that the code speaks."""
    assert f"This page is version **{protocol.PROTOCOL_VERSION}**" in DOCUMENT
