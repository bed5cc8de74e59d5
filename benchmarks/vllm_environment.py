"""What it takes to run vLLM on the processor: an environment of its own, and settings."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from benchmarks.engine_child import interpreter_of

_ROOT: Final = Path(__file__).resolve().parents[1]
#: What its processes find at their start: without it, they take the cores from the daemon while they wait.
_STAND_INS: Final = _ROOT / "tests" / "vllm" / "stand_ins"

#: Folder of vLLM's environment; a relative one is in the checkout.
VARIABLE: Final = "VLLM_VENV"

#: Prompt and output.
CONTEXT_TOKENS: Final = 4096

_SETTINGS: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
    "VLLM_LOGGING_LEVEL": "INFO",
    "TORCH_COMPILE_DISABLE": "1",  # compiling takes 20 s
    "OMP_NUM_THREADS": "1",  # one core computes, one is left for all else
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else two engines would share one core
}
#: vLLM's ``--kv-transfer-config``.
CONNECTOR: Final = {
    "kv_connector": "KvcachedConnector",
    "kv_connector_module_path": "kvcached_client.vllm",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}


def interpreter() -> Path:
    """Python of vLLM's environment; SystemExit, with what to run, if there is none."""
    return interpreter_of("vLLM", VARIABLE)


def environment(run_dir: Path | None) -> dict[str, str]:
    """Variables for a program that imports vLLM; with the run directory of the daemon that it is to use."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
    path = [each for each in (str(_STAND_INS), inherited.get("PYTHONPATH")) if each]
    ours = {"PYTHONPATH": os.pathsep.join(path)} | ({} if run_dir is None else {"KVCACHED_RUN_DIR": str(run_dir)})
    return inherited | _SETTINGS | ours
