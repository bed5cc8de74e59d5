"""The other end of `vllm_engine`: engines as child processes, each ended with its block."""

from __future__ import annotations

import contextlib
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.vllm_environment import BLOCK_SIZE, CONNECTOR, CONTEXT_TOKENS, environment, interpreter

_HERE: Final = Path(__file__).resolve().parent
_SCRIPT: Final = _HERE / "vllm_engine.py"
_STOP_TIMEOUT_S: Final = 60
_LOG_TAIL: Final = 4000

#: The module, and what it takes to import it without the rest of the checkout.
_TIMED_CONNECTOR: Final = {
    "kv_connector": "TimedConnector",
    "kv_connector_module_path": "benchmarks.vllm_timed_connector",
}
_TIMED_FILES: Final = ("__init__.py", "hook_clock.py", "vllm_timed_connector.py")

Prompts = Sequence[Sequence[int]]


class Engine:
    """An engine that is ready, or about to be: the first command waits for that.

    Attributes:
        process: its first process.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self._log = log
        self._is_ready = False

    def generate(self, prompts: Prompts, tokens: int) -> dict[str, Any]:
        """See `vllm_engine.generate`."""
        self.wait_until_ready()
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"prompts": prompts, "tokens": tokens}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def wait_until_ready(self) -> None:
        """Until commands are carried out at once.

        Raises:
            RuntimeError: it has ended; with the end of its log.
        """
        if not self._is_ready:
            self._read()
            self._is_ready = True

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            written = self._log.read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"vLLM has ended; its log ends with:\n{written[-_LOG_TAIL:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


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
    log = directory / f"{name}.log"
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [str(interpreter()), "-P", str(_SCRIPT), json.dumps(settings)],
            cwd=directory,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    try:
        yield Engine(process, log)
    finally:
        _stop(process)


def _timed_connector(directory: Path) -> Path:
    """A folder that has the module of the timed connector, and kvcached-client not."""
    package = directory / "modules" / "benchmarks"
    package.mkdir(parents=True)
    for name in _TIMED_FILES:
        (package / name).symlink_to(_HERE / name)
    return package.parent


def _stop(process: subprocess.Popen[str]) -> None:
    """Let it end by itself, which ends its other processes, too."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    process.stdout.close()
