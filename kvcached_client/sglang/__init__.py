"""kvcached as the storage behind SGLang's hierarchical cache: the module that `module_path` names."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_client.sglang.storage import KvcachedStorage

__all__ = ["KvcachedStorage"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from kvcached_client.sglang.storage import KvcachedStorage  # noqa: PLC0415 - only this needs SGLang

    return KvcachedStorage
