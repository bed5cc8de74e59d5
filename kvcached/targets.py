"""What people mean when they name a replica or a namespace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kvcached.core.cache import Cache
from kvcached.core.tree import PrefixTree
from kvcached.replica import Replica
from kvcached_client.errors import ErrorCode, request_error

#: Fewer hex digits of a namespace are too easily meant otherwise.
_DIGITS_MIN: Final = 4
_SHOWN_MAX: Final = 8


class Target(NamedTuple):
    """A namespace.

    Attributes:
        tree: its index.
        root: of its keys, 32 bytes.
        label: what engines in attached mode call it; "" for that of replicas.
    """

    tree: PrefixTree
    root: bytes
    label: str

    @property
    def replicas(self) -> tuple[str, ...]:
        """Those that share it; none for engines in attached mode."""
        return tuple(pool.name for pool in self.tree.pools)


def find_target(cache: Cache, replicas: Mapping[str, Replica], name: str) -> Target:
    """The namespace of a replica, or the one whose hex digits begin so, or that engines in attached mode call so.

    Raises:
        RequestError: there is none, or more than one.
    """
    if name in replicas:
        return Target(cache.tree_of(name), replicas[name].namespace, "")
    known = list(_targets(cache, replicas))
    found = [each for each in known if len(name) >= _DIGITS_MIN and each.root.hex().startswith(name)]
    found = found or [each for each in known if each.label == name]
    if len(found) == 1:
        return found[0]
    names = [*replicas, *(f"{each.root.hex()[:16]} ({each.label})" for each in known if each.label)]
    raise request_error(
        ErrorCode.UNKNOWN_REPLICA,
        f"{len(found)} namespaces are meant by {name!r}; there are: {', '.join(names[:_SHOWN_MAX]) or 'none'}",
        "give a replica's name, or as many hex digits of a namespace as tell it from others",
    )


def _targets(cache: Cache, replicas: Mapping[str, Replica]) -> Iterator[Target]:
    seen: set[bytes] = set()
    for name, replica in replicas.items():
        if replica.namespace not in seen:
            seen.add(replica.namespace)
            yield Target(cache.tree_of(name), replica.namespace, "")
    for root, space in cache.attached.spaces.by_root.items():
        yield Target(space.tree, root, space.spec.label)
