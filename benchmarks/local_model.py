"""Small models that a suite makes itself, and a daemon's configuration for an engine that serves one."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_MODEL_SCRIPT: Final = Path(__file__).resolve().parents[1] / "tests" / "vllm" / "tiny_model.py"
#: Of a block, which SGLang calls a page: the smallest that vLLM's attention on the processor takes.
BLOCK_SIZE: Final = 32
#: Token ids of prompts are at least the first and below the second: the rest have a meaning.
TOKEN_IDS: Final = (3, 512)


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


def make_model(model: LocalModel, directory: Path, python: Path) -> Path:
    """Write a model into `directory`, with an interpreter that has torch and safetensors; its folder."""
    folder = directory / f"model-{model.name}"
    subprocess.run([python, str(_MODEL_SCRIPT), str(folder), *model.options], check=True)
    return folder / "model"


def daemon_config(host_bytes: int) -> str:
    """Configuration of a daemon for one engine with a host pool of at least so many bytes."""
    slab_bytes = 16 << 20
    return f"""
[host]
size_bytes = {(host_bytes // slab_bytes + 2) * slab_bytes}
slab_bytes = {slab_bytes}

[offload]
namespaces_max = 2
"""
