"""What SGLang 0.5.23 does not tell a storage by itself, asked for with the hooks that SGLang has for plug-ins.

- Which pages are before those that it asks for. It names the pages of all nodes above the last one of its tree that
  the prompt shares, and leaves out the pages of that node itself.
- Whether its scheduler asks, and not a thread of its storage. Where SGLang decodes what another SGLang has prefilled,
  its scheduler promises the other one what the storage has, and ends the request if less is loaded later.
- That weights in memory were replaced, so that the pages of all prompts mean something else from then on.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, Final

from kvcached_client.sglang import loaded_weights
from kvcached_client.sglang.loaded_weights import LoadedWeights

_REGISTRY: Final = "sglang.srt.plugins.hook_registry.HookRegistry"
_CACHE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_TREE: Final = f"{_CACHE}.prefetch_from_storage"
#: The scheduler calls this one, where it decodes what another SGLang has prefilled.
_QUERY: Final = f"{_CACHE}.query_storage_hit_length"
_FLUSH: Final = f"{_CACHE}.reset"
_UPDATER: Final = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
#: After each of these, whatever it returns or raises, weights in memory may be others. They are those of a model
#: runner: the scheduler's functions of these names call them, but are looked up only when SGLang starts, so that a hook
#: on them would come too late for a storage that is attached later. Between the first two, a trainer may write weights
#: from outside. The last one, of SGLang's check of such updates, fills weights with noise.
_WEIGHTS: Final = (
    f"{_UPDATER}.begin_weight_update",
    f"{_UPDATER}.end_weight_update",
    f"{_UPDATER}.update_weights_from_disk",
    f"{_UPDATER}.update_weights_from_ipc",
    f"{_UPDATER}.update_weights_from_tensor",
    f"{_UPDATER}.load_weights_from_distributed",
    "sglang.srt.utils.weight_checker.WeightChecker._reset_tensors",
)
#: Weights whose memory was given back (`/release_memory_occupation`) come into new memory by this one, which is called
#: only where memory can be given back. Nobody fills it, unless a copy was kept; then the weights are the same.
_RESUME: Final = "sglang.srt.utils.torch_memory_saver_adapter._TorchMemorySaverAdapterReal.resume"
_WEIGHTS_TAG: Final = "weights"
#: Arguments of `_TREE` that are used.
_NODE: Final = "last_host_node_id"
_PREFIX: Final = "prefix_keys"
_Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_is_scheduler_asking: Final = ContextVar("kvcached_is_scheduler_asking", default=False)
#: Of this process, once the hooks are installed.
_loaded: list[LoadedWeights] = []


def install(*, is_attached_late: bool) -> LoadedWeights:
    """Install the hooks, once in a process.

    Args:
        is_attached_late: whether SGLang has run without this storage until now. If it has run without the hooks, too,
            nobody knows whether its weights were replaced.

    Returns:
        What the process knows of its weights, the same for all storages.

    Raises:
        ValueError: this SGLang has not what they need.
    """
    if _loaded:
        return _loaded[0]
    signature = check_interface()
    from sglang.srt.plugins.hook_registry import HookType  # noqa: PLC0415 - only SGLang has it

    loaded = LoadedWeights(loaded_weights.process_began_ns())

    def whole_prefix(*args: Any, **kwargs: Any) -> _Arguments:  # noqa: ANN401 - SGLang's
        return _with_prefix(signature, args, kwargs)

    def query(ask: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's
        token = _is_scheduler_asking.set(True)
        try:
            return ask(*args, **kwargs)
        finally:
            _is_scheduler_asking.reset(token)

    def new_weights(update: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - SGLang's
        try:
            return update(*args, **kwargs)
        finally:
            loaded.replaced("weights were replaced in memory")

    def new_memory(_: object, tag: str) -> None:
        if tag == _WEIGHTS_TAG and not _is_copy_kept():
            loaded.replaced("weights were released from memory")

    def no_pages(*_: object, **__: object) -> None:
        loaded.dropped_pages()

    _apply(
        (_TREE, whole_prefix, HookType.BEFORE),
        (_QUERY, query, HookType.AROUND),
        (_FLUSH, no_pages, HookType.AFTER),
        (_RESUME, new_memory, HookType.BEFORE),
        *((target, new_weights, HookType.AROUND) for target in _WEIGHTS),
    )
    if is_attached_late:
        loaded.replaced("kvcached was attached to a running SGLang, whose weights may have been replaced before")
    _loaded.append(loaded)
    return loaded


def _apply(*hooks: tuple[str, Callable[..., Any], Any]) -> None:
    """Have SGLang call these, each by its target and kind."""
    from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: PLC0415 - only SGLang has it

    before = [(target, pkgutil.resolve_name(target)) for target, _, _ in hooks]
    for hook in hooks:
        HookRegistry.register(*hook)
    HookRegistry.apply_hooks()
    if missed := [target for target, function in before if pkgutil.resolve_name(target) is function]:
        raise ValueError(f"SGLang has not installed kvcached's hooks, maybe beside another plug-in's: {missed}")


def check_interface() -> inspect.Signature:
    """The arguments of the function of SGLang's tree that a hook changes.

    Raises:
        ValueError: this SGLang has not what the hooks need.
    """
    try:
        pkgutil.resolve_name(_REGISTRY)
        signature = inspect.signature(pkgutil.resolve_name(_TREE))
        for target in (_QUERY, _FLUSH, _RESUME, *_WEIGHTS):
            pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"this version of SGLang is not served: {error}") from error
    if not {_NODE, _PREFIX} <= set(signature.parameters):
        raise ValueError(f"this version of SGLang is not served: {_TREE} has other arguments: {signature}")
    return signature


def _is_copy_kept() -> bool:
    """Whether SGLang keeps a copy of weights whose memory it gives back."""
    from sglang.srt.runtime_context import get_context  # noqa: PLC0415 - only SGLang has it

    features = getattr(get_context().config_bag("exec"), "features", None)
    return bool(getattr(features, "enable_weights_cpu_backup", False))


def is_scheduler_asking() -> bool:
    """Whether a call of the storage is made by SGLang's scheduler, which relies on the answer until it loads."""
    return _is_scheduler_asking.get()


def _with_prefix(signature: inspect.Signature, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """The arguments of a call of SGLang's tree, with the whole prefix."""
    bound = signature.bind(*args, **kwargs)
    tree, node = bound.args[0], bound.arguments[_NODE]
    bound.arguments[_PREFIX] = prefix_of(tree.tree_core, node, is_root=tree.is_root(node))
    return bound.args, bound.kwargs


def prefix_of(tree: Any, node: Any, *, is_root: bool) -> list[str]:  # noqa: ANN401 - SGLang's
    """The hashes of all pages from the root of SGLang's tree to the end of a node."""
    return [] if is_root else [*tree.get_prefix_hash_values(node), *tree.get_hash_values(node)]
