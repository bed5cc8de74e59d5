"""`kvcached demo`: what the cache does for an engine, for its successor, and for another replica.

Rounds over the same prompts. On replica A: cold; again (device hit); again after other prompts took their place (host
hit); and after SIGKILL of the whole engine group and a restart. Then on replica B, whose engine computed none of them.
Then an engine that keeps its own device memory: cold, from the host pool, while the daemon is dead by a SIGKILL, and
again when it is back. Last everything is stopped and started again on empty memory: the prompts come from disk. The
engine is the example of the repository, run as a program: nothing here imports torch. However the demo ends, by a
signal too, its programs end with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Final, NamedTuple

import msgspec
from rich.console import Console

from examples.demo import programs as demo_programs
from examples.demo.programs import Answer, DemoError, Program
from examples.demo.report import (
    COLD,
    DAEMON_BACK,
    DAEMON_KILLED,
    DEVICE,
    DISK,
    ENGINE_KILLED,
    HOST,
    OWN_COLD,
    OWN_HOST,
    REPLICA,
    Report,
    Round,
    RoundKind,
    print_report,
)
from kvcached_client.transport.run_dir import SOCKET_PATH_BYTES_MAX

#: The checkout.
_ROOT: Final = Path(__file__).resolve().parents[2]
#: About 20 million random parameters: large enough that a cold prompt takes noticeable time on two cores.
_MODEL: Final = _ROOT / "examples" / "llama_engine" / "small-llama"
#: The longest path of a socket, from the demo's directory on.
_LONGEST_SOCKET: Final = "run/worker-a-0.sock"

_CHUNK_TOKENS: Final = 128
_BLOCK_TOKENS: Final = 16
#: Whole chunks and one token: a hit then leaves the rows that a cold run computes last, so logits can be compared.
_PROMPT_TOKENS: Final = 8 * _CHUNK_TOKENS + 1
_PROMPT_COUNT: Final = 2
_OUTPUT_TOKENS: Final = 16
#: Of each replica: the prompts and their outputs (66 blocks each), and not even half as much again.
_SLOTS: Final = 160
#: Prompts that are computed in between. They take more slots than there are, so that none is left to the former ones.
_FILLER_COUNT: Final = 3
_REPLICA: Final = f"""
[[replica]]
name = "{{name}}"
model = "demo-llama"
model_config = "{{model}}/config.json"
block_size = {_BLOCK_TOKENS}
shards = {{shards}}
slots = {_SLOTS}
{{device}}
"""
#: The host pool holds everything that the demo computes: about 480 blocks of 192 KiB, in two namespaces. So does the
#: disk, which has the prompts long before the last round: they are written as soon as they are in the host pool.
_CONFIG: Final = f"""
run_dir = "{{directory}}/run"

[host]
size_bytes = {176 << 20}
slab_bytes = {8 << 20}

[offload]

[storage]

