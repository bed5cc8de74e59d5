"""kvcached as vLLM's external KV cache: the module that `kv_connector_module_path` names.

The connector is imported when it is first used, because only it needs vLLM. A version of vLLM that is too old is
refused before that, because an import error would not show the reason. A newer version is used if its interface is the
same.
"""

import logging
from contextlib import suppress
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcached_client.vllm.connector import KvcachedConnector
    from kvcached_client.vllm.hybrid import KvcachedHybridConnector

__all__ = ["KvcachedConnector", "KvcachedHybridConnector"]

_MODULES = {"KvcachedConnector": "connector", "KvcachedHybridConnector": "hybrid"}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import vllm  # noqa: PLC0415 - see above

    from kvcached_client.vllm.settings import check_version  # noqa: PLC0415

    if not check_version(vllm.__version__):
        _check_newer(vllm.__version__)
    _register(name)
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


@cache
def _register(name: str) -> None:
    """Have vLLM find a connector by its name alone, too, as `MultiConnector` looks for those that it joins."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory  # noqa: PLC0415 - see above

    with suppress(ValueError):  # it is registered
        KVConnectorFactory.register_connector(name, __name__, name)


@cache
def _check_newer(version: str) -> None:
    """Refuse a vLLM newer than the supported versions if its interface has changed; else warn."""
    from kvcached_client.vllm.interface import check_interface  # noqa: PLC0415 - imports the connector

    check_interface(version)
    logging.getLogger("vllm.kvcached").warning(
        "kvcached: vLLM %s is newer than the versions that this kvcached-client supports. It is used, because its "
        "interface is the same; whether outputs are right was not tested",
        version,
    )
