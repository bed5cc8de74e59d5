"""Runs vLLM engines that are killed: vLLM is imported once, and each engine is a fork with a session of its own.

    python -P tests/vllm/warm_forks.py

Each line of stdin is a JSON object: with `kill`, the engine's processes are killed; else it has the `options` of
`vllm.LLM` and the `prompts` of a new engine, which it answers some at a time, in this order. stdout gets a JSON object
for each event: `forked`, `up`, one for each answer with its `number`, and
`over`. stderr gets vLLM's log. Runs in vLLM's environment.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import traceback
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}

import vllm.v1.engine.llm_engine
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker  # noqa: F401 - imported before the forks
from vllm import LLM, SamplingParams

from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks

TOKENS = 12
AT_ONCE = 4


def main() -> None:
    """Run and kill the engines of stdin."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    living: set[int] = set()
    for line in sys.stdin:
        work = json.loads(line)
        if "kill" in work:
            kill(living)
            continue
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.setsid()
            os.close(reader)
            os._exit(run(work, writer))
        os.close(writer)
        replies.write(json.dumps({"event": "forked", "pid": child}) + "\n")
        replies.flush()
        living.add(child)
        threading.Thread(target=pass_on, args=(reader, child, replies, living)).start()
    kill(living)


def kill(living: set[int]) -> None:
    """Kill all processes of engines that live."""
    for leader in list(living):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


def pass_on(reader: int, child: int, replies: Any, living: set[int]) -> None:
    """Pass on what an engine tells, and its end: all its processes have closed the pipe, or never had it."""
    with os.fdopen(reader) as told:
        for line in told:
            if line.endswith("\n"):  # not what a kill has cut
                replies.write(line)
                replies.flush()
    living.discard(child)
    os.waitpid(child, 0)
    replies.write(json.dumps({"event": "over"}) + "\n")
    replies.flush()


def run(work: dict[str, Any], writer: int) -> int:
    """Be an engine; returns its exit status."""
    engine = None
    try:
        if work.get("mistake"):
            forget_to_invalidate()
        engine = LLM(**work["options"])
        with os.fdopen(writer, "w") as told:
            serve(engine, work["prompts"], told)
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
        return 1
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
    return 0


def forget_to_invalidate() -> None:
    """The control: blocks that are handed out keep their rows."""
    DeviceBlocks._handed_out = lambda self, block: None  # type: ignore[method-assign]


def serve(engine: LLM, prompts: list[list[int]], told: Any) -> None:
    """Answer prompts, `AT_ONCE` at a time."""
    tell(told, {"event": "up"})
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    asked = 0
    while asked < len(prompts) or engine.llm_engine.has_unfinished_requests():
        while asked < len(prompts) and engine.llm_engine.get_num_unfinished_requests() < AT_ONCE:
            engine.llm_engine.add_request(str(asked), {"prompt_token_ids": prompts[asked]}, wanted)
            asked += 1
        for output in engine.llm_engine.step():
            if output.finished:
                answer = {"number": int(output.request_id.split("-")[0]), "tokens": list(output.outputs[0].token_ids)}
                tell(told, {"event": "answer", **answer, "cached": output.num_cached_tokens})


def tell(told: Any, event: dict[str, Any]) -> None:
    """Write an event at once."""
    told.write(json.dumps(event) + "\n")
    told.flush()


if __name__ == "__main__":
    main()
