"""Which user may do what: the roles of whoever connects, by the kernel's word.

The daemon's own user may do everything. Everybody else has the roles that the table ``[access]`` gives. Users are known
by number: names are looked up once, at the start, because a name service may be slow, and anybody can connect.
"""

from __future__ import annotations

import contextlib
import fnmatch
import os
import pwd
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final, NamedTuple

from kvcached.config.access import AccessConfig
from kvcached.process.seqpacket import Credentials
from kvcached.process.user_names import UnknownUser, resolve
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol import engine as wire

#: What could be the first digits of any namespace.
_DIGITS: Final = re.compile(r"[0-9a-f]+")


class Role(StrEnum):
    """What somebody may do; the keys of ``[access]``."""

    OPERATE = "operate"
    LOOK = "look"
    ENGINE = "engine"


_OPERATORS: Final = frozenset({Role.OPERATE})
_LOOKERS: Final = frozenset({Role.OPERATE, Role.LOOK})
_ENGINES: Final = frozenset({Role.ENGINE})
_ALL: Final = frozenset(Role)

#: Who may send a request: any one of these roles suffices. Of `StorageControl` see `roles_for`.
ROLES_OF_VERB: Final[Mapping[type[wire.Header], frozenset[Role]]] = {
    # sessions
    wire.Hello: _ENGINES,
    wire.HelloOffload: _ENGINES,
    wire.Rejoin: _ENGINES,
    wire.Declare: _ENGINES,
    wire.DeclareOver: _ENGINES,
    wire.Heartbeat: _ENGINES,
    wire.Bye: _ENGINES,
    wire.Match: _ENGINES,
    wire.Acquire: _ENGINES,
    wire.Allocate: _ENGINES,
    wire.Commit: _ENGINES,
    wire.Release: _ENGINES,
    wire.Load: _ENGINES,
    wire.WaitForSlots: _ENGINES,
    wire.Prefetch: _ENGINES,
    wire.PrepareLoad: _ENGINES,
    wire.PrepareStore: _ENGINES,
    wire.PrepareStores: _ENGINES,
    wire.TransferDone: _ENGINES,
    wire.Clear: _ENGINES,  # of its own session's namespace
    # of blocks whose keys somebody knows
    wire.Pin: _OPERATORS | _ENGINES,
    wire.Unpin: _OPERATORS | _ENGINES,
    # reports
    wire.Describe: _ALL,  # versions and limits, which every client needs
    wire.Stats: _LOOKERS,
    wire.Health: _LOOKERS,
    wire.Check: _LOOKERS,
    wire.Tree: _LOOKERS,
    wire.Inspect: _LOOKERS,
    wire.Explain: _LOOKERS,
    # changes
    wire.Pause: _OPERATORS,
    wire.Resume: _OPERATORS,
    wire.Drain: _OPERATORS,
    wire.ClearNamespace: _OPERATORS,
    wire.SetWeights: _OPERATORS,
    wire.SetPolicy: _OPERATORS,
    wire.ForgetPrefix: _OPERATORS,
    wire.Sleep: _OPERATORS,
    wire.Wake: _OPERATORS,
    wire.StorageControl: _OPERATORS,
    wire.SetLogLevel: _OPERATORS,
}


#: Commands with another name than their request.
_COMMANDS: Final[Mapping[type[wire.Header], str]] = {wire.ClearNamespace: "clear", wire.StorageControl: "storage"}


def _name_of(request: wire.Header) -> str:
    """What the user has called: an operator a command; an engine's verbs have the names of the protocol."""
    verb = str(type(request).__struct_config__.tag)
    return verb if Role.ENGINE in roles_for(request) else _COMMANDS.get(type(request), verb.replace("_", "-"))


def roles_for(request: wire.Header) -> frozenset[Role]:
    """Any of these roles may send this request."""
    if isinstance(request, wire.StorageControl) and request.action == "status":
        return _LOOKERS
    return ROLES_OF_VERB[type(request)]


