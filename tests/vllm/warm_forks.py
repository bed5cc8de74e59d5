"""Runs vLLM engines that are killed: vLLM is imported once, and each engine is a fork with a session of its own.

    python -P tests/vllm/warm_forks.py

Each line of stdin is a JSON object: with `kill`, the processes that it names are killed, or without names all of the
engine; else it has the `options` of `vllm.LLM` and the `prompts` of a new engine, which it answers `at_once` at a time,
in this order, `endless` or once, and the `faults` of `FAULTS` that it has, mistakes and stand-ins. stdout gets a JSON
object for each event: `forked`, `up` with the processes of the ranks, one for each answer with its `number`, and
`over`. stderr gets vLLM's log. Runs in vLLM's environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import sys
import threading
import traceback
from collections.abc import Collection
from functools import cache
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
import vllm.v1.engine.llm_engine
import vllm.v1.worker.cpu_worker
import vllm_stand_ins  # type: ignore[import-not-found]
from vllm import LLM, SamplingParams
from vllm.v1.executor import multiproc_executor

from kvcached_client import tensors
from kvcached_client.cuda import engine_pool
from kvcached_client.cuda.device import Device
from kvcached_client.cuda.driver import Driver, Stream
from kvcached_client.vllm import connector, device_memory, device_table
from kvcached_client.vllm.device_memory import RankMemory
from kvcached_client.vllm.device_table import DeviceTable
from kvcached_client.vllm.scheduling.device_blocks import DeviceBlocks

# On CPUs vLLM spawns its ranks, each of which then imports vLLM again, and has no fault.
multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")

TOKENS = 12


def main() -> None:
    """Run and kill the engines of stdin."""
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    living: set[int] = set()
    for line in sys.stdin:
        work = json.loads(line)
        if "kill" in work:
            kill(work["kill"] or living)
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


def kill(processes: Collection[int]) -> None:
    """Kill processes, and the groups that they lead."""
    for process in list(processes):
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)


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
        for name in work["faults"]:
            FAULTS[name]()
        engine = LLM(**work["options"])
        core = engine.llm_engine.engine_core.engine_core
        if is_staged := work["options"].get("pipeline_parallel_size", 1) > 1:
            engine.collective_rpc(vllm_stand_ins.make_room_for_other_stages)
        assert (core.batch_queue is not None) == ("async_scheduling" in work["faults"] or is_staged)
        with os.fdopen(writer, "w") as told:
            serve(engine, work, told)
    except BaseException:  # noqa: BLE001 - the fork must not go on as its parent
        traceback.print_exc()
        return 1
    finally:
        if engine is not None:
            engine.llm_engine.engine_core.shutdown()
    return 0


def keep_names() -> None:
    """Blocks that are handed out keep their rows."""
    DeviceBlocks._handed_out = lambda self, block: None  # type: ignore[method-assign]


def no_table() -> None:
    """The scheduler does not get the table: the workers write blocks whose rows nobody clears."""
    device_table.claim_table = lambda question, settings: None  # type: ignore[attr-defined]


def keep_epoch() -> None:
    """Workers without a scheduler that keeps the table leave its rows as they are."""
    RankMemory.begin_step = lambda self, *, is_tracked: None  # type: ignore[method-assign]


def any_weights() -> None:
    """Blocks are adopted whatever they were computed with."""
    DeviceTable._is_same = lambda self, earlier: True  # type: ignore[method-assign]


def new_memory() -> None:
    """The second rank has other memory than before, which is vLLM's own."""
    allocate = RankMemory.allocate

    def allocate_elsewhere(self: RankMemory, size_bytes: int) -> object:
        memory = allocate(self, size_bytes)
        return None if self._question.rank == 1 else memory

    RankMemory.allocate = allocate_elsewhere  # type: ignore[method-assign, assignment]


def any_memory() -> None:
    """Ranks say that they have the pool's memory, whatever they have."""
    RankMemory.pool_id = lambda self, addresses: self._mapped.pool_id  # type: ignore[method-assign, union-attr]


def on_device() -> None:
    """No fault: the KV cache is memory of the fake CUDA device, which the processor reaches, and steps end late."""
    found: Any = connector
    tensors_of = found.tensors_of

    @cache
    def stream() -> Stream:  # of each rank, which is a process
        return Device(Driver()).make_stream()

    found.own_device = lambda kind, current_device: device_memory.own_device("cuda", lambda: 0)
    found.current_stream = lambda _: stream().handle
    found.tensors_of = lambda caches, config: {
        name: vllm_stand_ins.shown_on_device(each) for name, each in tensors_of(caches, config).items()
    }
    tensors.cuda_tensor = over_device_memory


def over_device_memory(array: Any) -> torch.Tensor:
    """A tensor on the CPU, which keeps the memory mapped."""
    interface = array.__cuda_array_interface__
    memory = (ctypes.c_ubyte * interface["shape"][0]).from_address(interface["data"][0])
    memory.owner = array
    return torch.frombuffer(memory, dtype=torch.int8)


def warm_up() -> None:
    """VLLM writes all blocks before it serves, as vLLM's GPU build writes some: the CPU build writes none."""
    original = vllm.v1.worker.cpu_worker.CPUWorker.compile_or_warm_up_model

    def overwrite(self: Any) -> Any:
        for caches in self.model_runner.kv_caches:
            for tensor in caches if isinstance(caches, list) else [caches]:
                tensor.fill_(7)
        return original(self)

    vllm.v1.worker.cpu_worker.CPUWorker.compile_or_warm_up_model = overwrite


def async_scheduling() -> None:
    """No fault: see `vllm_stand_ins`."""
    vllm_stand_ins.switch_on_async_scheduling()


def no_scratch() -> None:
    """The pool's memory is where the KV cache is while vLLM warms up."""
    engine_pool._Place.map_scratch = engine_pool._Place.map_memory  # type: ignore[method-assign]


FAULTS = {
    each.__name__: each
    for each in (
        *(keep_names, no_table, keep_epoch, any_weights, new_memory, any_memory, no_scratch),
        *(on_device, warm_up, async_scheduling),
    )
}


def serve(engine: LLM, work: dict[str, Any], told: Any) -> None:
    """Answer the prompts."""
    executor = engine.llm_engine.engine_core.engine_core.model_executor
    tell(told, {"event": "up", "ranks": [worker.proc.pid for worker in getattr(executor, "workers", ())]})
    wanted = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    prompts = work["prompts"]
    waiting = enumerate(itertools.cycle(prompts) if work["endless"] else prompts)
    while True:
        room = work["at_once"] - engine.llm_engine.get_num_unfinished_requests()
        for asked, prompt in itertools.islice(waiting, room):
            engine.llm_engine.add_request(str(asked), {"prompt_token_ids": prompt}, wanted)
        if not engine.llm_engine.has_unfinished_requests():
            go_on(engine)
            return
        for output in engine.llm_engine.step():
            if output.finished:
                number = int(output.request_id.split("-")[0]) % len(prompts)
                answer = {"number": number, "tokens": list(output.outputs[0].token_ids)}
                tell(told, {"event": "answer", **answer, "cached": output.num_cached_tokens})


def go_on(engine: LLM) -> None:
    """Do what the engine of a server does when it has no request: step until the connector waits for nothing."""
    core = engine.llm_engine.engine_core.engine_core
    while core.scheduler.has_requests():
        core.step_fn()


def tell(told: Any, event: dict[str, Any]) -> None:
    """Write an event at once."""
    told.write(json.dumps(event) + "\n")
    told.flush()


if __name__ == "__main__":
    main()
