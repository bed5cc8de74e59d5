"""How a configuration names policies, and that what shares blocks shares its policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

from kvcached.config_error import mistake

#: The values of `kvcached_client.types.WritePolicy`.
WritePolicyName: TypeAlias = Literal["write_through", "write_through_selective", "write_back", "never"]
#: The names in `kvcached.core.eviction`.
EvictionPolicyName: TypeAlias = Literal["lru", "slru"]


def check_policies(replicas: Sequence[tuple[str, bytes, WritePolicyName]]) -> None:
    """Refuse two policies for one namespace.

    Args:
        replicas: name, namespace and policy of each, in their order.

    Raises:
        PydanticCustomError: two replicas share a namespace and differ in their policy.
    """
    first: dict[bytes, tuple[str, WritePolicyName]] = {}
    for index, (name, namespace, policy) in enumerate(replicas):
        other, known = first.setdefault(namespace, (name, policy))
        if known != policy:
            raise mistake(
                f"is another one than that of replica {other!r} ({known}), which shares its blocks",
                "give both the same",
                ("replica", index, "write_policy"),
                policy,
            )
