"""Settings that cannot work end at vLLM's start, with words that say what to change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.vllm.server import CONNECTOR, VllmServer, ended

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


def test_failing_requests_for_failed_loads_is_refused(models: Path, tmp_path: Path) -> None:
    """Without kv_load_failure_policy=recompute vLLM does not start, and says how to start it."""
    connector = {name: value for name, value in CONNECTOR.items() if name != "kv_load_failure_policy"}
    server = VllmServer(tmp_path, "refused", models / "model", run_dir=tmp_path, connector=connector)
    with ended(server):
        assert server.wait_until_ended() != 0
        assert "kv_load_failure_policy is 'fail'" in server.log()
        assert "set it to 'recompute'" in server.log()
