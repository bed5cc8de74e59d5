"""What an earlier daemon wrote down of a replica's namespace: in which generation it is, and its write policy."""

from __future__ import annotations

from typing import Final, NamedTuple

from kvcached.config import ReplicaConfig
from kvcached.ledger import Ledger, ReplicaRecord, SpaceRecord
from kvcached_client.types import WritePolicy

FIRST_GENERATION: Final = 0


class Generation(NamedTuple):
    """Of a namespace.

    Attributes:
        number: grows whenever it is cleared.
        weights_version: as it was set; "" = what the configuration says.
        namespace: root of its keys, 32 bytes.
    """

    number: int
    weights_version: str
    namespace: bytes


def generation_of(replica: ReplicaConfig, ledger: Ledger | None) -> Generation:
    """The latest one that was written down of what is configured; the first one where there is none.

    It may have been written down for another replica that shares the namespace. Where model, revision or layout are
    others now, the namespace is another one, too.
    """
    latest = Generation(FIRST_GENERATION, "", replica.namespace(FIRST_GENERATION))
    for record in () if ledger is None else ledger.replicas:
        namespace = replica.namespace(record.generation, record.weights_version)
        if record.namespace == namespace.hex() and record.generation > latest.number:
            latest = Generation(record.generation, record.weights_version, namespace)
    return latest


def write_policy_of(replica: ReplicaConfig, generation: Generation, ledger: Ledger | None) -> WritePolicy:
    """The one that was set for a replica's namespace; where none was, or the configuration changed, the latter's."""
    configured = WritePolicy(replica.write_policy)
    for record in () if ledger is None else ledger.replicas:
        if record.namespace == generation.namespace.hex():
            return recorded_policy(record, configured)
    return configured


def recorded_policy(record: ReplicaRecord | SpaceRecord, configured: WritePolicy) -> WritePolicy:
    """The write policy of a record, unless another one is configured now than was then."""
    return record.write_policy if record.configured_policy is configured else configured
