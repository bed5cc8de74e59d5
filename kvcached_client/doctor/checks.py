"""Checks of an engine's environment, run by `kvcached doctor` in the engine's own interpreter.

    python -m kvcached_client.doctor [--run-dir DIR] [--sglang | --hash-algo NAME [--hash-only]]

Findings go to stdout as JSON, one per line; all other output goes to stderr. At first only the standard library is
imported, so that a missing package is a finding and not an import error.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import os
import re
import resource
import stat
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TextIO

if TYPE_CHECKING:
    from kvcached_client.protocol.engine import Description

Level = Literal["ok", "warn", "fail"]

DISTRIBUTION: Final = "kvcached-client"
DEADLINE_MS: Final = 5000
#: Tokens whose block hashes are computed: two blocks of 32.
HASHED_TOKENS: Final = tuple(range(64))
HASH_BLOCK_SIZE: Final = 32
_DESCRIPTORS_MIN: Final = 1024
_REQUIREMENT: Final = re.compile(r"^([A-Za-z0-9_.-]+)>=([0-9.]+)$")


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check, and what to do unless the level is "ok"."""

    check: str
    level: Level
    text: str
    fix: str = ""


def install_client(python: str) -> str:
    """How an interpreter gets the client. Not by a name: on an index, that may be another project's."""
    return f"in the daemon's checkout: {python} -m pip install ./kvcached_client; or install the wheel of that build"


_NAME_THE_USER: Final = (
    "name this user in an [[access.engine]] of the daemon's configuration, or run both as the same user"
)


class _Stop(Exception):
    """The remaining checks of a chain depend on a check that failed."""


def main(arguments: list[str] | None = None) -> None:
    """Run the checks."""
    parser = argparse.ArgumentParser(description="Checks of an engine's environment, for `kvcached doctor`.")
    parser.add_argument("--run-dir", default=None, help="folder of the daemon's sockets")
    parser.add_argument("--hash-algo", default="", help="vLLM's --prefix-caching-hash-algo: print what it hashes to")
    parser.add_argument("--cuda", action="store_true", help="check what the CUDA driver and its devices can do, only")
    parser.add_argument("--sglang", action="store_true", help="this is SGLang's environment, not vLLM's")
    parser.add_argument("--hash-only", action="store_true", help="print only that")
    asked = parser.parse_args(arguments)
    with _own_stdout() as out:
        if not asked.hash_only:
            found = _guarded("cuda", _cuda) if asked.cuda else examine(asked.run_dir, is_sglang=asked.sglang)
            for finding in found:
                _print(out, asdict(finding))
        if asked.hash_algo:
            _print(out, {**_hashes(asked.hash_algo), "device": _vllm_device()})


def examine(run_dir: str | None, *, is_sglang: bool = False) -> Iterator[Finding]:
    """The findings of every check, of SGLang or of vLLM; later checks depend on earlier ones."""
    for check in (_python, _client, _packages, _helpers, _sglang if is_sglang else _vllm, _limits):
        yield from _guarded(check.__name__.strip("_"), check)
    yield from _guarded("daemon", lambda: _daemon(run_dir))


