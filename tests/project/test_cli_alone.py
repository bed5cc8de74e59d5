"""The command without a daemon: its arguments, what it works out by itself, its ends."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from kvcached import VERSION
from kvcached.cli import main as cli
from kvcached.cli.main import ExitCode, main
from kvcached_client.transport.run_dir import LOCK_NAME
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

GOOD = str(ROOT / "configs/cpu-tp2.toml")
KEYS = ("--server-key", "1" * 40, "--key-file", "/no")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_cli_capacity_needs_no_daemon() -> None:
    """Capacity is worked out from the file: both pools, all shards, and what a slab holds."""
    path = str(ROOT / "configs/cpu-host.toml")

    printed = json.loads(run("capacity", "--config", path, "--json").stdout)
    text = run("capacity", "--config", path).stdout

    first, second = printed["replicas"]
    assert (first["replica"], second["replica"], first["namespace"]) == ("a", "b", second["namespace"])
    assert (first["bytes_per_block"], first["device_slots"], first["device_tokens"]) == (196608, 256, 4096)
    assert (first["host_slots_per_slab"], first["host_slots"], first["host_tokens"]) == (341, 4 * 341, 4 * 341 * 16)
    assert (printed["host_bytes"], printed["device_bytes"]) == (256 << 20, 2 * 256 * 196608)
    assert printed["total_bytes"] == printed["host_bytes"] + printed["device_bytes"]
    assert "host slots per slab: 341\n" in text


def test_cli_capacity_counts_all_shards_and_no_host_tier() -> None:
    """A block is as large as its parts on all shards; without a host tier there is no room in it."""
    printed = json.loads(run("capacity", "--config", GOOD, "--json").stdout)

    (replica,) = printed["replicas"]
    assert (replica["bytes_per_block"], replica["device_bytes"]) == (196608, 256 * 196608)
    assert (replica["host_slots_per_slab"], printed["host_slabs"], printed["host_bytes"]) == (0, 0, 0)


def test_cli_without_a_daemon_is_unreachable(tmp_path: Path) -> None:
    """Against a run directory without a daemon, a command ends with exit code 4 at its deadline."""
    result = run("health", "--run-dir", str(tmp_path), "--deadline-ms", "100")

    assert result.exit_code == ExitCode.UNREACHABLE


def test_cli_without_a_socket_looks_whether_a_daemon_has_the_directory(tmp_path: Path) -> None:
    """Where cleaners have removed the socket of a daemon that runs, no second daemon is advised: it could not start."""
    assert "start the daemon (kvcached supervise --config FILE)" in run("health", "--run-dir", str(tmp_path)).stderr

    lock = os.open(tmp_path / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = run("health", "--run-dir", str(tmp_path))
    finally:
        os.close(lock)

    assert told.exit_code == ExitCode.UNREACHABLE
    assert "or its sockets were removed; then restart it" in told.stderr
    assert "start the daemon" not in told.stderr


def test_cli_with_an_impossible_run_dir_is_wrong_usage() -> None:
    """A run directory whose sockets no path could name is wrong usage, not a missing daemon."""
    assert run("stats", "--run-dir", f"/{'x' * 200}").exit_code == ExitCode.USAGE


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["serve"],
        ["serve", "--config", "/no/such/file.toml"],
        ["check-config", "--config", GOOD, "--run-dir", "relative"],
        ["check-config", "--config", GOOD, "--log-level", "loud"],
        ["health", "--deadline-ms", "0"],
        ["demo", "--tp", "3"],
        ["demo", "--cuda-graphs"],
        ["tree", "--levels", "65"],
        ["tree", "--children", "0"],
        ["inspect"],
        ["inspect", "0f0f"],
        ["inspect", "0x" + "0f" * 15],
        ["inspect", "g" * 32],
        ["capacity"],
        ["capacity", "--config", "/no/such/file.toml"],
    ],
)
def test_cli_wrong_usage_exits_with_2(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong usage and wrong configuration exit with 2 and say why on stderr."""
    monkeypatch.delenv("KVCACHED_CONFIG", raising=False)

    result = run(*arguments)

    assert (result.exit_code, result.stdout) == (ExitCode.USAGE, "")
    assert result.stderr


