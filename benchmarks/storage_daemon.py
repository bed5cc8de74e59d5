"""What storage costs an engine, and what its predictions are worth: the daemon's part of the suite ``storage``.

``python -m benchmarks.storage_daemon PATH VALUE_BYTES VALUES`` is the writer beside an idle daemon: for each line that
it reads it writes that many values past the page cache, and says so.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from benchmarks.attached_rig import AttachedRig, PageShape
from benchmarks.result import Result, Target, judge
from benchmarks.storage_rig import RawFile, in_threads, value_memory
from kvcached.storage.main import NICENESS
from kvcached_client import Admin

_THREADS: Final = 4
#: Of a burst: 256 MiB in blocks of 1 MiB.
_BURST: Final = PageShape("burst", layers=8, page_bytes=128 << 10, blocks=256)
#: Of a prompt that is fetched: 32 MiB in blocks of 512 KiB.
_PROMPT: Final = PageShape("prompt", layers=4, page_bytes=128 << 10, blocks=64)
_PROMPTS: Final = 30
_MATCHES_PER_LOOK: Final = 25
_RATES: Final = (0.25, 0.5, 0.7, 0.85, 1.0, 1.2, 1.4, 2.0, 4.0)
_CHOICES_PER_RATE: Final = 6


def match_beside_writes(directory: Path, rounds: int) -> Iterator[Result]:
    """Latency of `match` while storage writes a burst, over that while another process writes as many bytes."""
    with ExitStack() as parts:
        writing = parts.enter_context(_rig(_BURST, directory / "writing", "every"))
        idle = parts.enter_context(_rig(_BURST, directory / "idle", "never"))
        writer = parts.enter_context(_writer(directory / "raw"))
        medians: list[tuple[float, float]] = []
        tails: list[tuple[float, float]] = []
        for number in range(rounds + 1):
            ours = _burst(writing, _written(writing))
            theirs = _burst(idle, writer.go())
            if number:  # the first one has made files
                medians.append((statistics.median(ours), statistics.median(theirs)))
                tails.append((_tail(ours), _tail(theirs)))
    median, tail = _middle(medians), _middle(tails)
    target = Target("ratio", "<=", 1.2)
    yield judge("storage", "match_while_writing_us", median[0], "us", floor=median[1], target=target)
    yield judge("storage", "match_while_writing_p99_us", tail[0], "us", floor=tail[1])


def regret(directory: Path) -> Iterator[Result]:
    """Time that is spent, by what the daemon chooses, on fetching or computing prompts, over what an oracle spends."""
    with _rig(_PROMPT, directory / "choosing", "every") as rig:
        prompts = []
        for _ in range(_PROMPTS):
            rig.prepare_store()
            rig.store()
            rig.give_back()
            prompts.append(rig.keys)
            _wait(lambda: _blocks(rig) >= len(prompts) * _PROMPT.blocks)
        learned = [_fetch(rig, keys, 0.0)[1] for keys in prompts[:10]]
        crossover = rig.tokens / statistics.median(learned)
        chosen = best = 0.0
        wrong = 0
        for number, factor in enumerate(_RATES * _CHOICES_PER_RATE):
            rate = crossover * factor
            fetched, spent = _fetch(rig, prompts[number % _PROMPTS], rate)
            loading = spent if fetched else _fetch(rig, prompts[number % _PROMPTS], 0.0)[1]
            computing = rig.tokens / rate
            chosen += loading if fetched else computing + spent
            best += min(loading, computing)
            wrong += fetched != (loading < computing)
    yield judge("storage", "fetch_or_compute_regret", chosen / best - 1, "ratio", target=Target("value", "<=", 0.05))
    yield judge("storage", "fetch_or_compute_wrong_choices", wrong / len(_RATES) / _CHOICES_PER_RATE, "ratio")
    yield judge("storage", "crossover_tokens_per_s", crossover, "tokens/s")


class _Writer(NamedTuple):
    """A process that writes when it is told to."""

    program: subprocess.Popen[str]

    def go(self) -> Callable[[], Callable[[], bool]]:
        """As `_written`: start writing, and then say whether it is over."""

        def begin() -> Callable[[], bool]:
            assert self.program.stdin is not None
            assert self.program.stdout is not None
            self.program.stdin.write("go\n")
            self.program.stdin.flush()
            descriptor = self.program.stdout
            with ThreadPoolExecutor(1) as waiting:
                said = waiting.submit(descriptor.readline)
                waiting.shutdown(wait=False)
            return said.done

        return begin


@contextmanager
def _writer(path: Path) -> Iterator[_Writer]:
    value_bytes = _BURST.job_bytes // _BURST.blocks
    command = [sys.executable, "-m", "benchmarks.storage_daemon", str(path), str(value_bytes), str(_BURST.blocks)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as program:
        try:
            yield _Writer(program)
        finally:
            program.terminate()


@contextmanager
def _rig(shape: PageShape, directory: Path, backup: str) -> Iterator[AttachedRig]:
    directory.mkdir()
    more = f"""
