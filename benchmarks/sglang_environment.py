"""What it takes to run SGLang on the processor: an environment of its own, and settings with one storage or another."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.engine_child import Engine, interpreter_of, running
from benchmarks.local_model import BLOCK_SIZE
from kvcached_client.sglang.settings import EXTRA_CONFIG

_ROOT: Final = Path(__file__).resolve().parents[1]
_SCRIPT: Final = Path(__file__).with_name("sglang_engine.py")
#: What stands in for packages of GPUs.
_STAND_INS: Final = _ROOT / "tests" / "sglang" / "cpu"

#: Folder of SGLang's environment; a relative one is in the checkout.
VARIABLE: Final = "SGLANG_VENV"

#: What is below SGLang's two pools: nothing, kvcached, or files as SGLang itself writes them.
Storage = Literal["plain", "kvcached", "file"]
STORAGES: Final[tuple[Storage, ...]] = ("plain", "kvcached", "file")
#: Of a storage's pages, for a prompt to be looked for: as few as there are.
_THRESHOLD: Final = {"prefetch_threshold": BLOCK_SIZE}

_VARIABLES: Final = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",  # one core computes, one is left for all else
}
_OPTIONS: Final[dict[str, Any]] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "skip_tokenizer_init": True,
    "disable_cuda_graph": True,
    "disable_overlap_schedule": True,
    "page_size": BLOCK_SIZE,
    "context_length": 2048,
    "log_level": "warning",
    "random_seed": 1,
    "sleep_on_idle": True,  # else its scheduler asks for work all the time
    "enable_hierarchical_cache": True,
    "hicache_ratio": 2.0,
    "hicache_io_backend": "direct",
    "hicache_mem_layout": "page_first_direct",
    "hicache_write_policy": "write_through",
    "hicache_storage_prefetch_policy": "wait_complete",
}


def interpreter() -> Path:
    """Python of SGLang's environment; SystemExit, with what to run, if there is none."""
    return interpreter_of("SGLang", VARIABLE)


@contextlib.contextmanager
def running_engine(
    name: str, directory: Path, model: Path, *, cache_tokens: int, storage: Storage, run_dir: Path
) -> Iterator[Engine]:
    """An SGLang engine with hierarchical cache; its log goes to ``<directory>/<name>.log``.

    Args:
        name: of its log.
        directory: where it runs, with the files of the storage ``file``.
        model: folder.
        cache_tokens: of SGLang's device pool; its host pool takes twice as many.
        storage: below them.
        run_dir: of the daemon, for the storage ``kvcached``.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHED_")}
    variables = {
        **inherited,
        **_VARIABLES,
        "PYTHONPATH": str(_STAND_INS),
        "KVCACHED_RUN_DIR": str(run_dir),
        "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(directory / "pages"),
    }
    options = {**_OPTIONS, "model_path": str(model), "max_total_tokens": cache_tokens, **_below(storage)}
    command = [str(interpreter()), "-P", str(_SCRIPT), json.dumps(options)]
    with running(command, directory / f"{name}.log", variables) as engine:
        yield engine


def _below(storage: Storage) -> dict[str, str]:
    """SGLang's options for a storage."""
    if storage == "plain":
        return {}
    extra = {**EXTRA_CONFIG, **_THRESHOLD} if storage == "kvcached" else _THRESHOLD
    return {
        "hicache_storage_backend": "dynamic" if storage == "kvcached" else storage,
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
