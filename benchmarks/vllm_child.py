"""The other end of `vllm_engine`: engines as child processes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks.engine_child import Engine, running
from benchmarks.local_model import BLOCK_SIZE
from benchmarks.vllm_environment import CONNECTOR, CONTEXT_TOKENS, environment, interpreter

_HERE: Final = Path(__file__).resolve().parent
_SCRIPT: Final = _HERE / "vllm_engine.py"

#: The module, and what it takes to import it without the rest of the checkout.
_TIMED_CONNECTOR: Final = {
    "kv_connector": "TimedConnector",
    "kv_connector_module_path": "benchmarks.vllm_timed_connector",
}
_TIMED_FILES: Final = ("__init__.py", "hook_clock.py", "vllm_timed_connector.py")


@contextlib.contextmanager
def running_engine(
    name: str,
    directory: Path,
    model: Path,
    *,
    cache_bytes: int,
    sequences: int,
    run_dir: Path | None,
    timed_hooks: Path | None = None,
) -> Iterator[Engine]:
    """A vLLM engine; its log goes to ``<directory>/<name>.log``.

    Args:
        name: of its log.
        directory: where it runs.
        model: folder.
        cache_bytes: of vLLM's own cache.
        sequences: that it runs at once.
        run_dir: of the daemon; None: without connector.
        timed_hooks: file for the times of the connector's hooks, see `hook_clock`.
    """
    settings: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": CONTEXT_TOKENS,
        "block_size": BLOCK_SIZE,
        "enforce_eager": True,
        "kv_cache_memory_bytes": cache_bytes,
        "max_num_seqs": sequences,
    }
    variables = environment(run_dir)
    if run_dir is not None:
        settings["kv_transfer_config"] = CONNECTOR
    if timed_hooks is not None:
        settings["kv_transfer_config"] = CONNECTOR | _TIMED_CONNECTOR
        variables |= {"HOOK_TIMES": str(timed_hooks), "PYTHONPATH": str(_timed_connector(directory))}
    command = [str(interpreter()), "-P", str(_SCRIPT), json.dumps(settings)]
    with running(command, directory / f"{name}.log", variables) as engine:
        yield engine


def _timed_connector(directory: Path) -> Path:
    """A folder that has the module of the timed connector, and kvcached-client not."""
    package = directory / "modules" / "benchmarks"
    package.mkdir(parents=True)
    for name in _TIMED_FILES:
        (package / name).symlink_to(_HERE / name)
    return package.parent
