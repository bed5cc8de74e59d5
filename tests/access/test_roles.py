"""Which role may send which request, and who has which role."""

from __future__ import annotations

import grp
import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, get_args

import pytest

from kvcached.cli.main import main
from kvcached.config.access import AccessConfig, EngineAccess
from kvcached.process import user_names
from kvcached.process.access import ROLES_OF_VERB, Access, Role, Users
from kvcached.process.seqpacket import Credentials
from kvcached_client.errors import ErrorCode, Refused
from kvcached_client.protocol.engine import Pin, Request, StorageControl, Unpin, decode_request
from tests.access.grants import SOMEBODY, access_of, grants_of

#: Each verb of the protocol with the roles that may send it. A new verb needs a line here.
ALLOWED: dict[str, frozenset[Role]] = {
    verb: frozenset(roles)
    for roles, verbs in {
        (Role.ENGINE,): (
            "hello", "hello_offload", "rejoin", "declare", "declare_over", "match", "acquire", "allocate", "commit",
            "release", "load", "wait_for_slots", "heartbeat", "bye", "prefetch", "prepare_load", "prepare_store",
            "prepare_stores", "transfer_done", "clear",
        ),
        (Role.LOOK, Role.OPERATE): ("stats", "health", "check", "tree", "inspect", "explain"),
        (Role.OPERATE,): (
            "pause", "resume", "drain", "clear_namespace", "set_weights", "set_policy", "sleep", "wake",
            "storage_control", "set_log_level", "forget",
        ),
        (Role.OPERATE, Role.ENGINE): ("pin", "unpin"),
        tuple(Role): ("describe",),
    }.items()
    for verb in verbs
}  # fmt: skip
_GOLDEN = json.loads((Path(__file__).parents[1] / "protocol/golden.json").read_text())
VERBS: dict[str, Request] = {
    tag: decode_request(bytes.fromhex(parts[0]))
    for name, parts in _GOLDEN.items()
    if (tag := name.partition("-")[0]) in ALLOWED
}
VERBS["storage_control"] = StorageControl(id=1, action="clear")


def called(verb: str) -> str:
    """What messages name: an operator's command, or an engine's verb."""
    if Role.ENGINE in ALLOWED[verb]:
        return verb
    return {"clear_namespace": "clear", "storage_control": "storage"}.get(verb, verb.replace("_", "-"))


def test_what_operators_may_not_do_is_named_as_they_call_it() -> None:
    """A verb that is for operators is refused under the name of its command, which the person has typed."""
    assert {called(verb) for verb, roles in ALLOWED.items() if Role.ENGINE not in roles} <= main.commands.keys()


def test_every_verb_has_roles() -> None:
    """Every request of the protocol has its roles, and this file says which."""
    assert set(ROLES_OF_VERB) == set(get_args(Request))
    assert {each.__struct_config__.tag for each in get_args(Request)} == ALLOWED.keys() == VERBS.keys()


@pytest.mark.parametrize(("verb", "role"), [*product(ALLOWED, Role)])
def test_verb_is_for_its_roles(verb: str, role: Role) -> None:
    """A user with one role may send the verbs of that role, and is told of all others which role and which key."""
    grants = grants_of(role)

    if role in ALLOWED[verb]:
        grants.check(VERBS[verb])
        return
    with pytest.raises(Refused) as caught:
        grants.check(VERBS[verb])
    error = caught.value
    assert error.code is ErrorCode.FORBIDDEN
    assert error.message.startswith(f"{called(verb)} needs the role ")
    assert error.message.endswith(f"and user {SOMEBODY} has {role}")
    key = "access.look" if Role.LOOK in ALLOWED[verb] else "access.operate"
    assert ("[[access.engine]]" if ALLOWED[verb] == {Role.ENGINE} else key) in error.fix


def test_looking_at_storage_changes_nothing() -> None:
    """The status of storage is for lookers, though its other actions are for operators."""
    grants_of(Role.LOOK).check(StorageControl(id=1, action="status"))


def test_own_user_may_do_everything() -> None:
    """The daemon's own user needs no key, and has none taken from it."""
    own = Access.of(AccessConfig(look=())).grants(Credentials(1, os.geteuid(), 0))

    for request in VERBS.values():
        own.check(request)
    own.check_engine("hello")
    own.check_replica("any")
    own.check_namespace("any")
    own.check_known()


def test_root_looks_by_default_and_nobody_else() -> None:
    """Without a table [access] root may look, at a daemon of another user, and everybody else may do nothing."""
    access = replace(Access.of(AccessConfig()), own_uid=10_001)
    root, other = (access.grants(Credentials(1, uid, uid)) for uid in (0, SOMEBODY))

    assert root.roles == {Role.LOOK}
    with pytest.raises(Refused, match=r"user 54321 has no role here; the daemon runs as user 10001") as caught:
        other.check_known()
    assert caught.value.code is ErrorCode.UNAUTHENTICATED
    assert "[access]" in caught.value.fix


@pytest.mark.parametrize(
    ("gid", "groups", "has_role"), [(7, (), True), (1, (5, 7), True), (1, (5,), False)], ids=["own", "further", "none"]
)
def test_group_gives_its_members_the_role(gid: int, groups: tuple[int, ...], *, has_role: bool) -> None:
    """A group's role is that of processes with the group as their first or a supplementary one."""
    access = access_of(Role.OPERATE, user="@7")

    assert access.grants(Credentials(1, SOMEBODY, gid), groups).roles == ({Role.OPERATE} if has_role else set())


