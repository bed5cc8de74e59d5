"""Stock vLLM on memory of the daemon: killed at random instants, it comes back with its blocks and right answers."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.vllm.server import environment, interpreter
from tests.vllm.warm_loop import WarmLoop

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

KILLS = 6
#: Of computed blocks, how many the next engine finds.
SHARE_MIN = 0.95


@pytest.mark.parametrize("scheduling", ["sync", "async"])
def test_killed_engine_comes_back_warm(tmp_path: Path, models: Path, scheduling: str) -> None:
    """All answers are stock vLLM's; at least 95 % of what was computed is found. Many more kills: see `kills`."""
    loop = WarmLoop(tmp_path, models / "model", seed=7, faults=["async_scheduling"] if scheduling == "async" else [])
    with loop.running(tmp_path):
        for number in range(KILLS):
            loop.kill_once(number)
        loop.finish()
        kept = loop.daemon.stats().engine_pools
    outcome = loop.outcome
    assert outcome.wrong == 0, outcome
    assert outcome.completed > 100, outcome
    assert outcome.share >= SHARE_MIN, outcome
    assert [pool.used for pool in kept] == [False, False]


def test_daemon_is_killed_between_engines(tmp_path: Path, models: Path) -> None:
    """A daemon that is killed, too, hands the memory to the next one: the engine after that finds its blocks."""
    loop = WarmLoop(tmp_path, models / "model", seed=8)
    with loop.running(tmp_path):
        loop.finish()
        before = loop.daemon.stats().engine_pools
        loop.daemon.kill()
        loop.daemon.start()
        assert loop.daemon.stats().engine_pools == before
        loop.finish()
    assert loop.outcome.wrong == 0
    assert loop.outcome.adopted > 300, loop.outcome


#: Drops the table's rows, launches a step, and orders copies, as far as vLLM has to do with it.
ORDER_OF_A_STEP = """
from types import SimpleNamespace
from vllm.v1.worker import kv_connector_model_runner_mixin as mixin
from kvcached_client.vllm.connector import KvcachedConnector

seen = []

class Probe(KvcachedConnector):
    def __init__(self):
        self._memory = SimpleNamespace(begin_step=lambda is_tracked: seen.append(f"begin {is_tracked}"))
    def start_load_kv(self, *_):
        seen.append("orders")
    def get_transfer_results(self, _):
        return SimpleNamespace(finished_sending=None, finished_recving=None, failed_recving=None)
    def get_block_ids_with_load_errors(self): ...
    def get_kv_connector_stats(self): ...
    def build_connector_worker_meta(self):
        seen.append("report")

probe = Probe()
mixin.get_kv_transfer_group, mixin.get_forward_context = lambda: probe, lambda: None
step = SimpleNamespace(
    kv_connector_metadata=SimpleNamespace(number=0), has_sync_kv_loads=False, finished_req_ids=set()
)
with mixin.KVConnectorModelRunnerMixin._get_kv_connector_output(step):
    seen.append("launch")
print(*seen, sep=", ")
"""


def test_rows_are_dropped_before_vllm_launches_a_step() -> None:
    """A step that nobody keeps a table of begins without rows: vLLM tells of it before, of copies only afterwards."""
    done = subprocess.run(
        [interpreter(), "-P", "-c", ORDER_OF_A_STEP], env=environment(None), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "begin False, launch, orders, report"
