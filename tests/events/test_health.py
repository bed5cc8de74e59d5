"""Health checks commit blocks of their own: routers hear nothing of these."""

from __future__ import annotations

import asyncio
from http import HTTPStatus

from kvcached.events.stream import EventStream
from tests.monitoring.registry import pages_of
from tests.service.office import FakePeer, Office, key_chain


def test_health_check_makes_no_event() -> None:
    """What a health check stores and removes makes no batch."""
    office = Office("a", announces=True)

    cache = office.cache
    events = EventStream(cache.index_changes, cache.announced, topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert len(events.flush()) == 1

    page = asyncio.run(pages_of(office).get("/readyz", ""))

    assert page.status == HTTPStatus.OK
    assert cache.index_changes
    assert events.flush() == []
