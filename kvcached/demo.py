"""`kvcached demo`: one daemon, one engine that is killed and started again, and what the cache did for it.

Three rounds over the same prompts: cold, again (device hit), and after SIGKILL of the whole engine group and a restart.
The engine is the example of the repository, run as a program: nothing here imports torch. However the demo ends, by a
signal too, its programs end with it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import random
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import IO, Final, cast

import msgspec
from rich.console import Console
from rich.table import Table

from kvcached import notify
from kvcached_client.rundir import SOCKET_PATH_BYTES_MAX

#: The directory that holds the `kvcached` package, and in a checkout `examples` beside it.
_ROOT: Final = Path(__file__).resolve().parents[1]
_ENGINE: Final = "examples.llama_engine"
_START_TIMEOUT_S: Final = 60
_ANSWER_TIMEOUT_S: Final = 60
_STOP_TIMEOUT_S: Final = 10

#: About 20 million random parameters: large enough that a cold prompt takes noticeable time on two cores.
_MODEL: Final = Path("examples", "llama_engine", "small-llama")
#: The longest path of a socket, from the demo's directory on.
_LONGEST_SOCKET: Final = "run/worker-default-0.sock"
_SLOTS: Final = 256
_CONFIG: Final = f"""
run_dir = "{{run_dir}}"

