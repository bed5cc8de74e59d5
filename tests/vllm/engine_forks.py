"""Runs vLLM engines for tests, one after the other: vLLM is imported once, and every engine is a fork.

    python -P tests/vllm/engine_forks.py

Each line of stdin is an engine to run: a JSON object with `options` of `vllm.LLM`, with `on_device`, whether its KV
cache is memory of the fake CUDA device, with `is_async`, whether it schedules ahead as on GPUs, with `is_patient`,
whether each step waits for the stores of those before it, with `kernel_tokens`, the tokens of a block that attention
takes (0 = as many as a block has), and with `turns`. A turn is a list of prompts, which are
answered at the same time. vLLM forgets its own prefix cache before each turn. The reply is a line of stdout: a list
with a list of answers for each turn; an answer is an object with `tokens`, `logprobs` and `cached`. The engine has
ended then. stderr gets vLLM's log. Runs in vLLM's environment.
"""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import sys
import time
import traceback
from functools import cache
from typing import Any, cast

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_WORKER_MULTIPROC_METHOD": "fork"}

import vllm.v1.engine.llm_engine
import vllm.v1.executor.multiproc_executor
import vllm.v1.worker.cpu_worker
import vllm_stand_ins  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams

from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver, Stream
from kvcached_client.tensors import OtherMemory
from kvcached_client.vllm import connector
from kvcached_client.vllm.scheduling import waiting

TOKENS = 24
LOGPROBS = 4
#: How long an engine may take to find its daemon, and stores may keep its prefix cache from being reset.
TIMEOUT_S = 60
PAUSE_S = 0.02


def main() -> None:
    """Run the engines of stdin."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            os.close(reader)
            os._exit(run(json.loads(line), writer))
        os.close(writer)
        with os.fdopen(reader) as told:
            answers = told.read()
        os.waitpid(child, 0)
        replies.write((answers or "null") + "\n")
        replies.flush()


def run(work: dict[str, Any], writer: int) -> int:
    """Be an engine; returns its exit status."""
    # With a rate, a prompt may be computed because this machine reads slowly now.
    waiting._STEPS_MIN = sys.maxsize  # type: ignore[misc]
    engine = None
    try:
        if work["on_device"]:
            put_on_device()
        if work["is_patient"]:
            let_stores_keep_up()
        if work["is_async"]:
            vllm_stand_ins.switch_on_async_scheduling()
        if tokens := work["kernel_tokens"]:
            vllm_stand_ins.take_blocks_of(tokens)
        engine = LLM(**work["options"])
        if is_staged := work["options"].get("pipeline_parallel_size", 1) > 1:
            engine.collective_rpc(vllm_stand_ins.make_room_for_other_stages)
        if tokens:
            assert rows_of_a_block(engine) == engine.llm_engine.vllm_config.cache_config.block_size // tokens
        has_queue = engine.llm_engine.engine_core.engine_core.batch_queue is not None
        assert has_queue == (work["is_async"] or is_staged)
        if "kv_transfer_config" in work["options"]:
            wait_for_daemon(engine)
        answers = [turn(engine, prompts) for prompts in work["turns"]]
        forget(engine)  # when it may, all stores are over
        with os.fdopen(writer, "w") as told:
            json.dump(answers, told)
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
        return 1
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
    return 0


def rows_of_a_block(engine: LLM) -> int:
    """How many rows each of vLLM's blocks has in the tensors of attention. Those of states have one."""
    (caches,) = engine.collective_rpc(lambda worker: worker.model_runner.kv_caches)
    rows = max(int(each.shape[0]) for each in caches if not isinstance(each, list))
    return rows // int(engine.llm_engine.vllm_config.cache_config.num_gpu_blocks)


def put_on_device() -> None:
    """VLLM allocates its KV cache on the fake device, as torch does on a real one; the processor reaches it there."""
    found = cast("Any", connector)
    tensors_of = found.tensors_of

    @cache
    def device() -> tuple[Device, Stream]:  # of each rank, which is a process
        made = Device(Driver())
        return made, made.make_stream()

    def allocate(size_bytes: int) -> Any:
        address = int(device()[0].driver.call("cuMemAlloc", size_bytes))
        ctypes.memset(address, 0, size_bytes)
        return (ctypes.c_ubyte * size_bytes).from_address(address)

    # On CPUs vLLM spawns its ranks, which would know nothing of this.
    vllm.v1.executor.multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    found.KvcachedConnector.get_mem_pool_context = lambda _: OtherMemory(allocate)
    found.tensors_of = lambda caches, config: {
        name: vllm_stand_ins.shown_on_device(each) for name, each in tensors_of(caches, config).items()
    }
    found.current_stream = lambda _: device()[1].handle


def let_stores_keep_up() -> None:
    """Have steps wait for offers and copies: few blocks may be held, and what cannot be held is not stored."""
    found = cast("Any", connector.KvcachedConnector)
    order, report = found.build_connector_meta, found.build_connector_worker_meta

    def order_patiently(self: Any, output: Any) -> Any:
        side, deadline = self._of_scheduler(), time.monotonic() + TIMEOUT_S
        while side._store_queue._stores._planning or side._leases._seeking:
            assert time.monotonic() < deadline, "the daemon does not answer"
            self._link.hurry()
            time.sleep(PAUSE_S)
            side._take_events()
        return order(self, output)

    def report_patiently(self: Any) -> Any:
        assert self._of_worker()._is_idle.wait(TIMEOUT_S), "copies do not end"
        return report(self)

    found.build_connector_meta, found.build_connector_worker_meta = order_patiently, report_patiently


def turn(engine: LLM, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answer prompts at the same time, with an empty prefix cache of vLLM."""
    forget(engine)
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=LOGPROBS)
    done = engine.generate([{"prompt_token_ids": each} for each in prompts], wanted, use_tqdm=False)
    return [
        {
            "tokens": list(each.outputs[0].token_ids),
            "logprobs": [
                sorted((token, told.logprob) for token, told in likeliest.items())
                for likeliest in each.outputs[0].logprobs
            ],
            "cached": each.num_cached_tokens,
        }
        for each in done
    ]


def forget(engine: LLM) -> None:
    """Drop vLLM's own prefix cache. It refuses while blocks are held, as those are that a store reads.

    Stores go on with the engine's steps only.
    """
    deadline = time.monotonic() + TIMEOUT_S
    nothing = SamplingParams(max_tokens=1)
    while not engine.llm_engine.reset_prefix_cache():
        assert time.monotonic() < deadline, "blocks are still held"
        engine.generate([{"prompt_token_ids": [5, 6, 7]}], nothing, use_tqdm=False)


def wait_for_daemon(engine: LLM) -> None:
    """Until the connector has a session."""
    side = engine.llm_engine.engine_core.engine_core.scheduler.connector._of_scheduler()
    deadline = time.monotonic() + TIMEOUT_S
    while side.session is None:
        assert time.monotonic() < deadline, "no session with the daemon"
        time.sleep(PAUSE_S)
        side._take_events()


if __name__ == "__main__":
    main()
