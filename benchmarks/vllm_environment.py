"""What it takes to run vLLM on the processor: an environment of its own, settings, and models made here."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[1]
_MODEL_SCRIPT: Final = _ROOT / "tests" / "vllm" / "tiny_model.py"
#: What its processes find at their start: without it, they take the cores from the daemon while they wait.
_YIELDING: Final = _ROOT / "tests" / "vllm" / "yielding"

#: Folder of vLLM's environment; a relative one is in the checkout.
VARIABLE: Final = "VLLM_VENV"
_DEFAULT: Final = ".venv-vllm"

#: Of vLLM's block: the smallest that its attention on the processor takes.
BLOCK_SIZE: Final = 32
#: Prompt and output.
CONTEXT_TOKENS: Final = 4096
#: Token ids of prompts are at least the first and below the second: the rest have a meaning.
TOKEN_IDS: Final = (3, 512)

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


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A Llama with random weights in float32, made from a seed.

    Attributes:
        name: as metrics and figures spell it.
        options: for the script that makes it.
        block_bytes: of one block of KV, all layers.
        description: its shape, in words.
    """

    name: str
    options: tuple[str, ...]
    block_bytes: int
    description: str


MODELS: Final = {
    model.name: model
    for model in (
        LocalModel("tiny", (), 32 << 10, "2 layers, width 128, 4 heads, 2 KV heads of 32"),
        LocalModel(
            "small",
            ("--layers=8", "--heads=8", "--kv-heads=4", "--head-dim=64"),
            512 << 10,
            "8 layers, width 512, 8 heads, 4 KV heads of 64",
        ),
    )
}


def interpreter() -> Path:
    """Python of vLLM's environment.

    Raises:
        SystemExit: there is none; says what to run.
    """
    python = _ROOT / os.environ.get(VARIABLE, _DEFAULT) / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"this needs vLLM, and there is no {python}: `make vllm-env` builds that environment; "
            f"{VARIABLE}=FOLDER names another one that has vLLM and kvcached-client"
        )
    return python


def environment(run_dir: Path | None) -> dict[str, str]:
    """Variables for a program that imports vLLM; with the run directory of the daemon that it is to use."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("KVCACHED_")}
    path = [each for each in (str(_YIELDING), inherited.get("PYTHONPATH")) if each]
    ours = {"PYTHONPATH": os.pathsep.join(path)} | ({} if run_dir is None else {"KVCACHED_RUN_DIR": str(run_dir)})
    return inherited | _SETTINGS | ours


def make_model(model: LocalModel, directory: Path) -> Path:
    """Write a model into `directory`; its folder."""
    folder = directory / f"model-{model.name}"
    subprocess.run([interpreter(), str(_MODEL_SCRIPT), str(folder), *model.options], check=True)
    return folder / "model"


def daemon_config(host_bytes: int) -> str:
    """Configuration of a daemon for one vLLM with a host pool of at least so many bytes."""
    slab_bytes = 16 << 20
    return f"""
[host]
size_bytes = {(host_bytes // slab_bytes + 2) * slab_bytes}
slab_bytes = {slab_bytes}

[offload]
namespaces_max = 2
"""
