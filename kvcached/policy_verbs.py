"""The request by which people change how a namespace is kept. What it sets is written down before it is answered."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final

from kvcached.answers import Answer
from kvcached.core.cache import Cache
from kvcached.core.writing import set_write_policy
from kvcached.replica import Replica
from kvcached.targets import find_target
from kvcached_client import protocol as wire

_log: Final = logging.getLogger(__name__)
#: Bytes of a namespace's root that tell it from others.
_SHOWN_BYTES: Final = 8


class PolicyVerbs:
    """Serves the verb `set_policy`.

    Attributes:
        by_type: what serves it.
    """

    def __init__(self, cache: Cache, replicas: Mapping[str, Replica]) -> None:
        self._cache = cache
        self._replicas = replicas
        self.by_type: dict[type[wire.Header], Callable[[bytes, Any, list[bytes]], Answer]] = {
            wire.SetPolicy: self._set_policy
        }

    def _set_policy(self, _: bytes, request: wire.SetPolicy, __: list[bytes]) -> Answer:
        target = find_target(self._cache, self._replicas, request.target)
        before = target.tree.write_policy
        set_write_policy(self._cache, target.tree, request.policy)
        shown = target.root[:_SHOWN_BYTES].hex()
        _log.info("write policy of namespace %s: %s, was %s", shown, request.policy, before)
        return Answer(
            wire.PolicySet(
                id=request.id,
                replicas=target.replicas,
                namespace=shown,
                label=target.label,
                policy=request.policy,
                before=before,
            )
        )