[storage.settings]
directory = "{{directory}}/disk"
capacity_bytes = {256 << 20}
free_space_floor_bytes = 0
"""

_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: In place of a replica's name: an engine that keeps its own device memory.
ATTACHED: Final = "-"


class _Engines(NamedTuple):
    """What all engines of the demo have in common: shard processes, and where and how they compute."""

    tp: int
    device: str
    cuda_graphs: bool


def run_demo(*, json_output: bool, tp: int = 2, device: str = "cpu", cuda_graphs: bool = False) -> int:
    """Run the demo; the result on stdout, progress on stderr.

    Returns:
        0 if every output was identical and every round found its blocks where it was to, 1 if not, 3 if the demo could
        not run.

    Raises:
        SystemExit: SIGINT, SIGTERM or SIGHUP ended it, and 128 + signal is the status. Nothing of it is left.
    """
    console = Console(stderr=True)
    try:
        _require_engine()
        with _signals_end_it(), _directory() as directory:
            report = _run(directory, _Engines(tp, device, cuda_graphs), console)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 3
    if json_output:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print_report(report)
    missed = [each.name for each in report.rounds if not each.hits]
    for name in missed:
        console.print(f"demo: not found where it had to be: {name}", style="red", highlight=False)
    return 0 if report.outputs_identical and not missed else 1


@contextlib.contextmanager
def _signals_end_it() -> Iterator[None]:
    """The first signal that ends the demo does so from the inside out. Those after it are ignored: it is on its way."""

    def end(number: int, _: FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_IGN)
        sys.exit(128 + number)

    # one that is ignored already stays ignored, as nohup wants it
    before = {each: signal.getsignal(each) for each in _ENDING_SIGNALS if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


@contextlib.contextmanager
def _directory() -> Iterator[Path]:
    """A temporary directory that sockets fit into.

    Raises:
        DemoError: there is none, or its path is too long.
    """
    try:
        temporary = tempfile.TemporaryDirectory(prefix="kvcached-demo-")
    except OSError as error:
        raise DemoError(f"no temporary directory: {error.strerror}; set TMPDIR to one that can be written") from None
    with temporary as name:
        size = len(os.fsencode(Path(name, _LONGEST_SOCKET)))
        if size > SOCKET_PATH_BYTES_MAX:
            limit = f"{size} bytes, {SOCKET_PATH_BYTES_MAX} are possible"
            raise DemoError(f"the path of a socket in {name} would have {limit}; set TMPDIR to a shorter path")
        yield Path(name)


def _require_engine() -> None:
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        fix = f"make env, or pip install {' '.join(missing)}"
        raise DemoError(f"the example engine needs {' and '.join(missing)}: {fix}")


def _run(directory: Path, engines: _Engines, console: Console) -> Report:
    generator = random.Random(0)  # noqa: S311 - tokens, not secrets
    vocabulary = range(msgspec.json.decode((_MODEL / "config.json").read_bytes())["vocab_size"])
    drawn = [generator.choices(vocabulary, k=_PROMPT_TOKENS) for _ in range(_PROMPT_COUNT + _FILLER_COUNT)]
    prompts, fillers = drawn[:_PROMPT_COUNT], drawn[_PROMPT_COUNT:]
    show = _Progress(console)
    rounds: list[Round] = []
    cold: list[Answer] = []

    def ask(engine: Program, replica: str, kind: RoundKind) -> None:
        with show.step(f"{kind.meaning}: {len(prompts)} prompts of {_PROMPT_TOKENS} tokens", f"{kind.meaning}: done"):
            answers = demo_programs.ask(engine, prompts, output_tokens=_OUTPUT_TOKENS)
        cold.extend(answers if not rounds else [])
        rounds.append(_compare(kind, replica, answers, cold))

    with contextlib.ExitStack() as stack:
        with show.step("starting the daemon"):
            daemon = stack.enter_context(demo_programs.daemon(directory, _configuration(directory, engines)))
        show.line(
            f"daemon ready, pid {daemon.daemon_pid}: replicas a and b, each {_SLOTS} slots, {_shards(engines.tp)}"
        )

        with contextlib.ExitStack() as first_life:
            engine = _start(first_life, directory, engines, "a", show)
            ask(engine, "a", COLD)
            ask(engine, "a", DEVICE)
            with show.step(f"{_FILLER_COUNT} other prompts", f"{_FILLER_COUNT} other prompts took the slots: done"):
                demo_programs.ask(engine, fillers, output_tokens=1)
            ask(engine, "a", HOST)
            demo_programs.send(engine, prompts[0], output_tokens=_OUTPUT_TOKENS)  # it dies with a request on its hands
        killed_ns = time.monotonic_ns()
        show.line(f"SIGKILL to process group {engine.process.pid}")
        with contextlib.ExitStack() as second_life:
            engine = _start(second_life, directory, engines, "a", show)
            restart_ms = (time.monotonic_ns() - killed_ns) / 1e6
            ask(engine, "a", ENGINE_KILLED)
        with contextlib.ExitStack() as life:
            engine = _start(life, directory, engines, "b", show)
            ask(engine, "b", REPLICA)
        engine = _start(stack, directory, engines, ATTACHED, show)
        ask(engine, ATTACHED, OWN_COLD)
        ask(engine, ATTACHED, OWN_HOST)
        with daemon.kept_down():
            show.line(f"SIGKILL to the daemon, pid {daemon.kill_daemon()}; its supervisor is held")
            ask(engine, ATTACHED, DAEMON_KILLED)
        with show.step("waiting for the next daemon"):
            daemon.wait_ready()
        show.line(f"the next daemon is ready, pid {daemon.daemon_pid}")
        ask(engine, ATTACHED, DAEMON_BACK)
    show.line("engine, daemon and supervisor stopped: no memory is left")
    with contextlib.ExitStack() as stack:
        with show.step("starting the daemon"):
            daemon = stack.enter_context(demo_programs.daemon(directory, _configuration(directory, engines)))
        show.line(f"daemon ready, pid {daemon.daemon_pid}, on empty memory")
        engine = _start(stack, directory, engines, "a", show)
        ask(engine, "a", DISK)
    return Report(
        tp=engines.tp,
        prompt_tokens=[len(prompt) for prompt in prompts],
        output_tokens=_OUTPUT_TOKENS,
        restart_ms=restart_ms,
        rounds=rounds,
        outputs_identical=all(each.tokens_equal and each.logits_equal for each in rounds),
    )


class _Progress:
    """What the demo is doing, on stderr."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextlib.contextmanager
    def step(self, doing: str, done: str = "") -> Iterator[None]:
        """A line while the block runs, and one that stays after it."""
        with self._console.status(doing):
            yield
        if done:
            self.line(done)

    def line(self, text: str) -> None:
        """A line that stays."""
        self._console.print(text, highlight=False)


