"""Health checks commit blocks of their own: routers hear nothing of these."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from kvcached.core.cache import Cache
from kvcached.events.stream import EventStream
from kvcached_client.protocol import engine as wire
from tests.service import office as office_module
from tests.service.office import FakePeer, Office, key_chain


def test_health_check_makes_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a health check stores and removes makes no batch."""
    monkeypatch.setattr(office_module, "Cache", partial(Cache, announces=True))
    office = Office("a")

    async def check() -> wire.HealthReport:
        answers = office.ask_late(wire.Health(id=office.next_id()))
        while not answers:
            await asyncio.sleep(0)
        (answer,) = answers
        assert isinstance(answer.header, wire.HealthReport)
        return answer.header

    cache = office.cache
    events = EventStream(cache.index_changes, cache.announced, topic="", epoch=1, buffer_bytes=1, now_s=lambda: 1.0)
    office.enter(FakePeer(1))
    office.store(key_chain(3))
    assert len(events.flush()) == 1

    assert asyncio.run(check()).ok
    assert cache.index_changes
    assert events.flush() == []
