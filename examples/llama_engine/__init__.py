"""A small Llama engine whose KV cache lives in kvcached: a template for engines that adopt it. See README.md."""

from examples.llama_engine.config import AttachedSettings, EngineSettings, Limits, LlamaConfig, ModelError
from examples.llama_engine.engine import Engine
from examples.llama_engine.generation import GenerationRequest, GenerationResult, InvalidRequest
from examples.llama_engine.shard_group import ShardDied

__all__ = [
    "AttachedSettings",
    "Engine",
    "EngineSettings",
    "GenerationRequest",
    "GenerationResult",
    "InvalidRequest",
    "Limits",
    "LlamaConfig",
    "ModelError",
    "ShardDied",
]