[[replica]]
name = "default"
model = "demo-llama"
model_config = "{{model}}/config.json"
block_size = 16
shards = {{shards}}
slots = {_SLOTS}
device = "cpu"
"""
_CHUNK_TOKENS: Final = 128
#: Whole chunks and one token: a hit then leaves the rows that a cold run computes last, so logits can be compared.
_PROMPT_TOKENS: Final = 8 * _CHUNK_TOKENS + 1
_PROMPT_COUNT: Final = 2
_OUTPUT_TOKENS: Final = 16

_ENDING_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
#: Runs a module as ``python -m`` does, after it has asked the kernel (PR_SET_PDEATHSIG) for a SIGTERM at the end of the
#: process that started it. A demo that gets a SIGKILL can end nothing itself.
_BOUND_TO_PARENT: Final = (
    "import ctypes, runpy, sys;"
    f"ctypes.CDLL(None).prctl(1, {signal.SIGTERM:d});"
    "del sys.argv[0];"
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


class DemoError(Exception):
    """The demo cannot run; the message says what to do."""


class Answer(msgspec.Struct, frozen=True):
    """One result line of the engine, as far as it is used here."""

    tokens: list[int]
    hit_tokens: int
    first_token_ms: float
    logits_digest: str


class Round(msgspec.Struct, frozen=True):
    """All prompts once. Times and counts by prompt."""

    name: str
    first_token_ms: list[float]
    hit_tokens: list[int]
    tokens_equal: bool  #: to those of the first round
    logits_equal: bool  #: bit for bit, in every step


class Report(msgspec.Struct, frozen=True):
    """What `--json` prints."""

    tp: int
    prompt_tokens: list[int]
    output_tokens: int
    restart_ms: float  #: SIGKILL of the engine group until its successor is ready
    rounds: list[Round]
    outputs_identical: bool


def run_demo(*, json_output: bool, tp: int = 2) -> int:
    """Run the demo; the result on stdout, progress on stderr.

    Returns:
        0 if every output was identical and both later rounds hit, 1 if not, 3 if the demo could not run.

    Raises:
        SystemExit: SIGINT, SIGTERM or SIGHUP ended it, and 128 + signal is the status. Nothing of it is left.
    """
    console = Console(stderr=True)
    try:
        _require_engine()
        with _signals_end_it(), _directory() as directory:
            report = _run(directory, tp, console)
    except DemoError as error:
        console.print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 3
    if json_output:
        sys.stdout.buffer.write(msgspec.json.encode(report) + b"\n")
        sys.stdout.buffer.flush()
    else:
        _print_table(report)
    warm = all(min(each.hit_tokens) > 0 for each in report.rounds[1:])
    return 0 if report.outputs_identical and warm else 1


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
    if not (_ROOT / "examples" / "llama_engine").is_dir():
        raise DemoError("the example engine is not here; run it from a checkout: make demo")
    missing = [name for name in ("torch", "safetensors") if importlib.util.find_spec(name) is None]
    if missing:
        fix = f"make env, or pip install {' '.join(missing)}"
        raise DemoError(f"the example engine needs {' and '.join(missing)}: {fix}")


def _run(directory: Path, tp: int, console: Console) -> Report:
    generator = random.Random(0)  # noqa: S311 - tokens, not secrets
    vocabulary = range(msgspec.json.decode((_ROOT / _MODEL / "config.json").read_bytes())["vocab_size"])
    prompts = [generator.choices(vocabulary, k=_PROMPT_TOKENS) for _ in range(_PROMPT_COUNT)]
    rounds: dict[str, list[Answer]] = {}

    def ask(name: str, engine: _Program) -> None:
        with console.status(f"{name}: {len(prompts)} prompts of {_PROMPT_TOKENS} tokens"):
            rounds[name] = _ask(engine, prompts)
        console.print(f"{name}: done", highlight=False)

    with contextlib.ExitStack() as stack:
        with console.status("starting the daemon"):
            daemon = stack.enter_context(_daemon(directory, tp))
        console.print(f"daemon ready, pid {daemon.process.pid}: {_SLOTS} slots, {_shards(tp)}", highlight=False)
        with contextlib.ExitStack() as first_life:
            with console.status("starting the engine"):
                engine = first_life.enter_context(_engine(directory, tp))
            console.print(f"engine ready, process group {engine.process.pid}", highlight=False)
            ask("cold", engine)
            ask("device hit", engine)
            _send(engine, prompts[0])  # it dies with a request on its hands
        killed_ns = time.monotonic_ns()
        console.print(f"SIGKILL to process group {engine.process.pid}", highlight=False)
        with console.status("starting the engine again"):
            engine = stack.enter_context(_engine(directory, tp))
        restart_ms = (time.monotonic_ns() - killed_ns) / 1e6
        console.print(f"engine ready, process group {engine.process.pid}", highlight=False)
        ask("restarted, warm", engine)
    compared = [_compare(name, answers, rounds["cold"]) for name, answers in rounds.items()]
    return Report(
        tp=tp,
        prompt_tokens=[len(prompt) for prompt in prompts],
        output_tokens=_OUTPUT_TOKENS,
        restart_ms=restart_ms,
        rounds=compared,
        outputs_identical=all(each.tokens_equal and each.logits_equal for each in compared),
    )


class _Program:
    """A program that the demo runs, in a process group of its own. It writes to a log; its end is an error."""

    def __init__(self, name: str, arguments: list[str], directory: Path, **environment: str) -> None:
        self._name = name
        # settings meant for a real daemon must not reach this one
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("KVCACHED_")}
        self._log_path = directory / f"{name}.log"
        with self._log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _BOUND_TO_PARENT, *arguments],
                cwd=_ROOT,
                env={**inherited, **environment},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        self.stdin = cast("IO[bytes]", self.process.stdin)
        self.stdout = cast("IO[bytes]", self.process.stdout)

    def wait_readable(self, source: int, timeout_s: float) -> None:
        """Until the descriptor `source` has data.

        Raises:
            DemoError: the program ended, or said nothing in time.
        """
        pidfd = os.pidfd_open(self.process.pid)
        try:
            readable, _, _ = select.select([source, pidfd], [], [], timeout_s)
        finally:
            os.close(pidfd)
        if pidfd in readable or not readable:
            raise self.failure("ended" if readable else f"said nothing for {timeout_s:.0f} s")

    def failure(self, what: str) -> DemoError:
        """What happened, and the end of the log."""
        log_end = self._log_path.read_text(errors="replace")[-2000:]
        return DemoError(f"the {self._name} {what}; the end of its log:\n{log_end}")

    def stop(self) -> None:
        """Ask the program to end, and wait until it has; kill its group if it does not."""
        self.process.terminate()
        try:
            self.process.communicate(timeout=_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, and wait for the program."""
        with contextlib.suppress(ProcessLookupError):  # nobody of it is left
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate()