@dataclass(frozen=True, slots=True)
class Grants:
    """What the user of one process may do.

    Attributes:
        user: in words, for messages.
        uid: of the user.
        is_own: it is the daemon's own user, who may do everything.
        roles: which roles it has.
        replicas: shell patterns of those that it may use as an engine.
        namespaces: the same of labels of namespaces in offload mode.
        own_user: the daemon's own user in words.
        read_only: it may not write the host pool in offload mode.
        is_remote: it is a key of another machine, at the TCP port.
        all_replicas: the names of the daemon's replicas.
    """

    user: str
    uid: int
    is_own: bool
    roles: frozenset[Role]
    replicas: tuple[str, ...] = ()
    namespaces: tuple[str, ...] = ()
    own_user: str = ""
    read_only: bool = False
    is_remote: bool = False
    all_replicas: frozenset[str] = frozenset()

    def check_known(self) -> None:
        """Refuse a user who has no role.

        Raises:
            Refused: `unauthenticated`.
        """
        if not self.roles:
            raise request_error(
                ErrorCode.UNAUTHENTICATED,
                f"{self.user} has no role here; the daemon runs as {self.own_user}",
                f"run this as {self.own_user}, or name the user in the table [access] of the daemon's configuration",
            )

    def check(self, request: wire.Header) -> None:
        """Refuse a request for which the user lacks the role.

        Raises:
            Refused: `forbidden`.
        """
        if self.is_own:
            return
        if not self.roles & roles_for(request):
            self._refuse(roles_for(request), _name_of(request))
        if isinstance(request, (wire.Pin, wire.Unpin)) and Role.OPERATE not in self.roles:
            self._check_target(request.target)

    def check_engine(self, what: str) -> None:
        """Refuse a user who is no engine.

        Raises:
            Refused: `forbidden`.
        """
        if Role.ENGINE not in self.roles:
            self._refuse(_ENGINES, what)

    def check_replica(self, name: str) -> None:
        """Refuse an engine that may not use a replica.

        Raises:
            Refused: `forbidden`.
        """
        self._check_name("replicas", self.replicas, name)

    def check_namespace(self, *labels: str) -> None:
        """Refuse an engine that may not use a namespace in offload mode; each of its labels must be allowed.

        Raises:
            Refused: `forbidden`.
        """
        for label in labels:
            self._check_name("namespaces", self.namespaces, label)

    def _check_target(self, name: str) -> None:
        """Refuse a name that means, or may mean, a namespace which an engine may not use.

        Raises:
            Refused: `forbidden`. Digits of a namespace are refused, too: they may be those of any.
        """
        if name in self.all_replicas:
            self.check_replica(name)
        elif _DIGITS.fullmatch(name):
            raise request_error(
                ErrorCode.FORBIDDEN,
                f"{self.user} may not name a namespace by its digits",
                "give the name of a replica, or the label of a namespace",
            )
        else:
            self.check_namespace(name)

    def owner_of_pools(self) -> str:
        """Whose the memory is that is kept for engines in offload mode; empty for the daemon's own user.

        Raises:
            Refused: `forbidden`: the engine may use no namespace in offload mode.
        """
        if not self.namespaces:
            self._check_name("namespaces", self.namespaces, "*")
        return "" if self.is_own else f"user {self.uid}"

    def _check_name(self, key: str, patterns: tuple[str, ...], name: str) -> None:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return
        raise request_error(
            ErrorCode.FORBIDDEN,
            f"{self.user} may be an engine on {key} {', '.join(map(repr, patterns)) or 'none'}, not {name!r}",
            f"add {name!r} to {key} of its [[access.engine]] in the daemon's configuration",
        )

    def _refuse(self, needed: frozenset[Role], what: str) -> None:
        if self.is_remote and needed == _ENGINES:
            raise request_error(
                ErrorCode.FORBIDDEN,
                f"{what} is for engines on the daemon's machine: sessions need its memory and the deaths of its"
                " processes, which only its local sockets pass",
                "run the engine on that machine; over TCP there are reports, and what operators change",
            )
        if self.is_remote:
            raise request_error(
                ErrorCode.FORBIDDEN,
                f"{what} needs the role {_listed(needed, 'or')}, and {self.user} has {_listed(self.roles, 'and')}",
                'write role = "operate" in its [[tcp.client]] of the daemon\'s configuration, or use another key',
            )
        raise request_error(
            ErrorCode.FORBIDDEN,
            f"{what} needs the role {_listed(needed, 'or')}, and {self.user} has {_listed(self.roles, 'and')}",
            f"name the user in {_keys(needed)} of the daemon's configuration, or run this as {self.own_user}",
        )


def _listed(roles: Iterable[Role], last: str) -> str:
    return f" {last} ".join(role for role in Role if role in set(roles)) or "none"


