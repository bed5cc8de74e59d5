"""A request inside the engine: what it has produced, and what it holds while it runs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from examples.llama_engine.cache import BlockLease
from examples.llama_engine.generation import FinishReason, GenerationRequest, GenerationResult
from examples.llama_engine.storage import Fetch
from kvcached_client import KeyChain


@dataclass(slots=True)
class Sequence:
    """A request and what it has produced; it keeps this when it is preempted."""

    name: str
    request: GenerationRequest
    submitted_ns: int
    tokens: list[int]  #: prompt, then output
    fetch: Fetch | None = None  #: blocks that it waits for before it is admitted
    hit_tokens: int | None = None  #: of its first admission, once they can be read
    loaded_tokens: int = 0  #: so many of them came from the host pool
    first_token_ns: int | None = None
    logits: list[bytes] = field(default_factory=list)

    @property
    def output(self) -> list[int]:
        """Tokens generated so far."""
        return self.tokens[len(self.request.prompt) :]

    def finish_reason(self) -> FinishReason | None:
        """Why it is over, or None while it is not."""
        generated = len(self.tokens) - len(self.request.prompt)
        if generated and self.tokens[-1] == self.request.eos:
            return "stop"
        return "length" if generated >= self.request.max_tokens else None

    def result(self, reason: FinishReason) -> GenerationResult:
        """What its user gets."""
        return GenerationResult(
            name=self.name,
            tokens=self.output,
            finish_reason=reason,
            hit_tokens=self.hit_tokens or 0,
            loaded_tokens=self.loaded_tokens,
            first_token_ms=((self.first_token_ns or self.submitted_ns) - self.submitted_ns) / 1e6,
            logits=[np.frombuffer(row, dtype=np.float32) for row in self.logits],
        )


@dataclass(slots=True, eq=False)
class Running:
    """A sequence that holds a lease.

    Tokens [0, computed) have their K and V in the lease's slots, or will have when the lease has loaded;
    [computed, len(tokens)) are known and not computed.
    """

    sequence: Sequence
    lease: BlockLease
    chain: KeyChain  #: over all known tokens
    computed: int
    device_tokens: int  #: of the hit: they were in the pool when it was admitted
    is_held_back: bool  #: until its hit is there

    def note_hit(self) -> None:
        """Its hit can be read now; the first one counts."""
        sequence = self.sequence
        if sequence.hit_tokens is None:
            sequence.hit_tokens = self.lease.hit_tokens
            sequence.loaded_tokens = max(0, sequence.hit_tokens - self.device_tokens)
