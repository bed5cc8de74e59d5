"""Runs engines of vLLM: vLLM is imported once, and every engine is a fork, made before CUDA is initialised.

Says `ready` on stdout. Then each line of stdin is an engine to start: a JSON object with the `options` of `vllm.LLM`,
the `socket` where it is awaited, and `loads_nothing`, a fault. There it says `pid` and `backends` once it is up, and
answers each line, a JSON object: `prompts`, answered one after the other, or `at_once`; how many `tokens` each answer
has; `forget`, whether vLLM drops its own prefix cache first; `words`, whether the likeliest tokens at each place are
told as well. The reply has `answers`, and `seconds` of each, or of all at once. An engine ends when its connection
does. stderr gets vLLM's log. Runs where vLLM is installed.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import vllm.model_executor.models.gemma3
import vllm.model_executor.models.llama
import vllm.v1.worker.gpu_worker  # noqa: F401 - what engines need is imported once
from vllm import LLM, SamplingParams

from kvcached_client.copy_process.shards import ProcessShard
from kvcached_client.offload_shard import OffloadShard

LOGPROBS = 4
#: How long an engine may take to find its daemon, and stores may keep its prefix cache from being reset.
TIMEOUT_S = 30
PAUSE_S = 0.005


def main() -> None:
    """Fork the engines of stdin."""
    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as replies:
        replies.write("ready\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # vLLM logs to stdout
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if not os.fork():
            os.setsid()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os._exit(run(json.loads(line)))


def run(work: dict[str, Any]) -> int:
    """Be an engine; returns its exit status."""
    engine = None
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(work["socket"])
    stream = connection.makefile("rw")
    try:
        if work["loads_nothing"]:
            load_nothing()
        engine = LLM(**work["options"])
        if "kv_transfer_config" in work["options"]:
            wait_for_daemon(engine)
        tell(stream, {"pid": os.getpid(), "backends": backends(engine)})
        for line in stream:
            tell(stream, turn(engine, **json.loads(line)))
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
        return 1
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
    return 0


def load_nothing() -> None:
    """Say of each load that all its blocks are loaded, and copy none."""
    for shard in (ProcessShard, OffloadShard):
        shard.load = lambda self, job, *, after: []  # type: ignore[method-assign]


def turn(
    engine: LLM, *, prompts: list[list[int]], tokens: int, forget: bool, at_once: bool, words: bool
) -> dict[str, Any]:
    """Answer prompts."""
    if forget:
        drop_prefix_cache(engine)
    told = LOGPROBS if words else None
    wanted = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, logprobs=told, detokenize=words)
    answers: list[dict[str, Any]] = []
    seconds: list[float] = []
    for some in [prompts] if at_once else [[prompt] for prompt in prompts]:
        began = time.perf_counter()
        done = engine.generate([{"prompt_token_ids": each} for each in some], wanted, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
        answers += map(answer, done)
    return {"answers": answers, "seconds": seconds}


def answer(output: Any) -> dict[str, Any]:
    """Its tokens, the likeliest tokens at each place if they are wanted, and how much of the prompt was cached."""
    (completion,) = output.outputs
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [
            sorted((token, each.logprob) for token, each in likeliest.items())
            for likeliest in completion.logprobs or ()
        ],
        "cached": output.num_cached_tokens,
    }


def drop_prefix_cache(engine: LLM) -> None:
    """VLLM refuses while blocks are held, as those are that a store reads; stores go on with the engine's steps."""
    deadline = time.monotonic() + TIMEOUT_S
    nothing = SamplingParams(max_tokens=1)
    while not engine.llm_engine.reset_prefix_cache():
        if time.monotonic() > deadline:
            raise TimeoutError(f"blocks are still held after {TIMEOUT_S} s")
        engine.generate([{"prompt_token_ids": [5, 6, 7]}], nothing, use_tqdm=False)


def wait_for_daemon(engine: LLM) -> None:
    """Until the connector has a session."""
    side = engine.llm_engine.engine_core.engine_core.scheduler.connector._of_scheduler()
    deadline = time.monotonic() + TIMEOUT_S
    while side.session is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no session with the daemon after {TIMEOUT_S} s")
        time.sleep(PAUSE_S)
        side._take_events()


def backends(engine: LLM) -> list[str]:
    """The names of the attention backends of the model's layers."""
    layers = engine.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    return sorted({layer.get_attn_backend().get_name() for layer in layers if hasattr(layer, "get_attn_backend")})


def tell(stream: Any, reply: dict[str, Any]) -> None:
    """Write a reply at once."""
    stream.write(json.dumps(reply) + "\n")
    stream.flush()


if __name__ == "__main__":
    main()
