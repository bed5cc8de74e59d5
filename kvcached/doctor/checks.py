"""Checks of an engine's environment: what its own interpreter says, and what only the daemon's side can see."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from kvcached.doctor import sglang_flags, sglang_layout
from kvcached.doctor.vllm_flags import VllmFlags, check_flags, check_model, parse
from kvcached.doctor.vllm_layout import check_layout
from kvcached_client.admin import Admin
from kvcached_client.doctor.checks import DISTRIBUTION, HASH_BLOCK_SIZE, HASHED_TOKENS, Finding, install_client
from kvcached_client.errors import KvcachedError
from kvcached_client.protocol.engine import OffloadInfo
from kvcached_client.vllm.keys import ALGORITHMS, VllmHashing, block_hashes

#: vLLM takes twenty seconds to import on an idle machine, minutes on a busy one.
DEADLINE_S: Final = 300
_VERSION_MIN: Final = (3, 11)
_VERSION_DEADLINE_S: Final = 30
#: In what an interpreter prints. Some print something else first: as where a sitecustomize says hello.
_VERSION: Final = re.compile(r"(\d+) (\d+)$", re.MULTILINE)
_NAME_IT: Final = "name the engine's interpreter: --python PYTHON"
_SEED_VARIABLE: Final = "PYTHONHASHSEED"
_MODULE: Final = "kvcached_client.doctor"
_NOTHING_SAID: Final[dict[str, Any]] = {"hashes": [], "error": "the process ended without an answer"}


def examine(python: str, run_dir: Path, model: str, vllm_arguments: Sequence[str]) -> Iterator[Finding]:
    """Every finding, those of the engine's interpreter first.

    Args:
        python: the engine's interpreter.
        run_dir: of the daemon.
        model: folder of the model or its config.json; "" for what `vllm_arguments` name.
        vllm_arguments: of vLLM; none where they are not to be checked.
    """
    flags, on_cuda = parse(vllm_arguments), False
    usable = _version(python)
    yield usable
    if usable.level != "fail":
        on_cuda = (yield from _ask_engine(python, run_dir, flags.algorithm)) == "cuda"
    if vllm_arguments:
        yield from check_flags(flags, os.environ, run_dir, on_cuda=on_cuda)
    if model or flags.model:
        yield from check_model(model or flags.model, flags, on_cuda=on_cuda)
    yield from _layout(run_dir, model or flags.model, flags, on_cuda=on_cuda)


def examine_sglang(python: str, run_dir: Path, model: str, arguments: Sequence[str]) -> Iterator[Finding]:
    """As `examine`, for SGLang's interpreter and arguments."""
    flags = sglang_flags.parse(arguments)
    yield from _findings_of(python, "--sglang", "--run-dir", str(run_dir))
    if arguments:
        yield from sglang_flags.check_flags(flags, run_dir)
    if model or flags.model:
        yield from sglang_flags.check_model(model or flags.model)
    offered = _offered(run_dir)
    if offered is None:
        return
    if arguments:
        yield from sglang_flags.check_namespaces(model or flags.model, flags, offered)
    if model or flags.model:
        yield from sglang_layout.check_layout(model or flags.model, flags, offered)


def examine_cuda(python: str) -> Iterator[Finding]:
    """What the CUDA driver and its devices can do, as an engine's interpreter finds it."""
    yield from _findings_of(python, "--cuda")


def _findings_of(python: str, *options: str) -> Iterator[Finding]:
    """Everything that an engine's interpreter finds."""
    usable = _version(python)
    yield usable
    if usable.level == "fail":
        return
    found = 0
    with _memory_file() as errors:
        with _started([python, "-P", "-m", _MODULE, *options], errors) as process:
            for found, line in enumerate(_lines(process), start=1):  # noqa: B007 - how many there were
                yield Finding(**line)
        if process.returncode or not found:
            yield _broken_off(python, process.returncode, errors)


