"""Gives vLLM's CPU build what only its GPU builds have. Programs that import vLLM have this folder on PYTHONPATH."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend


def switch_on_async_scheduling() -> None:
    """VLLM decides on a step before it has the output of the last one, as its GPU builds do by default.

    The CPU build switches that off, as it gains nothing there: a step is over when it is launched. Scheduler, queue of
    steps and placeholders of tokens are vLLM's own; streams and events of CUDA, behind which the runner copies what was
    sampled, do nothing here.
    """
    plain: Any = CpuPlatform.check_and_update_config

    def keep_async(_: type, config: Any) -> None:
        plain(config)
        config.scheduler_config.async_scheduling = True

    found: Any = torch
    CpuPlatform.check_and_update_config = classmethod(keep_async)
    found.Event = found.cuda.Event = found.cuda.Stream = _Nothing
    found.cuda.current_stream = lambda *_: _Nothing()
    found.cuda.stream = lambda *_: contextlib.nullcontext()


def take_blocks_of(tokens: int) -> None:
    """Attention takes blocks of so many tokens alone, as FlashInfer and FlashMLA do.

    VLLM divides larger ones: each has several rows of a layer's tensor then.
    """
    found: Any = CPUAttentionBackend
    found.get_supported_kernel_block_sizes = staticmethod(lambda *_: [tokens])


def make_room_for_other_stages(worker: Any) -> None:
    """What a pipeline stage gets from the one before goes where vLLM's warm-up has made room, which a CPU's lacks."""
    runner = worker.model_runner
    runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
        batch_size=runner.max_num_tokens, dtype=runner.dtype, device=runner.device
    )


class _Nothing:
    """A stream or an event whose work is always over."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: None


def shown_on_device(tensor: torch.Tensor) -> Any:
    """A tensor of vLLM's, as a CUDA build would show it."""
    return SimpleNamespace(
        device=SimpleNamespace(type="cuda"),
        **{name: getattr(tensor, name) for name in ("shape", "dtype", "stride", "element_size", "data_ptr")},
    )
