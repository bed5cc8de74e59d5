"""One clear of a namespace: what it is of, and how it is answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kvcached.service.pending import Answer
from kvcached_client.protocol import engine as wire

ClearRequest: TypeAlias = wire.Clear | wire.ClearNamespace | wire.SetWeights


@dataclass(slots=True, eq=False)
class Clear:
    """A clear of one namespace.

    Attributes:
        replicas: that share the namespace; none where engines in offload mode do.
        namespace: root of its keys from then on.
        label: what engines in offload mode call it.
        blocks: that the namespace held before; None until it is done.
        version: of the record of generations that says so.
        followed_by: one that began before this one was recorded: what another daemon has recorded goes before it.
    """

    replicas: tuple[str, ...]
    generation: int
    weights_version: str
    namespace: bytes
    label: str = ""
    blocks: int | None = None
    version: int = -1
    followed_by: Clear | None = None

    @property
    def last(self) -> Clear:
        """The one whose end is the end of all that it follows."""
        return self if self.followed_by is None else self.followed_by.last

    def told_to(self, request: ClearRequest) -> Answer | None:
        """The answer to a request, once there is one."""
        if self.blocks is None:
            return None
        if isinstance(request, wire.Clear):
            return Answer(wire.Cleared(id=request.id, generation=self.generation, blocks=self.blocks))
        return Answer(
            wire.NamespaceCleared(
                id=request.id,
                replicas=self.replicas,
                generation=self.generation,
                namespace=self.namespace,
                label=self.label,
                weights_version=self.weights_version,
                blocks=self.blocks,
            )
        )