[storage]
backup = "{backup}"
prefetch_threshold_blocks = 1
[storage.settings]
directory = "{directory / "disk"}"
capacity_bytes = {2 << 30}
free_space_floor_bytes = 0
threads = {_THREADS}
"""
    with AttachedRig(shape, directory, verify=True, more=more) as rig:
        yield rig


def _burst(rig: AttachedRig, begin: Callable[[], Callable[[], bool]]) -> list[float]:
    """Store new blocks in the host pool, and ask for a prompt again and again until something has been written."""
    rig.prepare_store()
    rig.store()
    rig.give_back()
    took: list[float] = []
    is_over = begin()
    while not is_over() or len(took) < _MATCHES_PER_LOOK:
        for _ in range(_MATCHES_PER_LOOK):
            start = time.perf_counter()
            found = rig.client.match(rig.keys, rig.tokens, full=True)
            took.append((time.perf_counter() - start) * 1e6)
            assert found == _BURST.blocks
    return took


def _written(rig: AttachedRig) -> Callable[[], Callable[[], bool]]:
    """Says when storage has written the burst that was stored last."""
    before = _blocks_written(rig)

    def begin() -> Callable[[], bool]:
        return lambda: _blocks_written(rig) >= before + _BURST.blocks

    return begin


def _blocks_written(rig: AttachedRig) -> int:
    with Admin.connect(rig.run_dir) as admin:
        return admin.storage().counters.get("written_blocks", 0)


def _blocks(rig: AttachedRig) -> int:
    with Admin.connect(rig.run_dir) as admin:
        return admin.storage().blocks


def _fetch(rig: AttachedRig, keys: bytes, rate: float) -> tuple[bool, float]:
    """Whether a prompt was fetched, and the seconds until that, or until the daemon has advised against it."""
    start = time.perf_counter()
    result = rig.client.prefetch(keys, rig.tokens, stop="wait_complete", prefill_tokens_per_s=rate, full=True)
    took = time.perf_counter() - start
    assert result.reason in {"fetched", "recompute"}, result
    # As an engine does next: until then the daemon keeps what it has fetched.
    rig.client.release(rig.client.acquire("fetched", keys, rig.tokens, full=True).lease)
    return result.reason == "fetched", took


def _wait(holds: Callable[[], bool]) -> None:
    while not holds():
        time.sleep(0.005)


def _middle(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    """The pair whose ratio is the median."""
    return sorted(pairs, key=lambda pair: pair[0] / pair[1])[len(pairs) // 2]


def _tail(took: list[float]) -> float:
    return sorted(took)[math.ceil(len(took) * 0.99) - 1]


def _write_when_told(path: Path, value_bytes: int, values: int) -> None:
    os.nice(NICENESS)  # as the storage process
    memory = [value_memory(value_bytes, 1)[1:] for _ in range(_THREADS)]
    file = RawFile(path, value_bytes, values)
    with ThreadPoolExecutor(_THREADS) as pool:

        def work(thread: int) -> None:
            for slot in range(thread, values, _THREADS):
                file.write(slot, memory[thread])

        for _ in sys.stdin:
            in_threads(pool, work, _THREADS)
            sys.stdout.write("written\n")
            sys.stdout.flush()


if __name__ == "__main__":
    _write_when_told(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