def _keys(needed: frozenset[Role]) -> str:
    names = {Role.OPERATE: "access.operate", Role.LOOK: "access.look", Role.ENGINE: "[[access.engine]]"}
    return names[Role.LOOK if Role.LOOK in needed else next(role for role in Role if role in needed)]


#: Of somebody whose user is not known.
NO_GRANTS: Final = Grants("a user that is not known", -1, is_own=False, roles=frozenset())


@dataclass(frozen=True, slots=True)
class Users:
    """Users and groups by their numbers."""

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()

    def __contains__(self, who: User) -> bool:
        return who.uid in self.uids or not self.gids.isdisjoint(who.gids)


class EngineUsers(NamedTuple):
    """One ``[[access.engine]]``."""

    users: Users
    replicas: tuple[str, ...]
    namespaces: tuple[str, ...]
    read_only: bool


class User(NamedTuple):
    """Who connected: the user, and all groups of the process."""

    uid: int
    gids: frozenset[int]


@dataclass(frozen=True, slots=True)
class Access:
    """Who may do what at one daemon.

    Attributes:
        own_uid: the daemon's own user.
        operate: who may change what the daemon does.
        look: who may read its reports.
        engines: who may be an engine, on which replicas and namespaces.
        names: of users by number, for messages.
        unknown: who was left out, and why: this machine, or this user namespace, does not know them.
        replicas: the names of the daemon's replicas.
    """

    own_uid: int = field(default_factory=os.geteuid)
    operate: Users = Users()
    look: Users = Users()
    engines: tuple[EngineUsers, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    unknown: Mapping[str, str] = field(default_factory=dict)
    replicas: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: AccessConfig, replicas: Iterable[str] = ()) -> Access:
        """What a configuration says of these replicas. Somebody whom this machine does not know gets no role."""
        names: dict[int, str] = {}
        unknown: dict[str, str] = {}

        def users(written: Iterable[str]) -> Users:
            uids: set[int] = set()
            gids: set[int] = set()
            for name in written:
                try:
                    number, is_group = resolve(name)
                except UnknownUser as error:
                    unknown[name] = str(error)
                    continue
                (gids if is_group else uids).add(number)
                if not is_group and not name.isdecimal():
                    names[number] = name
            return Users(frozenset(uids), frozenset(gids))

        own_uid = os.geteuid()
        with contextlib.suppress(KeyError):  # in a container a user need not have a name
            names[own_uid] = pwd.getpwuid(own_uid).pw_name
        return cls(
            own_uid,
            users(config.operate),
            users(config.look),
            tuple(
                EngineUsers(users(each.users), each.replicas, each.namespaces, each.read_only) for each in config.engine
            ),
            names,
            unknown,
            frozenset(replicas),
        )

    def grants(self, credentials: Credentials, groups: Iterable[int] = ()) -> Grants:
        """What the peer of a connection may do, whose supplementary groups are `groups`."""
        uid = credentials.uid
        own_user = self._in_words(self.own_uid)
        if uid == self.own_uid:
            return Grants(own_user, uid, True, _ALL, ("*",), ("*",), own_user)  # noqa: FBT003
        who = User(uid, frozenset((credentials.gid, *groups)))
        tables = [each for each in self.engines if who in each.users]
        has = {Role.OPERATE: who in self.operate, Role.LOOK: who in self.look, Role.ENGINE: bool(tables)}
        return Grants(
            self._in_words(uid),
            uid,
            is_own=False,
            roles=frozenset(role for role in Role if has[role]),
            replicas=tuple(pattern for each in tables for pattern in each.replicas),
            namespaces=tuple(pattern for each in tables for pattern in each.namespaces),
            own_user=own_user,
            read_only=all(each.read_only for each in tables if each.namespaces),
            all_replicas=self.replicas,
        )

    def of_reports(self) -> Access:
        """The same where there is nothing but reports: engines have no business there."""
        return replace(self, engines=())

    def others(self) -> Users:
        """Everybody beside the daemon's own user who has any role."""
        every = [self.operate, self.look, *(each.users for each in self.engines)]
        uids = frozenset(uid for users in every for uid in users.uids) - {self.own_uid}
        return Users(uids, frozenset(gid for users in every for gid in users.gids))

    def _in_words(self, uid: int) -> str:
        name = self.names.get(uid)
        return f"user {uid}" if name is None else f"user {name} ({uid})"