def _configuration(directory: Path, engines: _Engines) -> str:
    device = f'device = "{engines.device}"'
    if engines.device == "cuda":  # one device is enough for the demo
        device += f"\ncuda_devices = {[0] * engines.tp}"
    replicas = (_REPLICA.format(name=name, model=_MODEL, shards=engines.tp, device=device) for name in "ab")
    return _CONFIG.format(directory=directory) + "".join(replicas)


def _start(life: contextlib.ExitStack, directory: Path, engines: _Engines, replica: str, show: _Progress) -> Program:
    """An engine that ends with `life`."""
    where = f"--attached --block-size {_BLOCK_TOKENS}" if replica == ATTACHED else f"--replica {replica}"
    options = [
        *(f"{where} --tp {engines.tp} --device {engines.device} --chunk-tokens {_CHUNK_TOKENS}".split()),
        *(["--cuda-graphs"] if engines.cuda_graphs else []),
        *("--run-dir", str(directory / "run")),
        *("--model", str(_MODEL)),
    ]
    name = "engine with its own memory" if replica == ATTACHED else f"engine of replica {replica}"
    with show.step(f"starting the {name}"):
        engine = life.enter_context(demo_programs.engine(directory, options))
    show.line(f"{name} ready, process group {engine.process.pid}")
    return engine


def _compare(kind: RoundKind, replica: str, answers: list[Answer], first: list[Answer]) -> Round:
    return Round(
        name=kind.name,
        meaning=kind.meaning,
        replica=replica,
        source=kind.source,
        first_token_ms=[answer.first_token_ms for answer in answers],
        hit_tokens=[answer.hit_tokens for answer in answers],
        loaded_tokens=[answer.loaded_tokens for answer in answers],
        tokens_equal=[answer.tokens for answer in answers] == [answer.tokens for answer in first],
        logits_equal=[answer.logits_digest for answer in answers] == [answer.logits_digest for answer in first],
    )


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"
