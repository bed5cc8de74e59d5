"""The connector as it is, with a clock around its hooks; loaded by vLLM by its name."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from benchmarks.hook_clock import HookClock
from kvcached_client.vllm import KvcachedConnector

#: Names the file that gets the times.
VARIABLE: Final = "HOOK_TIMES"


class TimedConnector(KvcachedConnector):
    """`KvcachedConnector`, timed in the scheduler's process."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401 - vLLM's
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            times = Path(os.environ[VARIABLE])
            HookClock(self, times.open("a", buffering=1, encoding="utf-8"))