def test_cli_check_config_prints_effective_values_and_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """check-config prints what is in effect, options and variables included, and what it comes to."""
    monkeypatch.setenv("KVCACHED_REPLICA__0__SLOTS", "32")

    result = run("check-config", "--config", GOOD, "--run-dir", "/run/x", "--json")

    printed = json.loads(result.stdout)
    assert (printed["config"]["run_dir"], printed["config"]["session_ttl_ms"]) == ("/run/x", 30000)
    assert (printed["figures"][0]["slots"], printed["figures"][0]["tokens"]) == (32, 512)
    text = run("check-config", "--config", GOOD, "--run-dir", "/run/x").stdout
    assert 'run_dir = "/run/x"' in text
    assert "tokens 512" in text


def test_cli_serve_that_cannot_start_exits_with_3(tmp_path: Path) -> None:
    """A daemon that cannot start says why on stderr and exits with 3."""
    in_the_way = tmp_path / "file"
    in_the_way.touch()

    result = subprocess.run(
        [sys.executable, "-m", "kvcached", "serve", "--config", GOOD, "--run-dir", str(in_the_way / "run")],
        cwd=ROOT,
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (result.returncode, result.stdout) == (ExitCode.START_FAILED, "")
    assert str(in_the_way) in result.stderr
    assert "Traceback" not in result.stderr


def test_cli_version_imports_neither_client_nor_configuration() -> None:
    """`kvcached version` prints the version without loading what it does not need."""
    code = "import sys; sys.argv[1:] = ['version']; from kvcached.cli.main import main; main(standalone_mode=False);"
    code += "print([name for name in ('zmq', 'pydantic', 'numpy', 'rich', 'torch') if name in sys.modules])"

    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    assert result.stdout.split("\n")[:2] == [VERSION, "[]"]


def test_cli_has_the_option_version() -> None:
    """`kvcached --version` prints what `kvcached version` prints."""
    assert run("--version").stdout == run("version").stdout == f"{VERSION}\n"


@pytest.mark.parametrize("module", ["click", "pydantic", "kvcached.daemon"])
def test_cli_interrupted_exits_with_130(module: str, tmp_path: Path) -> None:
    """Ctrl-C while the command is still being imported, and later, ends it with 130 and without a traceback."""
    code = f"""
import os, signal, sys

class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
sys.argv[1:] = ["serve", "--config", {GOOD!r}, "--run-dir", {str(tmp_path / "run")!r}]
from kvcached.__main__ import run
run()
"""
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), capture_output=True, timeout=30, check=False
    )

    assert (result.returncode, result.stdout, result.stderr) == (ExitCode.INTERRUPTED, b"", b"")
    assert not (tmp_path / "run").exists()


def test_cli_help_shows_defaults_and_variables() -> None:
    """--help shows each option's default, and the variable where there is one."""
    text = run("health", "--help").stdout

    assert "default: 5000" in text
    assert "KVCACHED_RUN_DIR" in text
    assert "XDG_RUNTIME_DIR" in text


def test_cli_demo_hands_its_options_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """`kvcached demo` becomes the demo of the checkout, whatever directory it was started in, with its options."""
    became: list[tuple[str, Path]] = []
    monkeypatch.chdir("/")
    monkeypatch.setattr(os, "execv", lambda _, arguments: became.append((" ".join(arguments), Path.cwd())))

    run("demo", "--tp", "1", "--device", "cuda", "--cuda-graphs", "--json")

    assert became == [(f"{sys.executable} -m examples.demo --tp 1 --device cuda --cuda-graphs --json", ROOT)]


