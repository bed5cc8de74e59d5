"""Which vLLM the connector was written for. Its connector interface is experimental and changes between versions."""

from __future__ import annotations

import re
from typing import Final

#: The first supported minor version, and the first one that is not.
SUPPORTED_FROM: Final = (0, 32)
SUPPORTED_BELOW: Final = (0, 34)

_RELEASE: Final = re.compile(r"(\d+)\.(\d+)(?:\D|$)")


def minor_version(version: str) -> tuple[int, int] | None:
    """Major and minor number of a version such as ``0.32.1+cpu``; None where it has none, as ``dev``."""
    found = _RELEASE.match(version)
    return (int(found[1]), int(found[2])) if found else None


def check_version(version: str) -> None:
    """Refuse a vLLM that the connector was not written for.

    Raises:
        RuntimeError: `version` is out of range, or unreadable.
    """
    if (found := minor_version(version)) is None or not SUPPORTED_FROM <= found < SUPPORTED_BELOW:
        wanted = f">={_text(SUPPORTED_FROM)},<{_text(SUPPORTED_BELOW)}"
        raise RuntimeError(
            f"this vLLM is version {version}, KvcachedConnector supports {wanted}: install a kvcached-client that "
            f"supports it, or vllm{wanted}"
        )


def _text(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))
