"""kvcached as vLLM's external KV cache: the module that `kv_connector_module_path` names.

The connector needs vLLM, which nothing else here imports, so it is imported when it is asked for. A vLLM of another
version is refused before that: what it lacks would show as an import error that says nothing.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_client.vllm.connector import KvcachedConnector

__all__ = ["KvcachedConnector"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm  # noqa: PLC0415 - see above

    from kvcached_client.vllm.settings import check_version  # noqa: PLC0415

    check_version(vllm.__version__)
    from kvcached_client.vllm.connector import KvcachedConnector  # noqa: PLC0415

    return KvcachedConnector
