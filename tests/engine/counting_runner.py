"""A runner that computes nothing, and what scheduler tests ask and wait for."""

from __future__ import annotations

import numpy as np

from examples.llama_engine.generation import GenerationRequest, GenerationResult
from examples.llama_engine.messages import Sample, Step, StepDone
from examples.llama_engine.scheduler import Scheduler


class CountingRunner:
    """The next token is the position it takes. Checks that every step is one a shard could run."""

    def __init__(self) -> None:
        self.steps: list[list[tuple[int, int]]] = []  # per item: [start, end)
        self.loads: list[list[int]] = []  # per item: tickets
        self.unread: list[int] = []  # of the next step

    def run(self, step: Step) -> StepDone:
        rows = [(item.start, item.start + len(item.tokens) // 4) for item in step.items]
        tables = [np.frombuffer(item.block_table, dtype=np.int32) for item in step.items]
        assert all(len(table) * 4 >= end for table, (_, end) in zip(tables, rows, strict=True))
        written = np.concatenate([table[start // 4 :] for table, (start, _) in zip(tables, rows, strict=True)])
        assert len(set(written.tolist())) == len(written)
        self.steps.append(rows)
        self.loads.append([len(item.loads) for item in step.items])
        unread, self.unread = self.unread, []
        samples = [Sample(end) for item, (_, end) in zip(step.items, rows, strict=True) if item.sample]
        return StepDone(samples, unread)


def drain(scheduler: Scheduler) -> list[GenerationResult]:
    """Step until idle; results in order of their end."""
    results = []
    while not scheduler.idle:
        results += scheduler.step()
    return results


def request(length: int, *, first: int = 0, **options: object) -> GenerationRequest:
    return GenerationRequest(prompt=list(range(first, first + length)), **options)  # type: ignore[arg-type]
