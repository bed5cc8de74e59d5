"""Quotas of tenants, from the configuration of a real daemon to its statistics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached_client import Admin
from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import TenantStats
from tests.daemon.conftest import RunningDaemon, started
from tests.daemon.offload_process import BLOCK_SIZE, keys_of
from tests.daemon.test_host_tier import HOST_CONFIG, tokens_of, wait_until
from tests.daemon.test_host_tier import engine_on as managed_engine_on
from tests.daemon.test_offload import SLOTS, config, engine_on, host, on_command_line

QUOTA = (
    '[[host.quota.tenant]]\nlabel = "free-*"\ncap_percent = 25\n'
    '[[host.quota.tenant]]\nlabel = "acme"\nfloor_percent = 50\n'
)


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[RunningDaemon]:
    """A daemon with quotas, for engines in offload mode."""
    with started(tmp_path, config().replace("[offload]", QUOTA + "[offload]")) as running:
        yield running


def test_tenants_of_an_engine_keep_to_their_quotas(daemon: RunningDaemon) -> None:
    """What each tenant has is what its floor and cap say, in the pool, in statistics and on the command line."""
    with engine_on(daemon) as engine:
        for number in range(8):
            engine.scheduler.tenant = "acme"
            engine.store(f"a{number}", 4)
        for number in range(4):
            engine.scheduler.tenant = "free-7"
            engine.store(f"f{number}", 4)
        engine.scheduler.tenant = ""
        for number in range(6):
            engine.store(f"n{number}", 4)

        assert [engine.scheduler.hit(f"a{number}", 4) for number in range(8)] == [0] * 4 + [4] * 4
        tenants = {each.tenant: each for each in host(daemon.run_dir).tenants}
        assert tenants["acme"] == TenantStats("acme", SLOTS // 2, SLOTS // 2, SLOTS)
        assert 0 <= tenants.get("free-7", TenantStats("free-7", 0, 0, 0)).blocks <= SLOTS // 4
        printed = on_command_line(daemon, "stats")
        assert re.search(rf"tenant acme: +{SLOTS // 2} blocks, floor {SLOTS // 2}, cap {SLOTS}\n", printed), printed
        assert [engine.load(f"a{number}", 4) for number in range(4, 8)] == [4] * 4


def test_tenant_whose_name_is_too_long_is_refused(daemon: RunningDaemon) -> None:
    """The error names the field, and the session goes on."""
    with engine_on(daemon) as engine:
        client = engine.scheduler.client
        with pytest.raises(RequestError, match="tenant"):
            client.acquire("r", keys_of("x", 1), BLOCK_SIZE, tenant="t" * 65)
        assert engine.store("x", 4).slots


def test_requests_on_a_device_pool_name_their_tenant(tmp_path: Path) -> None:
    """`Client.acquire(tenant=…)` bounds what the host pool gets of a tenant's prompts."""
    with started(tmp_path, HOST_CONFIG + QUOTA) as daemon, managed_engine_on(daemon) as engine:
        client = engine.client
        for number in range(12):
            chain = client.chain(tokens_of(f"p{number}", 4), salt="free-1's")
            with client.acquire(f"r{number}", chain, full=True, tenant="free-1") as lease:
                lease.finish(chain.token_count)
        wait_until(daemon.run_dir, lambda stats: sum(stats.transfers.values()) == 0 and bool(stats.hosts[0].tenants))
        with Admin.connect(daemon.run_dir, deadline_ms=10_000) as admin:
            (tenant,) = admin.stats().hosts[0].tenants
        assert (tenant.tenant, 0 < tenant.blocks <= tenant.cap_blocks) == ("free-1", True)
        with pytest.raises(RequestError, match="64"):
            client.acquire("long", client.chain(tokens_of("x", 1)), tenant="t" * 65)