def _guarded(name: str, check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check. An exception of the check is a finding, too."""
    try:
        yield from check()
    except _Stop:
        return
    except Exception as error:  # noqa: BLE001 - an environment may be broken in any way
        yield Finding(name, "fail", f"the check broke down: {type(error).__name__}: {error}", "see the message")


# --- the interpreter ------------------------------------------------------------------------------------------------


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding("python", "ok", f"{version}, {sys.executable}")


def _client() -> Iterator[Finding]:
    place = Path(__file__).parent
    try:
        yield Finding("client", "ok", f"{DISTRIBUTION} {importlib.metadata.version(DISTRIBUTION)}, {place}")
    except importlib.metadata.PackageNotFoundError:
        text = f"{place} is imported, but {DISTRIBUTION} is not installed"
        yield Finding("client", "warn", text, install_client(sys.executable))


def _packages() -> Iterator[Finding]:
    try:
        requirements = importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return
    found: list[str] = []
    for name, least in (match.groups() for each in requirements if (match := _REQUIREMENT.match(each))):
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding("packages", "fail", f"{name} is not installed", install_client(sys.executable))
            continue
        found.append(f"{name} {version}")
        if _numbers(version) < _numbers(least):
            yield Finding(
                "packages", "fail", f"{name} {version} is older than {least}", f"pip install '{name}>={least}'"
            )
    yield Finding("packages", "ok", ", ".join(found))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _helpers() -> Iterator[Finding]:
    slower = {"blocks._native_copy": "copies of small pages", "_native_keys": "kvcached's own block keys"}
    missing = [name for name in slower if importlib.util.find_spec(f"kvcached_client.{name}") is None]
    for name in missing:
        yield Finding(
            "helpers",
            "warn",
            f"kvcached_client.{name} is not built: {slower[name]} are slower",
            "with a C compiler, in the daemon's checkout:"
            f" {sys.executable} -m pip install --force-reinstall --no-deps ./kvcached_client",
        )
    if not missing:
        yield Finding("helpers", "ok", "native copies and native block keys are there")


def _limits() -> Iterator[Finding]:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if descriptors != resource.RLIM_INFINITY and descriptors < _DESCRIPTORS_MIN:
        yield Finding(
            "limits", "warn", f"{descriptors} open files are allowed", f"ulimit -n {_DESCRIPTORS_MIN} or more"
        )
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    words = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
    yield Finding(
        "limits", "ok", f"open files {descriptors}; locked memory {words}, of which copies on a CPU need none"
    )


# --- CUDA -----------------------------------------------------------------------------------------------------------


def _cuda() -> Iterator[Finding]:
    from kvcached_client.doctor.cuda import cuda_findings  # noqa: PLC0415 - see the module's docstring

    return cuda_findings()


# --- engines --------------------------------------------------------------------------------------------------------


def _sglang() -> Iterator[Finding]:
    from kvcached_client.doctor.sglang import sglang_findings  # noqa: PLC0415 - see the module's docstring

    return sglang_findings()


def _vllm() -> Iterator[Finding]:
    if importlib.util.find_spec("vllm") is None:
        yield Finding(
            "vllm",
            "warn",
            "vLLM is not installed here; other engines do not need it",
            "install vLLM, if this is its environment",
        )
        return
    from kvcached_client.vllm.settings import check_version  # noqa: PLC0415 - see the module's docstring

    names = importlib.metadata.packages_distributions().get("vllm", [])
    versions = [f"{name} {importlib.metadata.version(name)}" for name in names]
    try:
        is_supported = check_version(importlib.metadata.version(names[0]) if names else "unknown")
    except RuntimeError as error:
        yield Finding("vllm", "fail", ", ".join(versions) or "its version is not known", str(error))
        return
    if is_supported:
        yield Finding("vllm", "ok", ", ".join(versions))
    else:
        yield Finding(
            "vllm",
            "warn",
            f"{', '.join(versions)} is newer than the versions that this kvcached-client supports",
            "compare outputs with those of vLLM without kvcached, or install a newer kvcached-client",
        )
    try:
        connector = importlib.import_module("kvcached_client.vllm").KvcachedConnector
    except Exception as error:  # noqa: BLE001 - vLLM's imports fail in many ways
        yield Finding(
            "connector",
            "fail",
            f"KvcachedConnector: {type(error).__name__}: {error}",
            "see the message; repair vLLM's environment",
        )
    else:
        yield Finding("connector", "ok", f"{connector.__module__}.{connector.__name__}")


def _hashes(algorithm: str) -> dict[str, object]:
    """Hashes of some blocks, computed by vLLM's own code in this process; empty without vLLM; or the error."""
    if importlib.util.find_spec("vllm") is None:
        return {"hashes": [], "error": ""}
    try:
        hashing = importlib.import_module("vllm.utils.hashing")
        utilities = importlib.import_module("vllm.v1.core.kv_cache_utils")
        function = hashing.get_hash_fn_by_name(algorithm)
        utilities.init_none_hash(function)
        parent, hashes = None, []
        for start in range(0, len(HASHED_TOKENS), HASH_BLOCK_SIZE):
            block = HASHED_TOKENS[start : start + HASH_BLOCK_SIZE]
            parent = utilities.hash_block_tokens(function, parent, block)
            hashes.append(parent.hex())
    except Exception as error:  # noqa: BLE001 - as above
        return {"hashes": [], "error": f"{type(error).__name__}: {error}"}
    return {"hashes": hashes, "error": ""}


def _vllm_device() -> str:
    """The kind of device that vLLM computes on here; empty where that is not known."""
    try:
        return str(importlib.import_module("vllm.platforms").current_platform.device_type)
    except Exception:  # noqa: BLE001 - there is no vLLM, or it is broken, which `_vllm` has told
        return ""


# --- the daemon -----------------------------------------------------------------------------------------------------


def _daemon(named: str | None) -> Iterator[Finding]:
    """Checks from the sockets to a round trip of bytes; each depends on the one before."""
    from kvcached_client.transport.run_dir import default_run_dir  # noqa: PLC0415 - see the module's docstring

    run_dir = default_run_dir() if named is None else Path(named)
    yield from _sockets(run_dir)
    description = yield from _answers(run_dir)
    yield from _identity(run_dir)
    if description.offload is None:
        yield Finding(
            "offload mode",
            "fail",
            "the daemon serves no engines that keep their own memory, as vLLM does",
            "put a [host] and an [offload] table into its configuration, as configs/offload-cpu.toml has them",
        )
        return
    offered = description.offload
    yield Finding("offload mode", "ok", f"host pool of {offered.slabs} slabs of {offered.slab_bytes} bytes")
    yield from _memory(offered.slabs * offered.slab_bytes)
    from kvcached_client.doctor.round_trip import round_trip  # noqa: PLC0415 - as above

    yield from round_trip(run_dir, offered)


def _memory(pool_bytes: int) -> Iterator[Finding]:
    """Whether this process may map the host pool and write all of it."""
    from kvcached_client.doctor.memory_bounds import memory_bounds  # noqa: PLC0415 - see the module's docstring

    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        yield Finding(
            "memory",
            "warn",
            f"ulimit -v allows {address_space} bytes, the host pool takes {pool_bytes}",
            "ulimit -v unlimited",
        )
    bound = min(memory_bounds(), key=lambda bound: bound.limit_bytes, default=None)
    if bound is None:
        return
    said = f"the engine may take {bound.limit_bytes} bytes ({bound.source})"
    if pool_bytes > bound.limit_bytes:
        yield Finding(
            "memory",
            "warn",
            f"{said}, the host pool {pool_bytes}: what the engine is the first to write of it counts as the engine's",
            "raise the limit by the size of the host pool, or configure a smaller one",
        )
        return
    yield Finding("memory", "ok", f"{said}, the host pool {pool_bytes} of them")


def _sockets(run_dir: Path) -> Iterator[Finding]:
    from kvcached_client.transport.listener import START_IT, fault_of  # noqa: PLC0415 - see the module's docstring

    own = os.geteuid()
    try:
        folder = run_dir.stat()
        sockets = {name: (run_dir / name).stat() for name in ("attach.sock", "rpc.sock")}
    except OSError as error:
        yield Finding("sockets", "fail", f"{error.filename}: {error.strerror}", START_IT)
        raise _Stop from None
    if folder.st_uid not in {0, own} and (fault := fault_of(run_dir, folder.st_uid)):
        said = f"{run_dir} belongs to user {folder.st_uid}, the engine is user {own}, and {fault}"
        yield Finding(
            "sockets", "fail", said, "put the run directory where only root can, or run both as the same user"
        )
        raise _Stop
    if folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        yield Finding(
            "sockets", "fail", f"others may write into {run_dir}, and so replace its sockets", f"chmod go-w {run_dir}"
        )
    for name, status in sockets.items():
        if not stat.S_ISSOCK(status.st_mode):
            yield Finding("sockets", "fail", f"{run_dir / name} is no socket", START_IT)
            raise _Stop
        if not os.access(run_dir / name, os.W_OK):
            yield Finding("sockets", "fail", f"user {own} may not connect to {run_dir / name}", _NAME_THE_USER)
            raise _Stop
    yield Finding("sockets", "ok", f"{run_dir}, of user {folder.st_uid}")


def _answers(run_dir: Path) -> Generator[Finding, None, Description]:
    """The daemon's description, and whether the daemon speaks this client's protocol."""
    from kvcached_client.admin import Admin  # noqa: PLC0415 - see the module's docstring
    from kvcached_client.errors import KvcachedError, Refused  # noqa: PLC0415
    from kvcached_client.protocol.engine import PROTOCOL_VERSION, PROTOCOL_VERSION_MIN  # noqa: PLC0415

    try:
        with Admin.connect(run_dir, deadline_ms=DEADLINE_MS) as admin:
            described = admin.describe()
    except KvcachedError as error:
        said = f"{error.code}: {error.message}" if error.code else error.message
        yield Finding("daemon", "fail", said, error.fix or "see the daemon's log")
        raise _Stop from None
    spoken = f"version {described.version}, protocol {described.protocol_min} to {described.protocol_max}"
    if described.protocol_min > PROTOCOL_VERSION or described.protocol_max < PROTOCOL_VERSION_MIN:
        own = f"{PROTOCOL_VERSION_MIN} to {PROTOCOL_VERSION}"
        yield Finding("daemon", "fail", f"{spoken}; this client speaks {own}", "upgrade the older of the two")
        raise _Stop
    yield Finding("daemon", "ok", spoken)
    with Admin.connect(run_dir, deadline_ms=DEADLINE_MS) as admin:
        try:
            troubles = [(pool.replica, pool.trouble) for pool in admin.stats().pools if pool.trouble]
        except Refused:  # an engine's user need not be one who may look
            troubles = []
    for replica, trouble in troubles:
        fix = "mend what is named; the replica is tried again every few seconds, and needs no restart of the daemon"
        yield Finding(f"replica {replica}", "fail", trouble, fix)
    return described


def _identity(run_dir: Path) -> Iterator[Finding]:
    from kvcached_client.errors import KvcachedError  # noqa: PLC0415
    from kvcached_client.transport.attach import identify  # noqa: PLC0415 - see the module's docstring

    try:
        os.close(os.pidfd_open(os.getpid()))
        own = "this process can show its pidfd"
    except OSError as error:
        own = f"pidfd_open: {error.strerror}, so the daemon asks the kernel"
    try:
        identify(run_dir, client="doctor", deadline_ms=DEADLINE_MS)[0].close()
    except KvcachedError as error:
        fix = f"{_NAME_THE_USER}; share a pid namespace; a sandbox must allow pidfd_open, or the kernel be 6.5"
        yield Finding("credentials", "fail", f"{error}; {own}", fix)
        raise _Stop from None
    yield Finding("credentials", "ok", f"user {os.geteuid()} is known to the daemon; {own}")


# --- output ---------------------------------------------------------------------------------------------------------


def _own_stdout() -> TextIO:
    """A file for the findings on stdout; all other output to stdout goes to stderr from now on."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return out


def _print(out: TextIO, line: dict[str, object]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()