@contextlib.contextmanager
def _daemon(directory: Path, tp: int) -> Iterator[_Program]:
    """A daemon with one replica for the demo's model, from ready to stopped."""
    (directory / "run").mkdir(mode=0o750)
    config = directory / "kvcached.toml"
    config.write_text(_CONFIG.format(run_dir=directory / "run", model=_ROOT / _MODEL, shards=tp))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(directory / "notify.sock"))
        arguments = ["kvcached", "serve", "--config", str(config)]
        program = _Program("daemon", arguments, directory, **{notify.VARIABLE: str(directory / "notify.sock")})
        try:
            notice = b""
            while notice != notify.READY.encode():
                program.wait_readable(notices.fileno(), _START_TIMEOUT_S)
                notice = notices.recv(4096)
            yield program
        finally:
            program.stop()


@contextlib.contextmanager
def _engine(directory: Path, tp: int) -> Iterator[_Program]:
    """The example engine, from ready to killed."""
    arguments = [
        *(f"{_ENGINE} serve --tp {tp} --chunk-tokens {_CHUNK_TOKENS}".split()),
        *("--run-dir", str(directory / "run")),
        *("--model", str(_MODEL)),
    ]
    program = _Program("engine", arguments, directory)
    try:
        _receive(program, _START_TIMEOUT_S)
        yield program
    finally:
        program.kill()


def _send(engine: _Program, prompt: list[int]) -> None:
    line = msgspec.json.encode([{"prompt": prompt, "max_tokens": _OUTPUT_TOKENS, "logits": True}])
    try:
        engine.stdin.write(line + b"\n")
        engine.stdin.flush()
    except BrokenPipeError:
        raise engine.failure("ended") from None


def _receive(engine: _Program, timeout_s: float) -> bytes:
    engine.wait_readable(engine.stdout.fileno(), timeout_s)
    line = engine.stdout.readline()
    if not line:
        raise engine.failure("ended")
    return line


def _ask(engine: _Program, prompts: list[list[int]]) -> list[Answer]:
    """One prompt at a time, so that a step holds the same rows in every round."""
    answers = []
    for prompt in prompts:
        _send(engine, prompt)
        line = _receive(engine, _ANSWER_TIMEOUT_S)
        try:
            answers += msgspec.json.decode(line, type=list[Answer])
        except msgspec.DecodeError as error:
            raise DemoError(f"the engine answered {line[:200]!r}: {error}") from None
    return answers


def _compare(name: str, answers: list[Answer], first: list[Answer]) -> Round:
    return Round(
        name=name,
        first_token_ms=[answer.first_token_ms for answer in answers],
        hit_tokens=[answer.hit_tokens for answer in answers],
        tokens_equal=[answer.tokens for answer in answers] == [answer.tokens for answer in first],
        logits_equal=[answer.logits_digest for answer in answers] == [answer.logits_digest for answer in first],
    )


def _print_table(report: Report) -> None:
    table = Table(title=f"{_PROMPT_COUNT} prompts of {_PROMPT_TOKENS} tokens, one at a time, TP={report.tp}")
    for heading in ("round", "first token", "hit tokens", "tokens", "logits"):
        table.add_column(heading, justify="right" if heading in {"first token", "hit tokens"} else "left", no_wrap=True)
    for each in report.rounds:
        table.add_row(
            each.name,
            "  ".join(f"{value:.0f} ms" for value in each.first_token_ms),
            "  ".join(str(value) for value in each.hit_tokens),
            "equal" if each.tokens_equal else "differ",
            "equal" if each.logits_equal else "differ",
        )
    console = Console()
    console.print(table)
    console.print(f"outputs identical: {'yes' if report.outputs_identical else 'no'}", highlight=False)


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"
