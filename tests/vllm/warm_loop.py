"""Kills vLLM again and again while it computes on memory of the daemon, and compares all its answers with stock vLLM's.

Engines take turns on roomy memory, where what is found after a kill is counted, and on memory that is too small for all
prompts, so that blocks are overwritten all the time, with the host tier beside it. Each engine is killed at a random
instant of its start or its work; the next one is asked first what was being overwritten. `tests.vllm.kills` is the
command.
"""

from __future__ import annotations

import contextlib
import json
import math
import queue
import random
import re
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcached_client import Admin
from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, random_tokens
from tests.vllm.server import CONNECTOR, environment, interpreter

PROMPTS = 24
#: Of the prompts that were answered before a kill, how many of the last ones are asked for again.
RECENT = 16
ROOMY, SMALL = 1 << 25, 1 << 23
DEVICE_MEMORY_BYTES = 1 << 28
OPTIONS = {
    "dtype": "float32",
    "max_model_len": 1024,
    "block_size": BLOCK_SIZE,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,
    "enable_prefix_caching": True,
    "disable_log_stats": True,
}
_EXTRA = {"device_memory": "daemon", "hold_deadline_ms": 10_000}
AT_ONCE = 4  #: prompts that an engine answers
EVENT_TIMEOUT_S = 240
#: Part of the engines that are killed during their start.
STARTS = 0.1
#: The first instant at which no engine is killed at its work: when stock vLLM had answered so many prompts.
AT_WORK = 24


@dataclass
class Outcome:
    """What many lives have come to.

    Attributes:
        kills: engines that were killed.
        starts: of these, during their start.
        single_ranks: of these, by the death of one rank.
        answers: that were compared.
        wrong: of these.
        completed: blocks of prompts that were answered on roomy memory before a kill.
        found: of these, found by the next engine.
        adopted: blocks that engines found in their memory when they started.
        warm_s: from the start of an engine to its first answer, of those that found blocks.
    """

    kills: int = 0
    starts: int = 0
    single_ranks: int = 0
    answers: int = 0
    wrong: int = 0
    completed: int = 0
    found: int = 0
    adopted: int = 0
    warm_s: list[float] = field(default_factory=list)

    @property
    def share(self) -> float:
        """Part of the completed blocks that was found."""
        return self.found / max(self.completed, 1)


class Answer(NamedTuple):
    """To a prompt, by its number; with how many of its tokens were found in device memory."""

    number: int
    tokens: list[int]
    cached: int


@dataclass
class Life:
    """What an engine has told.

    Attributes:
        answers: in their order.
        adopted: blocks that it found in its memory.
        ranks: processes that compute, beside the scheduler's.
        up_s: from its start until it could take requests; 0 if it was killed before.
        first_s: until its first answer.
        work_s: from when it was up to its end.
    """

    answers: list[Answer] = field(default_factory=list)
    adopted: int = 0
    ranks: list[int] = field(default_factory=list)
    up_s: float = 0.0
    first_s: float = 0.0
    work_s: float = 0.0

    @property
    def numbers(self) -> list[int]:
        """Of the prompts that were answered; those that were answered last come last."""
        last = {answer.number: index for index, answer in enumerate(self.answers)}
        return sorted(last, key=last.__getitem__)

    def wrong(self, expected: dict[int, list[int]]) -> int:
        """How many answers are others."""
        return sum(answer.tokens != expected[answer.number] for answer in self.answers)

    @property
    def is_up(self) -> bool:
        """Whether it was killed at work, or not at all."""
        return self.up_s > 0


class Groups(NamedTuple):
    """Of a model whose groups of layers have caches of their own.

    Attributes:
        name: of its weights.
        unit: tokens of which a hit is a multiple.
        options: of `vllm.LLM`.
        at_once: prompts that an engine answers: 1 where an answer depends on what is computed beside it.
    """

    name: str
    unit: int
    options: dict[str, Any]
    at_once: int = AT_ONCE


class Kill(NamedTuple):
    """When to kill an engine: so long after it was started, or after it was up. Of one at work, perhaps one rank."""

    is_at_work: bool
    after_s: float
    rank: int | None = None


