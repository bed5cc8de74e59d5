"""The commands init and doctor: files to start from, and whether an engine's environment can use the daemon."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from kvcached.cli.options import EPILOG, ExitCode, fail, json_option, print_json, run_dir_option
from kvcached.log import escaped

#: Where the examples are: a wheel has its own copies in the package, a checkout the folder `configs`.
_SHIPPED: Final = tuple(Path(__file__).parents[level] / "configs" for level in (1, 2))
_UNIT: Final = "kvcached.service"
_CONFIGURATION: Final = "kvcached.toml"
#: What the shipped files say, and `init` says otherwise.
_SHIPPED_COMMAND: Final = "/opt/kvcached/bin/kvcached serve --config /etc/kvcached/kvcached.toml"
_SHIPPED_DISK: Final = "/var/cache/kvcached"
#: What its comment says, which holds where the unit may make it.
_SHIPPED_PROMISE: Final = "# created if it does not exist; only"
#: Below it, a unit names what may be written although it may write nowhere.
_READ_ONLY: Final = "ProtectSystem=strict\n"
_HIDES: Final = "ProtectHome= and PrivateTmp= of the unit hide from the daemon"
#: What they hide.
_HIDDEN: Final = ("/home", "/root", "/run/user", "/tmp", "/var/tmp")  # noqa: S108 - nothing is made there

_VLLM: Final = """\
python -m vllm.entrypoints.openai.api_server --model MODEL --kv-transfer-config '{"kv_connector": "KvcachedConnector",
      "kv_connector_module_path": "kvcached_client.vllm", "kv_role": "kv_both", "kv_load_failure_policy": "recompute"}'
    (vLLM's environment needs the wheel of kvcached_client only; the daemon's KVCACHED_RUN_DIR; another user
    than the daemon's needs an [[access.engine]] in its configuration)"""
_ENGINE: Final = """\
python -c 'from kvcached_client import Client; print(Client.connect().layout)'
    (the engine's environment needs the wheel of kvcached_client only; docs/sdk.md is its guide)"""
_SIZE_OF: Final = {"vllm": "size_bytes, and slab_bytes for large blocks,", "engine": "model, slots and the layout"}
#: What looks at an engine's arguments before it is started. It asks a daemon that runs how large its slabs are.
_CHECK_OF: Final = {
    "vllm": """\
kvcached doctor --python PYTHON --model DIR -- ARGUMENTS
    (PYTHON of vLLM's environment, the model's folder, and vLLM's arguments; `layout` names the slab_bytes that the
    blocks of this model and its ranks need: set it, and start the daemon again)"""
}
_MARKS: Final = {"ok": "ok  ", "warn": "warn", "fail": "FAIL"}
_CLIENT_OF: Final = {"vllm": _VLLM, "engine": _ENGINE}


@click.command(epilog=EPILOG)
@click.option(
    "--for",
    "engine",
    type=click.Choice(["vllm", "engine"]),
    default="vllm",
    show_default=True,
    help="vllm: a host pool for engines with their own device memory: vLLM, SGLang, transformers. engine: a pool that "
    "the daemon owns.",
)
@click.option(
    "--disk",
    type=click.Path(path_type=Path, file_okay=False),
    help="With --for vllm: also store blocks in this directory on a local disk.",
)
@click.option("--force", is_flag=True, show_default=True, help="Replace existing files.")
@click.argument("directory", metavar="[DIR]", type=click.Path(path_type=Path, file_okay=False), default=".")
def init(engine: str, disk: Path | None, directory: Path, *, force: bool) -> None:
    """Write a configuration and a systemd unit into DIR, and print the next steps."""
    if disk is not None and engine != "vllm":
        fail(
            ExitCode.USAGE, "--disk needs --for vllm: the configuration for engines has no storage; see docs/storage.md"
        )
    try:
        directory = directory.absolute()
    except FileNotFoundError:  # of where this runs, from which a relative path starts
        fail(ExitCode.USAGE, f"{directory}: the current directory was removed; change to another one")
    configuration = directory / _CONFIGURATION
    for path in (configuration, disk):
        if path is not None and not str(path).isprintable():
            fail(ExitCode.USAGE, f"{str(path)!r} has characters that no unit can name; give another directory")
    name = {"vllm": "offload-cpu.toml" if disk is None else "offload-disk.toml", "engine": "cpu-tp1.toml"}[engine]
    text = _shipped(name).replace(f"configs/{name}", shlex.quote(str(configuration)))
    command = Path(sys.executable).with_name("kvcached")
    unit = _shipped(_UNIT).replace(
        _SHIPPED_COMMAND, f"{_in_command(command)} serve --config {_in_command(configuration)}"
    )
    used = [configuration, command, Path(sys.executable).resolve()]
    if disk is not None:
        text, unit = _with_disk(text, unit, disk.absolute())
        used.append(disk.absolute())
    _write({configuration: text, directory / _UNIT: unit}, force=force)
    for path in _hidden(used):
        click.echo(f"kvcached: warning: {_HIDES} {path}: move it, or change the unit", err=True)
    click.echo(_next_steps(configuration, engine, None if disk is None else disk.absolute()))


def _shipped(name: str) -> str:
    return next(folder / name for folder in _SHIPPED if folder.is_dir()).read_text()


def _with_disk(text: str, unit: str, disk: Path) -> tuple[str, str]:
    """A configuration and a unit with storage in this directory instead of the shipped one."""
    from kvcached.config.report import toml_value

    text = text.replace(f'"{_SHIPPED_DISK}"', toml_value(str(disk)))
    if not _is_made_by_unit(disk):
        note = "# The directory of [storage.settings]: make it before the first start, for the daemon's user alone.\n"
        text = text.replace(_SHIPPED_PROMISE, "# make it before the first start under systemd; only")
        unit = unit.replace(_READ_ONLY, f"{_READ_ONLY}{note}ReadWritePaths={_quoted(disk)}\n")
    return text, unit


def _is_made_by_unit(disk: Path) -> bool:
    """Whether the unit's cache directory is there before the daemon, and this one is it or below it."""
    return disk.resolve().is_relative_to(_SHIPPED_DISK)


def _hidden(paths: list[Path]) -> Iterator[Path]:
    """Those that a daemon under the unit does not see, each once."""
    for path in dict.fromkeys(paths):
        if any(each.is_relative_to(hidden) for each in (path, path.resolve()) for hidden in _HIDDEN):
            yield path


def _in_command(path: Path) -> str:
    """A path as one word of a systemd command line."""
    return _quoted(path).replace("$", "$$")


def _quoted(path: Path) -> str:
    """A path as one word of a systemd unit."""
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return text if text.isascii() and not set(text) & set(" \t'\"\\;") else f'"{text}"'


def _write(files: dict[Path, str], *, force: bool) -> None:
    """Write all of them, or end the program: with `force` over what is there, without it nothing of them may be."""
    there = [str(path) for path in files if os.path.lexists(path)]
    if there and not force:
        fail(ExitCode.USAGE, f"{' and '.join(there)}: there already; give another directory, or replace with --force")
    for path, text in files.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if force:
                path.unlink(missing_ok=True)
            with path.open("x") as file:
                file.write(text)
        except OSError as error:
            fail(ExitCode.USAGE, f"{path} cannot be written: {error.strerror}")
        click.echo(f"wrote {path}")


def _next_steps(configuration: Path, engine: str, disk: Path | None) -> str:
    named = shlex.quote(str(configuration))
    steps = [
        f"set {_SIZE_OF[engine]} in {configuration}",
        *([] if disk is None or _is_made_by_unit(disk) else [_make_disk(disk)]),
        f"kvcached check-config --config {named}",
        f"""kvcached supervise --config {named}
    (restarts a daemon that dies, and keeps its host memory; under systemd use {configuration.with_name(_UNIT)})""",
        """kvcached health
    (from another terminal, as the same user)""",
        *([_CHECK_OF[engine]] if engine in _CHECK_OF else []),
        _CLIENT_OF[engine],
    ]
    return "\nnext:\n" + "\n".join(f" {number}. {step}" for number, step in enumerate(steps, 1))


def _make_disk(disk: Path) -> str:
    directory = shlex.quote(str(disk))
    return f"""mkdir -p -m 700 {directory}
    (for a daemon of this user; under systemd, which starts no unit without the directory, as root instead:
    id kvcached >/dev/null 2>&1 || useradd --system kvcached; install -d -m 700 -o kvcached {directory})"""


@click.command(epilog=EPILOG)
@click.argument("action", type=click.Choice(["make", "show"]))
@click.argument("file", type=click.Path(path_type=Path))
def keys(action: str, file: Path) -> None:
    """Make a key in FILE, which only this user can read, or show it: print its public key. See [tcp]."""
    from importlib.util import find_spec

    from kvcached_client.errors import RequestError
    from kvcached_client.protocol.key_files import key_text, read_key_file, write_key_file

    if find_spec("nacl") is None:
        fail(ExitCode.USAGE, "keys need the package PyNaCl: pip install PyNaCl")
    from kvcached_client.protocol.curve import new_pair, pair_of

    try:
        if action == "make":
            write_key_file(file, new_pair().secret)
        click.echo(key_text(pair_of(read_key_file(file)).public))
    except FileExistsError:
        fail(ExitCode.USAGE, f"{file} exists already, and is left as it is: `kvcached keys show {file}`")
    except OSError as error:
        fail(ExitCode.USAGE, f"{file}: {error.strerror}")
    except RequestError as error:
        fail(ExitCode.USAGE, str(error))


@click.command(epilog=EPILOG)
@click.option(
    "--python",
    default=sys.executable,
    show_default="this one",
    help="Interpreter of the engine's environment.",
)
@click.option("--model", default="", show_default="the one in the engine's arguments", help="Directory of a model.")
@click.option("--sglang", is_flag=True, help="The engine is SGLang, not vLLM.")
@click.option("--cuda", is_flag=True, help="Check what the CUDA driver and its devices can do, and nothing else.")
@run_dir_option
@json_option
@click.argument("engine_arguments", nargs=-1, type=click.UNPROCESSED)
def doctor(
    python: str,
    model: str,
    run_dir: Path | None,
    engine_arguments: tuple[str, ...],
    *,
    sglang: bool,
    cuda: bool,
    as_json: bool,
) -> None:
    """Check an engine's environment, and its arguments after `--`. Exit code 1 if a check fails."""
    from dataclasses import asdict

    from kvcached.doctor.checks import examine, examine_cuda, examine_sglang
    from kvcached_client.transport.run_dir import default_run_dir

    findings = []
    engine = examine_sglang if sglang else examine
    place = run_dir or default_run_dir()
    checks = examine_cuda(python) if cuda else engine(python, place, model, engine_arguments)
    for finding in checks:
        findings.append(finding)
        if not as_json:
            click.echo(f"{_MARKS[finding.level]}  {finding.check}: {escaped(finding.text)}")
        if not as_json and finding.fix:
            click.echo(f"      fix: {escaped(finding.fix)}")
    failed = sum(finding.level == "fail" for finding in findings)
    warned = sum(finding.level == "warn" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
    else:
        click.echo(f"{failed} failed, {warned} warnings" if failed or warned else "all checks passed")
    sys.exit(ExitCode.UNHEALTHY if failed else ExitCode.OK)
