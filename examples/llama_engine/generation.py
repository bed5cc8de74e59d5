"""What a user of the engine asks for and gets."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from kvcached_client.lease import CachePolicy

#: "no_capacity": the pool cannot hold it even with nobody else running.
FinishReason = Literal["stop", "length", "no_capacity"]


class InvalidRequest(ValueError):
    """A request that no engine, or not this model, can serve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Greedy continuation of a prompt."""

    prompt: list[int]
    max_tokens: int = 16
    eos: int | None = None  #: generation stops after this token
    cache: CachePolicy = "all"
    logits: bool = False  #: return the logits of every generated token

    def __post_init__(self) -> None:
        if not self.prompt or self.max_tokens < 1:
            raise InvalidRequest(f"{len(self.prompt)} prompt tokens, max_tokens {self.max_tokens}: both are at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationResult:
    """A continuation, and what the cache did for it."""

    name: str
    tokens: list[int]
    finish_reason: FinishReason
    hit_tokens: int  #: of the prompt; they were read, not computed
    loaded_tokens: int  #: so many of them came from the host pool
    first_token_ms: float  #: from submission, queueing included; 0 if there was none
    logits: list[NDArray[np.float32]] = field(default_factory=list)  #: [vocab] per generated token, if asked for
