"""What SGLang 0.5.23 does not tell a storage by itself, asked for with the hooks that SGLang has for plug-ins.

- Which pages are before those that it asks for. It names the pages of all nodes above the last one of its tree that
  the prompt shares, and leaves out the pages of that node itself.
- That weights in memory were replaced, so that the pages of all prompts mean something else from then on.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from typing import Any, Final

_REGISTRY: Final = "sglang.srt.plugins.hook_registry.HookRegistry"
_TREE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.prefetch_from_storage"
_WEIGHTS: Final = (
    "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
    ".flush_cache_after_weight_update"
)
#: Arguments of the former that are used.
_NODE: Final = "last_host_node_id"
_PREFIX: Final = "prefix_keys"

#: Called when weights were replaced; of the storage that was made last.
_tell: list[Callable[[], None]] = []


def install(on_new_weights: Callable[[], None]) -> None:
    """Install the hooks, once in a process.

    Args:
        on_new_weights: called when weights in memory were replaced.

    Raises:
        ValueError: this SGLang has not what they need.
    """
    if _tell:
        _tell[:] = [on_new_weights]
        return
    signature = check_interface()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415 - only SGLang has it

    def whole_prefix(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:  # noqa: ANN401 - SGLang's
        bound = signature.bind(*args, **kwargs)
        tree, node = bound.args[0], bound.arguments[_NODE]
        bound.arguments[_PREFIX] = prefix_of(tree.tree_core, node, is_root=tree.is_root(node))
        return bound.args, bound.kwargs

    def new_weights(*_: object, **__: object) -> None:
        for tell in _tell:
            tell()

    _tell.append(on_new_weights)
    HookRegistry.register(_TREE, whole_prefix, HookType.BEFORE)
    HookRegistry.register(_WEIGHTS, new_weights, HookType.AFTER)
    HookRegistry.apply_hooks()


def check_interface() -> inspect.Signature:
    """The arguments of the function of SGLang's tree that a hook changes.

    Raises:
        ValueError: this SGLang has not what the hooks need.
    """
    try:
        pkgutil.resolve_name(_REGISTRY)
        signature = inspect.signature(pkgutil.resolve_name(_TREE))
        pkgutil.resolve_name(_WEIGHTS)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this version of SGLang is not served: {error}") from error
    if not {_NODE, _PREFIX} <= set(signature.parameters):
        raise ValueError(f"this version of SGLang is not served: {_TREE} has other arguments: {signature}")
    return signature


def prefix_of(tree: Any, node: Any, *, is_root: bool) -> list[str]:  # noqa: ANN401 - SGLang's
    """The hashes of all pages from the root of SGLang's tree to the end of a node."""
    return [] if is_root else [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]
