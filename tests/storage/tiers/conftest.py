"""Servers of the tests of backends behind a local disk."""

from __future__ import annotations

from tests.storage.redis.conftest import server

__all__ = ["server"]
