"""kvcached, the daemon: it owns the KV cache of the LLM inference engines on one node."""

from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec
from typing import Final

VERSION: Final = "0.1.0"


def is_core_compiled() -> bool:
    """Whether the core runs as machine code, as it was built with KVCACHED_COMPILE=1, and not from its sources."""
    found = find_spec("kvcached.core.cache")
    return found is not None and (found.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
