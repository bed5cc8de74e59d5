"""kvcached, the daemon: it owns the KV cache of the LLM inference engines on one node."""

from typing import Final

VERSION: Final = "0.1.0"
