"""Nothing is left behind once all servers are gone."""

from __future__ import annotations

import pytest

from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.conftest import Prompts
from tests.vllm.fleet import Fleet
from tests.vllm.server import VllmServer

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_nothing_is_held_after_the_servers(
    server: VllmServer, other: VllmServer, daemon: CacheDaemon, fleet: Fleet, prompt: Prompts
) -> None:
    """After the last server has ended the daemon has no session, lease or copy under way, and its books are right."""
    for each in (server, other):
        each.complete(prompt(5))
    fleet.stop()

    daemon.until_sessions(0)
    daemon.until_idle()
    assert daemon.stats().hosts[0].states["cached"] > 0
