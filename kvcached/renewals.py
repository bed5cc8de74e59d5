"""A replica's namespace in a new generation: cleared, or with other weights. Written down before it is told."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvcached.admission import unknown_replica
from kvcached.answers import Answer, Respond
from kvcached.awaiting import Awaiting
from kvcached.core.cache import Cache
from kvcached.core.effects import NamespaceCleared
from kvcached.modes import Modes
from kvcached.replica import Replica
from kvcached_client import protocol as wire
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.failpoints import failpoint

#: Requests whose outcome is kept for retries, the latest of all connections.
RENEWALS_KEPT: Final = 256

_log: Final = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Renewal:
    """One of them; `blocks` is None until it is done."""

    replicas: tuple[str, ...]
    generation: int
    weights_version: str
    namespace: bytes
    blocks: int | None = None

    def told_to(self, request: wire.ClearReplica | wire.SetWeights) -> Answer | None:
        """The answer to a request, once there is one."""
        if self.blocks is None:
            return None
        return Answer(
            wire.ReplicaCleared(
                id=request.id,
                replicas=self.replicas,
                generation=self.generation,
                namespace=self.namespace,
                weights_version=self.weights_version,
                blocks=self.blocks,
            )
        )


class Renewals:
    """Serves the verbs `clear_replica` and `set_weights`.

    Attributes:
        waiting: requests that have not been answered.
    """

    def __init__(self, cache: Cache, replicas: Mapping[str, Replica], awaiting: Awaiting, modes: Modes) -> None:
        self.waiting = 0
        self._cache = cache
        self._replicas = replicas
        self._awaiting = awaiting
        self._modes = modes
        self._under_way: list[_Renewal] = []
        self._of_request: OrderedDict[tuple[bytes, type[wire.Header], int], _Renewal] = OrderedDict()

    def clear(self, connection: bytes, request: wire.ClearReplica, respond: Respond) -> None:
        """Clear a namespace, or wait with others for a clear that is under way: nothing can have come in between.

        Raises:
            RequestError: no such replica, or too many requests wait.
        """
        replica = self._replica(request.replica)
        renewal = self._known(connection, request) or self._of(replica) or self._begin(replica, replica.weights_version)
        self._answer(connection, request, renewal, respond)

    def set_weights(self, connection: bytes, request: wire.SetWeights, respond: Respond) -> None:
        """The same with a version of weights; where the replica has that already, nothing is done.

        Raises:
            RequestError: no such replica, another clear is under way, or too many requests wait.
        """
        replica = self._replica(request.replica)
        renewal = self._known(connection, request) or self._of(replica)
        if renewal is None and replica.weights_version == request.version:
            names = self._names(replica)
            renewal = _Renewal(names, replica.generation, replica.weights_version, replica.namespace, blocks=0)
        elif renewal is None:
            renewal = self._begin(replica, request.version)
        elif renewal.weights_version != request.version:
            raise request_error(
                ErrorCode.CLEARING,
                f"the namespace of replica {replica.name!r} is being cleared",
                "try again in a moment",
            )
        self._answer(connection, request, renewal, respond)

    def finish(self, cleared: NamespaceCleared) -> None:
        """The core is through: from now on the replicas are of the new generation."""
        renewal = next(each for each in self._under_way if each.namespace == cleared.namespace)
        self._under_way.remove(renewal)
        for name in cleared.pools:
            replica = self._replicas[name]
            replica.namespace, replica.generation = renewal.namespace, renewal.generation
            replica.weights_version = renewal.weights_version
            replica.workers.generation = renewal.generation
        renewal.blocks = cleared.blocks
        _log.info(
            "cleared: %s, %d blocks; generation %d, weights %r",
            ", ".join(renewal.replicas),
            cleared.blocks,
            renewal.generation,
            renewal.weights_version,
        )

    def _replica(self, name: str) -> Replica:
        replica = self._replicas.get(name)
        if replica is None:
            raise unknown_replica(name, self._replicas)
        return replica

    def _names(self, replica: Replica) -> tuple[str, ...]:
        return tuple(pool.name for pool in self._cache.tree_of(replica.name).pools)

    def _known(self, connection: bytes, request: wire.ClearReplica | wire.SetWeights) -> _Renewal | None:
        return self._of_request.get((connection, type(request), request.id))

    def _of(self, replica: Replica) -> _Renewal | None:
        return next((each for each in self._under_way if replica.name in each.replicas), None)

    def _begin(self, replica: Replica, weights_version: str) -> _Renewal:
        generation = replica.generation + 1
        namespace = replica.root_of(generation, weights_version)
        renewal = _Renewal(self._names(replica), generation, weights_version, namespace)
        self._under_way.append(renewal)
        self._cache.clearings.begin(self._cache.tree_of(replica.name), namespace)
        return renewal

    def _answer(
        self,
        connection: bytes,
        request: wire.ClearReplica | wire.SetWeights,
        renewal: _Renewal,
        respond: Respond,
    ) -> None:
        self._of_request[connection, type(request), request.id] = renewal
        if len(self._of_request) > RENEWALS_KEPT:
            self._of_request.popitem(last=False)

        def ask(*, is_last: bool) -> Answer | None:
            answer = renewal.told_to(request)
            if answer is None and is_last:
                raise self._modes.refusal()
            return answer

        def told(answer: Answer) -> None:
            failpoint("daemon.renewed")
            self.waiting -= 1
            respond(answer)

        self.waiting += 1
        try:
            self._awaiting.answer(request, ask, told)
        except BaseException:
            self.waiting -= 1
            raise
