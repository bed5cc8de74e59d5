"""Checks that a vLLM newer than the tested versions still has the interface that the connector is written for.

vLLM marks the interface as experimental. The check compares what can be compared without running vLLM: the connector's
methods with those of its base class, and the attributes that the connector reads with those that vLLM's classes have.
It cannot see a change of meaning.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Final

from kvcached_client.vllm.scheduling.request_state import (
    BlockPool,
    BlockState,
    CachedRequests,
    CacheManager,
    HashedBlock,
    NewRequest,
    Request,
    RequestBlocks,
    Step,
)

_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
_CONNECTOR: Final = "kvcached_client.vllm.connector:KvcachedConnector"
#: Hooks for sleep. A vLLM without them is refused only if it is to sleep.
_OF_SLEEP: Final = frozenset({"unregister_kv_caches", "restore_kv_caches"})


def _names(protocol: type) -> frozenset[str]:
    return frozenset(name for name in vars(protocol) if not name.startswith("_"))


#: What the connector reads of vLLM's classes.
_PARTS: Final[Mapping[str, frozenset[str]]] = {
    "vllm.v1.request:Request": _names(Request) | {"all_token_ids", "lora_request", "session_id"},
    "vllm.v1.core.block_pool:BlockPool": _names(BlockPool) | {"hash_block_size", "unpin_blocks", "_insert_block_hash"},
    "vllm.v1.core.kv_cache_manager:KVCacheManager": _names(CacheManager),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": _names(RequestBlocks),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock": _names(HashedBlock),
    "vllm.distributed.kv_transfer.kv_connector.v1.base:SupportsHMA": frozenset({"request_finished_all_groups"}),
    _BASE: frozenset({"bind_kv_cache_manager", "get_transfer_results"}),
    "vllm.v1.core.sched.output:SchedulerOutput": _names(Step),
    "vllm.v1.core.sched.output:KVConnectorBlockState": _names(BlockState),
    "vllm.v1.core.sched.output:NewRequestData": _names(NewRequest),
    "vllm.v1.core.sched.output:CachedRequestData": _names(CachedRequests),
    "vllm.v1.outputs:KVConnectorOutput": frozenset(
        {"finished_recving", "failed_recving", "invalid_block_ids", "kv_connector_worker_meta"}
    ),
}


def check_interface(version: str) -> None:
    """Refuse a vLLM whose interface differs from the one that the connector is written for.

    Raises:
        RuntimeError: names every difference.
    """
    try:
        base, connector = _load(_BASE), _load(_CONNECTOR)
        found = list(hook_differences(connector, base))
        for path, names in _PARTS.items():
            found += missing_attributes(_load(path), names)
    except (ImportError, AttributeError) as error:
        found = [f"{type(error).__name__}: {error}"]
    if found:
        raise RuntimeError(
            f"vLLM {version} is newer than the versions that KvcachedConnector was tested with, and has another "
            "interface: install a kvcached-client that supports it, or an older vLLM"
            + "".join(f"\n- {each}" for each in found)
        )


def hook_differences(connector: type, base: type) -> Iterator[str]:
    """How the methods of a connector differ from those of its base class that vLLM calls."""
    for name in sorted(getattr(connector, "__abstractmethods__", ())):
        yield f"the connector has no {name}, which vLLM needs"
    for name in sorted(_names(connector)):
        ours, theirs = inspect.getattr_static(connector, name), inspect.getattr_static(base, name, None)
        if theirs is None and name in _OF_SLEEP:
            continue
        if theirs is None:
            yield f"vLLM has no {name}, and does not call it"
        elif type(ours) is not type(theirs):
            yield f"{name} is a {type(theirs).__name__}, not a {type(ours).__name__}"
        elif not isinstance(ours, property):
            given, taken = _parameters(getattr(base, name)), _parameters(getattr(connector, name))
            if given != taken:
                yield f"{name} has the parameters ({', '.join(given)}), not ({', '.join(taken)})"


def missing_attributes(kind: type, names: frozenset[str]) -> Iterator[str]:
    """Which attributes neither a class nor its constructor defines."""
    constructor = inspect.getattr_static(kind, "__init__")
    assigned = constructor.__code__.co_names if inspect.isfunction(constructor) else ()
    for name in sorted(names):
        if not hasattr(kind, name) and name not in assigned and name not in getattr(kind, "__annotations__", {}):
            yield f"{kind.__name__} has no {name}"


def _parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters) if callable(function) else []


def _load(path: str) -> type:
    module, name = path.split(":")
    found: type = getattr(importlib.import_module(module), name)
    return found