def test_cli_demo_without_the_examples_says_where_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An installed daemon has no examples beside it; the message says to use a checkout."""
    monkeypatch.setattr(cli, "_CHECKOUT", tmp_path)

    result = run("demo")

    assert result.exit_code == ExitCode.START_FAILED
    assert "run it from a checkout" in result.stderr


def test_cli_keys_makes_a_key_that_its_owner_alone_reads(tmp_path: Path) -> None:
    """`keys make` writes a file of mode 0600 and prints the public key, which `keys show` prints again; both once."""
    path = tmp_path / "own.key"
    made = run("keys", "make", str(path))
    secret = path.read_text()

    assert made.exit_code == ExitCode.OK
    assert len(made.stdout.strip()) == 40
    assert made.stdout.strip() not in secret
    assert path.stat().st_mode & 0o777 == 0o600
    assert run("keys", "show", str(path)).stdout == made.stdout

    again = run("keys", "make", str(path))
    assert (again.exit_code, again.stdout) == (ExitCode.USAGE, "")
    assert "exists already" in again.stderr
    assert path.read_text() == secret


def test_cli_keys_refuses_what_is_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that others can read, a directory, one without a key, and a missing package are told with what to do."""
    path = tmp_path / "own.key"
    run("keys", "make", str(path))
    path.chmod(0o644)
    assert "chmod 600" in run("keys", "show", str(path)).stderr
    said = f"key file {tmp_path} is a directory (name the file of a key)"
    assert said in run("keys", "show", str(tmp_path)).stderr
    path.chmod(0o600)
    path.write_text("no key")
    assert "kvcached keys make" in run("keys", "show", str(path)).stderr
    assert "No such file" in run("keys", "make", str(tmp_path / "no" / "key")).stderr

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    missing = run("keys", "make", str(tmp_path / "other"))
    assert (missing.exit_code, "pip install PyNaCl" in missing.stderr) == (ExitCode.USAGE, True)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--endpoint", "tcp://h:1", "capacity"], "asks no daemon on another machine"),
        (["--endpoint", "tcp://h:1", "health", "--run-dir", "/x"], "give one of them"),
        (["--endpoint", "tcp://h:1", "health"], "needs the daemon's public key and a key file"),
        (["--endpoint", "h:1", "health"], "'h:1' is none: give tcp://HOST:PORT"),
        (["--endpoint", "tcp://h", "health"], "is no endpoint"),
        (["--endpoint", "tcp://h:1/x", "health"], "is no endpoint"),
        (["--endpoint", "tcp://[::1", "health"], "is no endpoint"),
        (["--endpoint", "tcp://a..b:1", *KEYS, "health"], "'tcp://a..b:1' is no endpoint"),
        (["--endpoint", "tcp://h:1", "--server-key", "short", "--key-file", "/no", "health"], "40 characters of Z85"),
        (
            ["--endpoint", "tcp://h:1", "--server-key", "0" * 40, "--key-file", "/no", "health"],
            "a public key that is none",
        ),
        (["--endpoint", "tcp://h:1", *KEYS, "health"], "key file /no: No such"),
    ],
)
def test_cli_endpoint_that_names_no_daemon_is_wrong_usage(arguments: list[str], says: str) -> None:
    """Before anything is sent, an endpoint, a key or a command that does not fit is told."""
    result = run(*arguments)

    assert result.exit_code == ExitCode.USAGE
    assert says in " ".join(result.stderr.split())


def test_cli_endpoint_of_the_environment_is_for_commands_that_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that names no daemon fails what would ask that daemon, and nothing else."""
    monkeypatch.setenv("KVCACHED_ENDPOINT", "foo")

    assert [run(*arguments).exit_code for arguments in (["version"], ["check-config", "--config", GOOD])] == [0, 0]
    asked = run("health")
    assert asked.exit_code == ExitCode.USAGE
    assert "KVCACHED_ENDPOINT 'foo' is none: give tcp://HOST:PORT" in asked.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", [["version"], ["--help"], ["check-config", "--config", GOOD]])
def test_cli_says_that_its_output_cannot_be_written(arguments: list[str], unbuffered: str) -> None:
    """Where stdout takes no more, a command ends with 2 and says so: 1 would mean that it has found a problem."""
    environment = {**clean_environment(), "PYTHONUNBUFFERED": unbuffered}
    with Path("/dev/full").open("w") as full:
        result = subprocess.run(
            [sys.executable, "-m", "kvcached", *arguments],
            cwd=ROOT,
            env=environment,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )

    assert result.returncode == ExitCode.USAGE
    assert result.stderr == "kvcached: the output cannot be written: No space left on device\n"


#: A command that prints by rich, which has its own opinion of such readers; a daemon answers.
_BY_RICH = """
import sys
import kvcached_client
from kvcached.__main__ import run
from tests.project.admins import FakeAdmin
from tests.project.test_cli import REPLIES

kvcached_client.Admin = FakeAdmin()
kvcached_client.Admin.reply = REPLIES["stats"]
sys.argv[1:] = ["what-if"]
run()
"""


@pytest.mark.parametrize("arguments", [["-m", "kvcached", "version"], ["-c", _BY_RICH]], ids=["click", "rich"])
def test_cli_without_a_reader_ends_as_by_sigpipe(arguments: list[str]) -> None:
    """A reader that has gone, as `head` does, is no error to tell of, and no problem that was found: 141."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        result = subprocess.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=clean_environment(),
            stdout=writing,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)

    assert (result.returncode, result.stderr) == (ExitCode.NO_READER, b"")
