"""Kills vLLM again and again while it computes on memory of the daemon, and compares all its answers with stock vLLM's.

    python -m tests.vllm.warm_loop MODEL [--kills 100] [--ranks 1] [--seed 1] [--mistake]

Engines take turns on roomy memory, where what is found after a kill is counted, and on memory that is too small for all
prompts, so that blocks are overwritten all the time, with the host tier beside it. Each engine is killed at a random
instant of its start or its work; the next one is asked first what was being overwritten. With `--mistake`, blocks that
are overwritten keep their names: answers must then be wrong, or the comparison sees nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from kvcached_client import Admin
from tests.project.source_tree import ROOT
from tests.vllm.cache_daemon import CacheDaemon
from tests.vllm.completions import BLOCK_SIZE, random_tokens
from tests.vllm.server import CONNECTOR, environment, interpreter

PROMPTS = 24
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
EVENT_TIMEOUT_S = 240
#: Part of the engines that are killed during their start.
STARTS = 0.1


@dataclass
class Outcome:
    """What many lives have come to.

    Attributes:
        kills: engines that were killed.
        starts: of these, during their start.
        answers: that were compared.
        wrong: of these.
        completed: blocks of prompts that were answered on roomy memory before a kill.
        found: of these, found by the next engine.
        adopted: blocks that engines found in their memory when they started.
        warm_s: from the start of an engine to its first answer, of those that found blocks.
    """

    kills: int = 0
    starts: int = 0
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


@dataclass
class Life:
    """What an engine has told.

    Attributes:
        answers: by the prompt's number.
        cached: tokens of each prompt that were found in device memory.
        adopted: blocks that it found in its memory.
        up_s: from its start until it could take requests; 0 if it was killed before.
        first_s: until its first answer.
        work_s: from when it was up to its end.
    """

    answers: dict[int, list[int]] = field(default_factory=dict)
    cached: dict[int, int] = field(default_factory=dict)
    adopted: int = 0
    up_s: float = 0.0
    first_s: float = 0.0
    work_s: float = 0.0

    @property
    def is_up(self) -> bool:
        """Whether it was killed at work, or not at all."""
        return self.up_s > 0


class Kill(NamedTuple):
    """When to kill an engine: so long after it was started, or after it was up."""

    is_at_work: bool
    after_s: float


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
        self._send(work)
        start, life, end = time.monotonic(), Life(), math.inf
        if kill is not None and not kill.is_at_work:
            end = start + kill.after_s
        while True:
            try:
                event = self._events.get(timeout=min(EVENT_TIMEOUT_S, max(end - time.monotonic(), 0)))
            except queue.Empty:
                assert end < math.inf, self.log.read_text(errors="replace")[-6000:]
                self._send({"kill": True})
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
            life.up_s = now_s
        elif event["event"] == "answer":
            life.first_s = life.first_s or now_s
            number = order[event["number"]]
            life.answers[number], life.cached[number] = event["tokens"], event["cached"]

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
        ranks: processes of an engine that compute.
        seed: of all that is random.
        mistake: whether engines make the mistake that the comparison must see.
    """

    def __init__(self, directory: Path, model: Path, *, ranks: int = 1, seed: int = 1, mistake: bool = False) -> None:
        self._rng = random.Random(seed)
        self._model, self._ranks, self._mistake = model, ranks, mistake
        shared = random_tokens(f"shared {seed}", 6)
        self._prompts = [
            [*(shared if number % 3 == 0 else []), *random_tokens(f"{seed} {number}", 14 + number % 5)]
            for number in range(PROMPTS)
        ]
        self.daemon = CacheDaemon(directory, slabs=8, device_memory_bytes=DEVICE_MEMORY_BYTES)
        self.outcome = Outcome()
        self._edge: dict[int, list[int]] = {ROOMY: [], SMALL: []}  #: prompts that were being computed at a kill
        self._answered: list[int] = []  #: on roomy memory, before the last kill
        self._forks = contextlib.ExitStack()

    @contextlib.contextmanager
    def running(self, directory: Path) -> Iterator[WarmLoop]:
        """With the daemon, and stock vLLM's answers."""
        self.daemon.start()
        forks = Forks(directory / "engines.log", self.daemon.run_dir)
        try:
            self._engines = forks
            stock = forks.live(self._work(ROOMY, list(range(PROMPTS)), is_stock=True), list(range(PROMPTS)), None)
            assert len(stock.answers) == PROMPTS, forks.log.read_text(errors="replace")[-6000:]
            self._expected = stock.answers
            self._up_s, self._work_s = stock.up_s, stock.work_s
            yield self
        finally:
            forks.close()
            self.daemon.stop()

    def kill_once(self, number: int) -> None:
        """One engine that is killed, and what the comparison says of its answers."""
        size = (ROOMY, SMALL)[number % 2]
        is_at_work = self._rng.random() > STARTS
        kill = Kill(is_at_work, self._rng.uniform(0, self._work_s if is_at_work else self._up_s))
        self._set_paused(is_paused=size == ROOMY)
        order = self._order(size)
        life = self._engines.live(self._work(size, order), order, kill)
        self._compare(life, size, order)
        self.outcome.kills += 1
        self.outcome.starts += not life.is_up

    def finish(self) -> None:
        """Ask for everything once more, on both memories."""
        for size in (ROOMY, SMALL):
            self._set_paused(is_paused=size == ROOMY)
            order = self._order(size)
            life = self._engines.live(self._work(size, order), order, None)
            assert len(life.answers) == PROMPTS, self._engines.log.read_text(errors="replace")[-6000:]
            self._compare(life, size, order)

    def _order(self, size: int) -> list[int]:
        """First what was being computed at the last kill, then what was answered before it, then the rest."""
        first = list(dict.fromkeys([*self._edge[size], *(self._answered if size == ROOMY else [])]))
        if size == SMALL and self._rng.random() < 0.5:
            first.reverse()
        rest = [number for number in range(PROMPTS) if number not in first]
        self._rng.shuffle(rest)
        return first + rest

    def _compare(self, life: Life, size: int, order: list[int]) -> None:
        outcome = self.outcome
        outcome.adopted += life.adopted
        if life.adopted and life.first_s:
            outcome.warm_s.append(life.first_s)
        outcome.answers += len(life.answers)
        wrong = [number for number, tokens in life.answers.items() if tokens != self._expected[number]]
        outcome.wrong += len(wrong)
        if size == ROOMY and life.is_up:
            for number in self._answered:
                if number in life.cached:
                    outcome.completed += (len(self._prompts[number]) - 1) // BLOCK_SIZE
                    outcome.found += life.cached[number] // BLOCK_SIZE
            kept = [number for number in self._answered if number not in life.answers]
            self._answered = kept + list(life.answers)
        if life.is_up:
            self._edge[size] = [number for number in order if number not in life.answers][:4]
            self._edge[size] += [number for number in order if number not in self._edge[size]] if size == SMALL else []

    def _set_paused(self, *, is_paused: bool) -> None:
        """Without the host tier, what is found is found in device memory."""
        with Admin.connect(self.daemon.run_dir) as admin:
            admin.pause() if is_paused else admin.resume()

    def _work(self, size: int, order: list[int], *, is_stock: bool = False) -> dict[str, Any]:
        options = OPTIONS | {
            "model": str(self._model), "kv_cache_memory_bytes": size, "tensor_parallel_size": self._ranks
        }  # fmt: skip
        if not is_stock:
            extra = {"device_memory": "daemon", "hold_deadline_ms": 10_000}
            options["kv_transfer_config"] = CONNECTOR | {"kv_connector_extra_config": extra}
        prompts = [self._prompts[number] for number in order]
        return {"options": options, "prompts": prompts, "mistake": self._mistake and not is_stock}


def main() -> int:
    """The command; exit status 1 if an answer is wrong, or too little is found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("model", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--mistake", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warm-") as folder:
        directory = Path(folder)
        loop = WarmLoop(
            directory, arguments.model, ranks=arguments.ranks, seed=arguments.seed, mistake=arguments.mistake
        )
        with loop.running(directory):
            for number in range(arguments.kills):
                loop.kill_once(number)
                print(number, loop.outcome, f"{loop.outcome.share:.3f}", flush=True)  # noqa: T201
            loop.finish()
        print(loop.outcome, f"share {loop.outcome.share:.4f}")  # noqa: T201
    return int(bool(loop.outcome.wrong) != arguments.mistake)


if __name__ == "__main__":
    sys.exit(main())