class Forks:
    """The process that forks engines."""

    def __init__(self, log: Path, run_dir: Path) -> None:
        self.log = log
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [interpreter(), "-P", ROOT / "tests/vllm/warm_forks.py"],
                cwd=log.parent,
                env=environment(run_dir),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._told = 0
        self._events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._pump = threading.Thread(target=self._read)
        self._pump.start()

    def live(self, work: dict[str, Any], order: list[int], kill: Kill | None) -> Life:
        """Run an engine, until it has answered everything, or is killed."""
        self._send(work | {"endless": kill is not None})
        start, life, end = time.monotonic(), Life(), math.inf
        if kill is not None and not kill.is_at_work:
            end = start + kill.after_s
        while True:
            try:
                event = self._events.get(timeout=min(EVENT_TIMEOUT_S, max(end - time.monotonic(), 0)))
            except queue.Empty:
                assert end < math.inf, self.log.read_text(errors="replace")[-6000:]
                rank = None if kill is None else kill.rank
                self._send({"kill": [] if rank is None else [life.ranks[rank]]})
                end = math.inf
                continue
            now_s = time.monotonic() - start
            if event["event"] == "over":
                life.work_s = now_s - life.up_s
                life.adopted = self._adopted()
                return life
            if event["event"] == "up" and kill is not None and kill.is_at_work:
                end = start + now_s + kill.after_s
            self._note(life, event, order, now_s)

    def _adopted(self) -> int:
        """What the last engine has written about its memory."""
        text = self.log.read_text(errors="replace")
        told, self._told = text[self._told :], len(text)
        found = re.search(r"kvcached: (\d+) of \d+ blocks of device memory are warm", told)
        return int(found[1]) if found else 0

    def _note(self, life: Life, event: dict[str, Any], order: list[int], now_s: float) -> None:
        if event["event"] == "up":
            life.up_s, life.ranks = now_s, event["ranks"]
        elif event["event"] == "answer":
            life.first_s = life.first_s or now_s
            life.answers.append(Answer(order[event["number"]], event["tokens"], event["cached"]))

    def _send(self, work: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(work) + "\n")
        self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._events.put(json.loads(line))

    def close(self) -> None:
        """End it, and its engine."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._pump.join()
        self._process.stdout.close()


class WarmLoop:
    """Engines of one model on one daemon, one after the other.

    Args:
        directory: for logs, and the daemon.
        model: the folder of the model.
        prompts: how many prompts there are.
        ranks: processes of an engine that compute.
        seed: of all that is random.
        faults: of `warm_forks.FAULTS`, that all engines have which are killed: the comparison must see them.
        groups: of the model; None = vLLM keeps all its layers alike.

    Attributes:
        expected: stock vLLM's answers, once it runs.
        outcome: of the engines that were killed, and of the last ones.
    """

    def __init__(
        self,
        directory: Path,
        model: Path,
        *,
        prompts: int = PROMPTS,
        ranks: int = 1,
        seed: int = 1,
        faults: Sequence[str] = (),
        groups: Groups | None = None,
    ) -> None:
        self._rng = random.Random(seed)
        self._model, self._ranks, self._faults, self._groups = model, ranks, faults, groups
        self._at_once = AT_ONCE if groups is None else groups.at_once
        connector: dict[str, Any] = CONNECTOR | {"kv_connector_extra_config": _EXTRA}
        if groups is not None:
            extra = _EXTRA | {"weights_version": groups.name}
            connector |= {"kv_connector": "KvcachedHybridConnector", "kv_connector_extra_config": extra}
        self._on_daemon = {"kv_transfer_config": connector}
        shared = random_tokens(f"shared {seed}", 6)
        self._prompts = [
            [*(shared if number % 3 == 0 else []), *random_tokens(f"{seed} {number}", 14 + number % 5)]
            for number in range(prompts)
        ]
        self.daemon = CacheDaemon(directory, slabs=8, device_memory_bytes=DEVICE_MEMORY_BYTES)
        self.outcome = Outcome()
        self._edge: dict[int, list[int]] = {ROOMY: [], SMALL: []}  #: prompts that were being computed at a kill
        self._answered: dict[int, list[int]] = {ROOMY: [], SMALL: []}  #: those that were answered last before it

    @contextlib.contextmanager
    def running(self, directory: Path) -> Iterator[WarmLoop]:
        """With the daemon, and stock vLLM's answers."""
        self.daemon.start()
        forks = Forks(directory / "engines.log", self.daemon.run_dir)
        try:
            self._engines = forks
            stock = self.stock(self._model)
            self.expected = {answer.number: answer.tokens for answer in stock.answers}
            self._up_s, self._work_s = stock.up_s, stock.work_s * min(AT_WORK / len(self._prompts), 1)
            yield self
        finally:
            forks.close()
            self.daemon.stop()

    def stock(self, model: Path) -> Life:
        """An engine without a connector, that answers everything."""
        return self._whole_life(self._options(ROOMY, model), list(range(len(self._prompts))), ())

    def live(self, size: int, order: list[int], *, faults: Sequence[str] = (), model: Path | None = None) -> Life:
        """An engine without the host tier, that answers everything, and is no part of the outcome."""
        self._set_paused(is_paused=True)
        return self._whole_life(self._options(size, model or self._model) | self._on_daemon, order, faults)

    def kill_once(self, number: int, *, is_one_rank: bool = False) -> None:
        """One engine that is killed, or one rank of it at work, and what the comparison says of its answers."""
        size = (ROOMY, SMALL)[number % 2]
        is_at_work = is_one_rank or self._rng.random() > STARTS
        after_s = self._rng.uniform(0, self._work_s if is_at_work else self._up_s)
        kill = Kill(is_at_work, after_s, self._rng.randrange(self._ranks) if is_one_rank else None)
        self._set_paused(is_paused=size == ROOMY)
        order = self._order(size)
        options = self._options(size, self._model) | self._on_daemon
        life = self._engines.live(self._work(options, order, self._faults), order, kill)
        self._compare(life, size, order)
        self.outcome.kills += 1
        self.outcome.starts += not life.is_up
        self.outcome.single_ranks += is_one_rank

    def finish(self) -> None:
        """Ask for everything once more, on both memories."""
        for size in (ROOMY, SMALL):
            self._set_paused(is_paused=size == ROOMY)
            order = self._order(size)
            life = self._whole_life(self._options(size, self._model) | self._on_daemon, order, self._faults)
            self._compare(life, size, order)

    def _whole_life(self, options: dict[str, Any], order: list[int], faults: Sequence[str]) -> Life:
        life = self._engines.live(self._work(options, order, faults), order, None)
        assert len(life.answers) == len(order), self._engines.log.read_text(errors="replace")[-6000:]
        return life

    def _order(self, size: int) -> list[int]:
        """What was being computed at the last kill, and what was answered before it, then the rest.

        On small memory the former begin anywhere: somewhere in them is what was being overwritten.
        """
        first = list(dict.fromkeys([*self._edge[size], *self._answered[size]]))
        if size == SMALL and first:
            start = self._rng.randrange(len(first))
            first = first[start:] + first[:start]
            if self._rng.random() < 0.5:
                first.reverse()
        rest = [number for number in range(len(self._prompts)) if number not in first]
        self._rng.shuffle(rest)
        return first + rest

    def _compare(self, life: Life, size: int, order: list[int]) -> None:
        outcome = self.outcome
        outcome.adopted += life.adopted
        if life.adopted and life.first_s:
            outcome.warm_s.append(life.first_s)
        outcome.answers += len(life.answers)
        outcome.wrong += life.wrong(self.expected)
        if not life.is_up:
            return
        if size == ROOMY:
            self._count_found(life)
        kept = [number for number in self._answered[size] if number not in life.numbers]
        self._answered[size] = (kept + life.numbers)[-RECENT:]
        self._edge[size] = [number for number in order if number not in life.numbers][: self._at_once]

    def _count_found(self, life: Life) -> None:
        """Of the blocks of the prompts that were answered last before the kill."""
        first = {answer.number: answer.cached for answer in reversed(life.answers)}
        for number in self._answered[ROOMY]:
            if number in first:
                unit = BLOCK_SIZE if self._groups is None else self._groups.unit
                self.outcome.completed += (len(self._prompts[number]) - 1) // unit * unit // BLOCK_SIZE
                self.outcome.found += first[number] // BLOCK_SIZE

    def _set_paused(self, *, is_paused: bool) -> None:
        """Without the host tier, what is found is found in device memory."""
        with Admin.connect(self.daemon.run_dir) as admin:
            admin.pause() if is_paused else admin.resume()

    def _options(self, size: int, model: Path) -> dict[str, Any]:
        sizes = {"kv_cache_memory_bytes": size, "tensor_parallel_size": self._ranks}
        return OPTIONS | {"model": str(model)} | sizes | ({} if self._groups is None else self._groups.options)

    def _work(self, options: dict[str, Any], order: list[int], faults: Sequence[str]) -> dict[str, Any]:
        prompts = [self._prompts[number] for number in order]
        return {"options": options, "prompts": prompts, "at_once": self._at_once, "faults": list(faults)}
