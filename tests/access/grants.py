"""What users may do, for tests."""

from __future__ import annotations

import os
from collections.abc import Iterable

from kvcached.config.access import AccessConfig, EngineAccess
from kvcached.process.access import Access, Grants, Role
from kvcached.process.seqpacket import Credentials

#: The daemon's own user.
OWN: Grants = Access().grants(Credentials(os.getpid(), os.geteuid(), os.getegid()))
#: Some user who is neither root nor the one that runs the tests.
SOMEBODY = 54_321


def access_of(
    *roles: Role,
    replicas: Iterable[str] = ("*",),
    namespaces: Iterable[str] = ("*",),
    user: str = str(SOMEBODY),
    read_only: bool = False,
) -> Access:
    """A user has these roles, at a daemon of whoever runs the test."""
    users = (user,)
    engine = EngineAccess(users=users, replicas=tuple(replicas), namespaces=tuple(namespaces), read_only=read_only)
    return Access.of(
        AccessConfig(
            operate=users if Role.OPERATE in roles else (),
            look=users if Role.LOOK in roles else (),
            engine=(engine,) if Role.ENGINE in roles else (),
        )
    )


def grants_of(*roles: Role, replicas: Iterable[str] = ("*",), namespaces: Iterable[str] = ("*",)) -> Grants:
    """What a user with these roles may do."""
    return access_of(*roles, replicas=replicas, namespaces=namespaces).grants(Credentials(1, SOMEBODY, SOMEBODY))
