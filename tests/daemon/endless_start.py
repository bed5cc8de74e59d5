"""A daemon whose start never ends, once its workers are there: ``python -m tests.daemon.endless_start serve …``."""

from __future__ import annotations

import asyncio
import sys

import kvcached.__main__
from kvcached import daemon


async def hang(*_: object, **__: object) -> None:
    """Say that the start has come so far, and go no further."""
    sys.stdout.write("starting\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    daemon.start_storage = hang  # type: ignore[attr-defined]
    kvcached.__main__.run()