def test_names_and_numbers_mean_the_same() -> None:
    """Users and groups may be named or numbered; names that this machine does not know give nobody anything."""
    group = grp.getgrgid(0).gr_name
    named = Access.of(AccessConfig(operate=("root", f"@{group}", "nobody-of-this-name", "@no-group")))

    assert named.operate == Access.of(AccessConfig(operate=("0", "@0"))).operate
    assert named.unknown == {
        "nobody-of-this-name": "is no user of this machine",
        "@no-group": "is no group of this machine",
    }


def test_user_without_a_number_in_the_user_namespace_gets_no_role(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Users and groups that the maps of the user namespace lack, and its user for all unknown ones, are left out."""
    (tmp_path / "uid_map").write_text("1000 1000 1\n65534 165534 1\n")
    (tmp_path / "gid_map").write_text("7 7 1\n")
    monkeypatch.setattr(user_names, "_own", tmp_path)

    access = Access.of(AccessConfig(operate=("1000", "@7", "@8", "65534")))

    assert access.others() == Users(frozenset({1000}), frozenset({7}))
    assert set(access.unknown) == {"root", "@8", "65534"}


def test_engine_is_on_what_it_may_use() -> None:
    """An engine may use what matches a pattern of any of its tables, replicas and namespaces each by their own."""
    tables = [(str(SOMEBODY), ("llama-*",), ("tiny",)), ("@7", ("qwen",), ()), ("999", ("*",), ("*",))]
    engines = [EngineAccess(users=(user,), replicas=one, namespaces=other) for user, one, other in tables]
    grants = Access.of(AccessConfig(engine=tuple(engines))).grants(Credentials(1, SOMEBODY, 1), (7,))

    for allowed in ("llama-3", "qwen"):
        grants.check_replica(allowed)
    for refused in ("mistral", "LLAMA-3", "tiny"):
        with pytest.raises(
            Refused, match=rf"may be an engine on replicas 'llama-\*', 'qwen', not '{refused}'"
        ) as caught:
            grants.check_replica(refused)
        assert caught.value.code is ErrorCode.FORBIDDEN
        assert f"add '{refused}' to replicas of its [[access.engine]]" in caught.value.fix


@pytest.mark.parametrize("verb", [partial(Pin, ttl_ms=1), Unpin], ids=["pin", "unpin"])
def test_engine_pins_what_it_may_use_alone(verb: Callable[..., Pin | Unpin]) -> None:
    """A pin tells what is cached, and holds memory: another replica, label or root is not named, whatever it is called.

    Who operates the daemon, and its own user, pin everywhere.
    """
    engine = EngineAccess(users=(str(SOMEBODY),), replicas=("llama-*",), namespaces=("tiny", "a*", "qwen"))
    config = AccessConfig(engine=(engine,))
    access = Access.of(config, ["llama-3", "qwen"])
    grants = access.grants(Credentials(1, SOMEBODY, 1))
    targets = ("llama-3", "tiny", "qwen", "other", "llama-4", "a1b2c3d4", "abcd")
    requests = {target: verb(id=1, target=target) for target in targets}
    for allowed in ("llama-3", "tiny"):
        grants.check(requests[allowed])
    for refused in ("qwen", "other", "llama-4", "a1b2c3d4", "abcd"):
        with pytest.raises(Refused) as caught:
            grants.check(requests[refused])
        assert caught.value.code is ErrorCode.FORBIDDEN
    everywhere = [access.grants(Credentials(1, os.geteuid(), 1)), replace(grants, roles=frozenset(Role))]
    for request, who in product(requests.values(), everywhere):
        who.check(request)


def test_every_label_of_a_namespace_must_be_allowed() -> None:
    """A namespace that another engine has declared under another label is refused under an allowed one, too."""
    grants = grants_of(Role.ENGINE, namespaces=("tiny", "qwen-*"))

    grants.check_namespace("tiny", "qwen-3")
    with pytest.raises(Refused, match="may be an engine on namespaces 'tiny', 'qwen-\\*', not 'llama'"):
        grants.check_namespace("tiny", "llama")


def test_no_namespace_means_no_host_memory() -> None:
    """An engine without namespaces is refused whatever belongs to offload mode; one with any is not."""
    with pytest.raises(Refused, match="may be an engine on namespaces none"):
        grants_of(Role.ENGINE, namespaces=()).owner_of_pools()
    assert grants_of(Role.ENGINE, replicas=(), namespaces=("tiny",)).owner_of_pools() == f"user {SOMEBODY}"


@pytest.mark.parametrize(
    ("tables", "read_only"),
    [
        ((("a",), True), True),
        ((("a",), False), False),
        ((("a",), True, ("b",), True), True),
        ((("a",), True, ("b",), False), False),
        ((("a",), True, (), False), True),
    ],
)
def test_engine_is_read_only_where_all_its_tables_say_so(tables: tuple[Any, ...], read_only: bool) -> None:
    """One table that lets a user write host memory is enough; a table without namespaces gives none."""
    pairs = zip(tables[::2], tables[1::2], strict=True)
    engines = [
        EngineAccess(users=(str(SOMEBODY),), namespaces=namespaces, read_only=each) for namespaces, each in pairs
    ]
    grants = Access.of(AccessConfig(engine=tuple(engines))).grants(Credentials(1, SOMEBODY, 1))
    assert grants.read_only is read_only


def test_who_is_no_engine_gets_no_memory() -> None:
    """An operator is no engine: it gets neither memory nor a session unless it is named as one, too."""
    with pytest.raises(Refused, match="join needs the role engine, and user 54321 has operate and look"):
        grants_of(Role.OPERATE, Role.LOOK).check_engine("join")