def _version(python: str) -> Finding:
    """Whether there is an interpreter, of a version that can import the client."""
    command = [python, "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_VERSION_DEADLINE_S, check=True)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return Finding("python", "fail", f"{python}: {error}", _NAME_IT)
    if not (found := _VERSION.findall(done.stdout)):
        return Finding("python", "fail", f"{python}: it has not printed its version", _NAME_IT)
    version = tuple(map(int, found[-1]))
    if version < _VERSION_MIN:
        wanted = ".".join(map(str, _VERSION_MIN))
        text = f"{python} is version {'.'.join(map(str, version))}, {DISTRIBUTION} needs {wanted}"
        return Finding("python", "fail", text, f"make the engine's environment with Python {wanted} or newer")
    return Finding("interpreter", "ok", python)


def _ask_engine(python: str, run_dir: Path, algorithm: str) -> Generator[Finding, None, str]:
    """What the engine's interpreter finds, and whether another one of its processes hashes alike.

    Returns:
        The kind of device that vLLM computes on; empty if that is not known.
    """
    command = [python, "-P", "-m", _MODULE, "--hash-algo", algorithm]
    checks, hashes = [*command, "--run-dir", str(run_dir)], [*command, "--hash-only"]
    found, said = 0, _NOTHING_SAID
    with _memory_file() as errors, _memory_file() as other_errors:
        with _started(checks, errors) as first, _started(hashes, other_errors) as second:
            for line in _lines(first):
                if "check" in line:
                    yield Finding(**line)
                    found += 1
                else:
                    said = line
            other = next(_lines(second), _NOTHING_SAID)
        if first.returncode or not found:
            yield _broken_off(python, first.returncode, errors)
            return ""
    yield from _agreement(algorithm, said, other, os.environ)
    return str(said.get("device", ""))


def _memory_file() -> IO[str]:
    """A file for what a process says: a container may have no directory that can be written."""
    return open(os.memfd_create("doctor"), "w+")  # noqa: PTH123 - it has no path


def _started(command: list[str], errors: IO[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True)


def _lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """The JSON objects that a process prints, as they come; one that takes too long is ended."""
    watch = threading.Timer(DEADLINE_S, process.kill)
    watch.start()
    try:
        for line in process.stdout or ():
            try:
                said = json.loads(line)
            except ValueError:  # what the interpreter itself has printed, at its start
                continue
            if isinstance(said, dict):
                yield said
    finally:
        watch.cancel()


def _broken_off(python: str, code: int, errors: IO[str]) -> Finding:
    """Why the engine's side said nothing, or not all."""
    errors.seek(0)
    said = errors.read().strip().splitlines()
    reason = said[-1] if said else f"ended with {code}"
    if "kvcached_client" in reason:
        return Finding("client", "fail", f"{python}: {reason}", install_client(python))
    return Finding("engine", "fail", f"{python} -m {_MODULE}: {reason}", f"run it by hand: {python} -m {_MODULE}")


def _agreement(
    algorithm: str, one: dict[str, Any], other: dict[str, Any], environment: Mapping[str, str]
) -> Iterator[Finding]:
    """Whether two processes call the same blocks the same, and this project computes their names."""
    for each in (one, other):
        if each["error"]:
            yield Finding("hashes", "fail", f"block hashes of {algorithm}: {each['error']}", "see the message")
            return
    if not one["hashes"]:
        return  # there is no vLLM
    if one["hashes"] != other["hashes"]:
        yield Finding(
            "hashes",
            "fail",
            f"two processes hash the same tokens differently ({algorithm}): engines would share nothing",
            f"--prefix-caching-hash-algo sha256_cbor, or set {_SEED_VARIABLE} to the same number for every engine",
        )
        return
    if algorithm in ALGORITHMS:
        hashing = VllmHashing(HASH_BLOCK_SIZE, algorithm, environment.get(_SEED_VARIABLE))
        if [each.hex() for each in block_hashes(HASHED_TOKENS, hashing)] != one["hashes"]:
            fix = "report it with vLLM's version; the connector does not need them, `kvcached explain` does"
            yield Finding("hashes", "warn", "vLLM's block hashes are not those that kvcached computes", fix)
            return
    yield Finding("hashes", "ok", f"two processes hash the same tokens alike ({algorithm})")


def _layout(run_dir: Path, model: str, flags: VllmFlags, *, on_cuda: bool) -> Iterator[Finding]:
    offered = _offered(run_dir)
    if model and offered is not None:
        yield from check_layout(model, flags, offered, on_cuda=on_cuda)


def _offered(run_dir: Path) -> OffloadInfo | None:
    """What the daemon offers; that it does not answer has been said by the engine's side."""
    try:
        with Admin.connect(run_dir) as admin:
            return admin.describe().offload
    except KvcachedError:
        return None
