"""kvcached as vLLM's external KV cache: the module that `kv_connector_module_path` names.

The connector is imported when it is first used, because only it needs vLLM. An unsupported version of vLLM is refused
before that, because an import error would not show the reason.
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
