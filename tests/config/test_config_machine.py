from __future__ import annotations

import fcntl
import json
import os
import pwd
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from click.testing import CliRunner

from kvcached.cli.main import main
from kvcached.config import machine as config_machine
from kvcached.config.machine import check_machine, warnings_of
from kvcached.config.problems import ConfigError
from kvcached.config.schema import Config, load_config
from kvcached.process import user_names
from kvcached.recovery.fd_store import KEPT_MAX
from kvcached.recovery.run_dir import claim_run_dir
from kvcached.recovery.state_file import LEDGER_NAME, HostPoolRecord, Ledger, LedgerFile, boot_id
from kvcached.recovery.supervise import RESTART_VARIABLE
from kvcached.storage.backend import GROUP
from kvcached_client.doctor.memory_bounds import MemoryBound
from kvcached_client.protocol.key_files import write_key_file
from kvcached_client.transport.run_dir import LOCK_NAME
from tests.project.daemon_process import clean_environment
from tests.project.source_tree import ROOT

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'
DISK = '\n[storage.settings]\ndirectory = "{disk}"\ncapacity_bytes = "64MiB"\n'
STORAGE = HOST + "\n[storage]\n" + DISK
GIB = 1 << 30


def load(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(text.replace("{disk}", str(tmp_path / "disk")))
    return load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})


def problems(tmp_path: Path, text: str, *, is_trial: bool = True, is_restart: bool = False) -> list[str]:
    config = load(tmp_path, text)
    try:
        check_machine(config, is_trial=is_trial, is_restart=is_restart)
    except ConfigError as error:
        return [str(problem).replace(f"{tmp_path}/", "") for problem in error.problems]
    return []


# Each: what to replace in STORAGE, by what, and the problem that follows.
BAD = {
    "backend": (
        "[storage]\n",
        '[storage]\nbackend = "tape"\n',
        ':8: storage.backend = "tape": there is no such backend',
    ),
    "no directory": ('directory = "{disk}"\n', "", ":9: storage.settings.directory: is missing; add it: a path"),
    "relative directory": ("{disk}", "disk", ':10: storage.settings.directory = "disk": is no absolute path'),
    "unknown setting": ("capacity_bytes", "capacity_byte", "storage.settings.capacity_byte: "),
    "tiny capacity": ('"64MiB"', "1", ":11: storage.settings.capacity_bytes = 1: is too small; give a size from 4MiB"),
    "capacity": ('"64MiB"', '"512TiB"', ": is more than the whole file system of disk has ("),
    "floor": (
        '"64MiB"',
        '"64MiB"\nfree_space_floor_bytes = "512TiB"',
        ": leaves no room on the whole file system of disk (",
    ),
    "file as directory": ("{disk}", "/proc/version/x", "cannot be made: /proc/version cannot be written"),
    "key file": (
        "[storage]\n",
        '[storage]\nkey_file = "./no"\n',
        ':8: storage.key_file = "no": the key file no: No such',
    ),
}


@pytest.mark.parametrize(("old", "new", "expected"), BAD.values(), ids=BAD)
def test_storage_that_cannot_be_opened_is_refused_with_its_line(
    old: str, new: str, expected: str, tmp_path: Path
) -> None:
    """A backend, a setting, a directory or a key file that the start would fail for is told with line and fix."""
    assert old in STORAGE

    found = problems(tmp_path, STORAGE.replace(old, new, 1))

    assert expected in "\n".join(found)
    assert all("; " in each for each in found)


def test_settings_of_a_bucket_are_refused_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A setting that the backend `s3` would refuse is told before the start, and no service is asked for that."""
    found = EntryPoints([EntryPoint("s3", "kvcached.storage.s3.opening:open_s3", GROUP)])
    monkeypatch.setattr(config_machine, "entry_points", lambda group: found)
    text = HOST + '\n[storage]\nbackend = "s3"\n\n[storage.settings]\nbucket = "{}"\nendpoint = "http://10.0.0.1:1"\n'

    refused = problems(tmp_path, text.format("No"))

    assert [each.split("; ")[0] for each in refused] == [
        'kvcached.toml:11: storage.settings.bucket = "No": is no name of a bucket',
        'kvcached.toml:12: storage.settings.endpoint = "http://10.0.0.1:1": is not encrypted',
    ]
    assert problems(tmp_path, text.format("blocks") + "allow_http = true\n") == []


def test_settings_of_a_local_disk_are_refused_with_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are those of the disk; and in front of a disk there is no use for one."""
    found = EntryPoints([EntryPoint(name, "somewhere:else", GROUP) for name in ("disk", "other")])
    monkeypatch.setattr(config_machine, "entry_points", lambda group: found)
    text = HOST + '\n[storage]\nbackend = "{}"\n[storage.local_disk]\ndirectory = "{}"\ncapacity_bytes = "64MiB"\n'
    text += "free_space_floor_bytes = 0\n"

    assert problems(tmp_path, text.format("other", tmp_path / "disk")) == []
    (refused,) = problems(tmp_path, text.format("other", "disk"))
    assert refused.startswith('kvcached.toml:10: storage.local_disk.directory = "disk": is no absolute path; ')
    *_, refused = problems(tmp_path, text.format("disk", tmp_path / "disk"))
    assert refused == (
        'kvcached.toml:8: storage.backend = "disk": has no use for a disk in front of it; '
        "remove [storage.local_disk], or name another backend"
    )


def test_storage_that_can_be_opened_is_not_refused(tmp_path: Path) -> None:
    """A directory that can be made, or that a daemon has made, is in order, and looking at it makes nothing."""
    assert problems(tmp_path, STORAGE) == []
    assert not (tmp_path / "disk").exists()

    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/lock").touch()

    assert problems(tmp_path, STORAGE) == []


def test_disk_smaller_than_the_usual_floor_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the floor that nobody wrote leaves no room, the start is refused; where it leaves some, it is not."""
    system = os.statvfs(tmp_path)

    def disk_of(size_bytes: int) -> list[str]:
        blocks = size_bytes // system.f_frsize
        monkeypatch.setattr(os, "statvfs", lambda _: os.statvfs_result((*system[:2], blocks, *system[3:])))
        return problems(tmp_path, STORAGE)

    (problem,) = disk_of(GIB)
    assert ":9: storage.settings.free_space_floor_bytes = 1073741824: leaves no room" in problem
    assert "(1.0GiB); use a smaller floor, or a directory on a larger file system" in problem
    assert disk_of(GIB + (3 << 20)) != []
    assert disk_of(GIB + (64 << 20)) == []


def test_directory_with_other_files_is_refused(tmp_path: Path) -> None:
    """A directory that holds what is not the cache's is not taken."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk/holiday.jpg").touch()

    (problem,) = problems(tmp_path, STORAGE)

    assert "holds other files, as holiday.jpg; name an empty directory" in problem


def test_key_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """A key is refused where others can read it or where it is no key, and taken where it is one."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    text = STORAGE.replace("[storage]\n", f'[storage]\nkey_file = "{key}"\n', 1)
    key.chmod(0o644)
    assert "; chmod 600 key" in problems(tmp_path, text)[0]
    assert ">" not in problems(tmp_path, text)[0]

    key.chmod(0o600)
    assert problems(tmp_path, text) == []

    key.write_text("short")
    assert "holds no key of 32 bytes" in problems(tmp_path, text)[0]
    assert ">" not in problems(tmp_path, text)[0]

    key.unlink()
    assert "; make one: (umask 077; set -C; openssl rand -hex 32 >key)" in problems(tmp_path, text)[0]


def test_key_file_of_the_tcp_port_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key file that is away or that others can read is told with line and fix, but not at a restart; so is PyNaCl."""
    key, public = tmp_path / "daemon.key", "0" * 40
    head = f'[tcp]\nlisten = "127.0.0.1:9"\nkey_file = "{key}"\n'
    text = f'{HOST}{head}[[tcp.client]]\nname = "x"\npublic_key = "{public}"\nrole = "look"\n'
    (away,) = problems(tmp_path, text)
    assert "No such file or directory; name the file of a key, or make one: kvcached keys make daemon.key" in away
    assert problems(tmp_path, text, is_restart=True) == []

    write_key_file(key, bytes(32))
    assert problems(tmp_path, text) == []
    key.chmod(0o640)
    assert "chmod 600" in problems(tmp_path, text)[0]

    key.chmod(0o600)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install PyNaCl" in problems(tmp_path, text)[0]
    assert problems(tmp_path, text, is_restart=True) == []


def test_key_of_storage_needs_its_package_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package that encrypts, a key file is refused; a full host pool is no less worth for it."""
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    text = STORAGE.replace("[storage]\n", f'[storage]\nkey_file = "{key}"\n', 1)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    (missing,) = problems(tmp_path, text)
    assert "pip install cryptography" in missing
    assert problems(tmp_path, text, is_restart=True) == []


def test_restart_with_a_kept_host_pool_looks_at_settings_only(tmp_path: Path) -> None:
    """A disk or key that is away at a restart is no reason to lose the host pool; a setting that is wrong stays one."""
    away = STORAGE.replace("{disk}", "/proc/no").replace("[storage]\n", '[storage]\nkey_file = "/no/key"\n', 1)

    assert len(problems(tmp_path, away)) == 2
    assert problems(tmp_path, away, is_restart=True) == []
    assert problems(tmp_path, STORAGE.replace('"64MiB"', "1"), is_restart=True)


def test_run_directory_whose_sockets_no_path_can_name_is_refused_without_replicas(tmp_path: Path) -> None:
    """The sockets of every daemon are looked at, not only those of workers, and the fix names what was given."""
    path = tmp_path / "kvcached.toml"
    path.write_text(HOST)

    with pytest.raises(ConfigError) as refused:
        load_config(path, environment={}, options={"run_dir": f"/{'x' * 97}"})

    (problem,) = refused.value.problems
    assert (problem.source, problem.what.partition(" (")[0], problem.fix) == (
        "option --run-dir",
        "makes a socket path of 110 bytes, 107 are possible",
        "use a shorter run_dir",
    )


def test_devices_need_their_package_at_the_first_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cuda-bindings, each replica on CUDA devices is refused with its line; not at a restart."""
    text = (ROOT / "configs/cuda-1gpu.toml").read_text()
    assert [each for each in problems(tmp_path, text) if "cuda-bindings" in each] == []

    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    (missing,) = [each for each in problems(tmp_path, text) if "cuda-bindings" in each]
    assert 'replica[0].device = "cuda": needs the package cuda-bindings' in missing
    assert "; pip install cuda-bindings" in missing
    assert [each for each in problems(tmp_path, text, is_restart=True) if "cuda-bindings" in each] == []


def test_memory_that_the_machine_lacks_is_refused_at_the_key_that_asks_for_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is larger than the machine is refused in numbers and units that people read, and in whole sentences."""
    monkeypatch.setattr(config_machine, "memory_bounds", lambda: [MemoryBound(23 * GIB, 20 * GIB, "/proc/meminfo")])

    found = problems(tmp_path, HOST.replace("8MiB", "10TiB"), is_trial=False)

    expected = "the memory of the host pool comes to 10.0TiB, and there are 23.0GiB in all (/proc/meminfo)"
    assert found == [
        f"kvcached.toml:2: host.size_bytes = 10995116277760: {expected}; use a smaller size, or raise the limit"
    ]


def test_memory_that_is_taken_now_is_refused_in_a_trial_unless_it_is_the_daemons_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`check-config` says that too little is left; beside the daemon that has that memory already it does not."""
    bound = MemoryBound(23 * GIB, 1 << 20, "/proc/meminfo")
    monkeypatch.setattr(config_machine, "memory_bounds", lambda: [bound])
    assert problems(tmp_path, HOST, is_trial=False) == []
    (problem,) = problems(tmp_path, HOST)
    assert "the memory of the host pool comes to 8.0MiB, and there are 1.0MiB left" in problem

    (tmp_path / "run").mkdir()
    lock = os.open(tmp_path / "run" / LOCK_NAME, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert problems(tmp_path, HOST) == []
    finally:
        os.close(lock)


def test_memory_of_a_daemon_that_is_to_be_restarted_counts_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at SIGHUP refuses what the start would: a new host pool without room even where every pool is gone.

    The run directory may be another one. A pool that is kept needs no room, and a larger one that for what is new.
    """
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "new"

    def exit_code(text: str, *variables: str, shared_bytes: int = 7 << 20) -> int:
        bounds = [MemoryBound(9 << 20, 1 << 20, "/proc/meminfo", shared_bytes)]
        monkeypatch.setattr(config_machine, "memory_bounds", lambda: bounds)
        path.write_text(text)
        command = ["check-config", "--config", str(path), "--run-dir", str(run_dir)]
        return CliRunner(env=dict.fromkeys(variables, "1")).invoke(main, command).exit_code

    assert exit_code(HOST) == 2
    assert exit_code(HOST, RESTART_VARIABLE) == 0
    assert exit_code(HOST, RESTART_VARIABLE, shared_bytes=(7 << 20) - 1) == 2
    assert exit_code(HOST.replace("8MiB", "10MiB"), RESTART_VARIABLE, shared_bytes=10 << 20) == 2

    run_dir.mkdir()
    host = load(tmp_path, HOST).host
    assert host is not None
    record = HostPoolRecord(device=1, inode=1, slabs=host.slabs, slab_bytes=host.slab_bytes, allocated={})
    LedgerFile(run_dir / LEDGER_NAME).write(Ledger(boot=boot_id(), epoch=1, host=record))
    assert exit_code(HOST, RESTART_VARIABLE, shared_bytes=0) == 0
    assert exit_code(HOST.replace("8MiB", "4MiB"), RESTART_VARIABLE, shared_bytes=0) == 0
    assert exit_code(HOST.replace("8MiB", "9MiB"), RESTART_VARIABLE, shared_bytes=0) == 0
    assert exit_code(HOST.replace("8MiB", "10MiB"), RESTART_VARIABLE, shared_bytes=9 << 20) == 2


def next_problems(config: Config, predecessor: int = 0) -> list[str]:
    try:
        check_machine(config, is_next=True, predecessor=predecessor)
    except ConfigError as error:
        return [str(problem) for problem in error.problems]
    return []


def test_limit_of_open_files_is_looked_at_before_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both checks say with the shards' line what the start would end for; `serve` ends with its own status."""
    text = (ROOT / "configs/cpu-tp2.toml").read_text()
    assert problems(tmp_path, text) == []
    monkeypatch.setattr(
        resource, "getrlimit", lambda number: (64, 64) if number == resource.RLIMIT_NOFILE else (-1, -1)
    )

    (refused,) = problems(tmp_path, text)
    assert "replica[0].shards = 2: the limit of open files is 64, and this configuration needs " in refused
    assert refused.endswith("; raise it: ulimit -Hn, or LimitNOFILE= of the unit")
    assert [each.replace(f"{tmp_path}/", "") for each in next_problems(load(tmp_path, text))] == [refused]
    assert problems(tmp_path, text, is_trial=False) == []
    (of_nobody,) = problems(tmp_path, HOST)
    assert "configuration: the limit of open files is 64" in of_nobody


def make_for_others(run_dir: Path) -> None:
    run_dir.mkdir()
    run_dir.chmod(0o770)


def write_socket_name(run_dir: Path) -> None:
    run_dir.mkdir(mode=0o750)
    (run_dir / "rpc.sock").touch()


def write_lock_directory(run_dir: Path) -> None:
    (run_dir / LOCK_NAME).mkdir(parents=True)


RUN_DIRS: dict[str, tuple[Callable[[Path], object], str]] = {
    "others may write": (make_for_others, "its sockets; chmod go-w it"),
    "a file": (lambda run_dir: run_dir.touch(), "Not a directory"),
    "a link to nothing": (lambda run_dir: run_dir.symlink_to("nothing"), "No such file"),
    "no socket": (write_socket_name, "rpc.sock is there, and is no socket; remove it, or choose another run_dir"),
    "no lock file": (write_lock_directory, "daemon.lock; mend that, or choose another run_dir"),
}


@pytest.mark.parametrize(("make", "expected"), RUN_DIRS.values(), ids=RUN_DIRS)
def test_run_directory_that_the_start_would_refuse_is_refused_before(
    make: Callable[[Path], object], expected: str, tmp_path: Path
) -> None:
    """Both checks say it, and change nothing; a directory that is not there is made by the start."""
    config = load(tmp_path, HOST)
    assert (problems(tmp_path, HOST), next_problems(config), config.run_dir.exists()) == ([], [], False)
    make(config.run_dir)

    (refused,) = problems(tmp_path, HOST)
    assert refused.startswith('option --run-dir: run_dir = "run": ')
    assert expected in refused
    assert [each.replace(f"{tmp_path}/", "") for each in next_problems(config)] == [refused]
    assert problems(tmp_path, HOST, is_trial=False) == []


def test_run_directory_that_cannot_be_made_is_refused_before(tmp_path: Path) -> None:
    """What the path leads through is named."""
    config = load(tmp_path, HOST)
    (tmp_path / "file").touch()
    below = config.model_copy(update={"run_dir": tmp_path / "file/below/run"})

    (refused,) = next_problems(below)
    assert f"Not a directory: {tmp_path}/file; mend that, or choose another run_dir" in refused


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a directory of another user's")
def test_run_directory_of_another_user_is_refused_for_the_next_daemon(tmp_path: Path) -> None:
    """It runs as the user of the check. To `check-config` of root, it may be that of the daemon's user."""
    config = load(tmp_path, HOST)
    config.run_dir.mkdir(mode=0o750)
    os.chown(config.run_dir, 1001, 1001)

    (refused,) = next_problems(config)
    assert "belongs to user 1001, and this is user 0; run this as the daemon's user, or choose" in refused
    assert problems(tmp_path, HOST) == []


def test_run_directory_of_another_daemon_is_refused_for_the_next_one(tmp_path: Path, other_process: int) -> None:
    """The lock of the daemon that is restarted is no reason, and where that is not known, nobody's is."""
    config = load(tmp_path, HOST)
    _, held = claim_run_dir(config.run_dir)
    with held:
        assert next_problems(config, os.getpid()) == []
        assert next_problems(config) == []
        (refused,) = next_problems(config, other_process)
        assert f"another daemon runs in {config.run_dir}; stop it, or choose another run_dir" in refused
        assert problems(tmp_path, HOST) == []
    assert next_problems(config, other_process) == []


@pytest.fixture
def other_process() -> Iterator[int]:
    """A process of this user that has nothing to do with the run directory."""
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        yield process.pid
        process.kill()


@pytest.mark.parametrize("environment", [{}, {"KVCACHED_RUN_DIR": "{tmp_path}/file"}], ids=["default", "variable"])
def test_run_directory_that_nobody_wrote_is_no_mistake(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon's environment may name another one; the check before a restart has that environment."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVCACHED_RUN_DIR", str(tmp_path / "file"))
    (tmp_path / "kvcached.toml").write_text(f'run_dir = "{tmp_path}/run"\n{HOST}' if environment else HOST)
    variables = {name: value.format(tmp_path=tmp_path) for name, value in environment.items()}
    config = load_config(tmp_path / "kvcached.toml", environment=variables)
    assert config.run_dir == tmp_path / "file"

    check_machine(config, is_trial=True)
    (warning,) = warnings_of(config)
    assert warning == (
        f"run directory {tmp_path}/file: Not a directory, so that a daemon of this user and environment does not start "
        "there; mend that, or choose another run_dir"
    )
    assert "Not a directory" in next_problems(config)[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory away")
def test_root_is_warned_of_a_run_directory_of_another_user(tmp_path: Path) -> None:
    """It is the daemon's, if that runs as this user; a daemon of root does not start there, which root is told."""
    config = load(tmp_path, HOST)
    config.run_dir.mkdir(mode=0o750)
    assert list(warnings_of(config)) == []
    os.chown(config.run_dir, 1001, 1001)

    check_machine(config, is_trial=True)
    (warning,) = warnings_of(config)
    assert warning.startswith(f"{config.run_dir} belongs to user 1001, and this is user 0, so that a daemon of this")


@pytest.mark.parametrize("user", [65534, 0])
def test_run_directory_that_the_unit_makes_at_the_start_is_no_mistake(
    user: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the daemon's user may not make it in /run is a warning; before a restart, and to root, it is a mistake."""
    path = tmp_path / "kvcached.toml"
    path.write_text(HOST)
    command = ["check-config", "--config", str(path), "--run-dir", str(tmp_path / "run")]
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)

    result = CliRunner().invoke(main, command)
    said = "warning: run directory {} is not there, and user 65534 cannot make it; leave that to RuntimeDirectory= "
    assert result.exit_code == (0 if user else 2)
    assert (said if user else "run directory {}: Permission denied").format(tmp_path / "run") in result.stderr
    (refused,) = next_problems(load(tmp_path, HOST))
    assert f"Permission denied: {tmp_path}; mend that, or choose another run_dir" in refused


@pytest.mark.parametrize("is_there", [False, True])
def test_run_directory_on_a_file_system_that_may_only_be_read_is_refused_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_there: bool
) -> None:
    """It is called so, as by the start, to every user: no service manager makes a directory there, either."""
    config = load(tmp_path, HOST)
    if is_there:
        config.run_dir.mkdir(mode=0o750)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 65534)
    system = os.statvfs(tmp_path)
    read_only = os.statvfs_result((*system[:8], system.f_flag | os.ST_RDONLY, *system[9:]))
    monkeypatch.setattr(os, "statvfs", lambda _: read_only)
    monkeypatch.setattr(os, "access", lambda *_: False)

    (refused,) = problems(tmp_path, HOST)
    (before_restart,) = next_problems(config)
    place = "" if is_there else f": {tmp_path}"
    assert f"run directory {config.run_dir}: Read-only file system{place}; mend that" in before_restart
    assert refused == before_restart.replace(f"{tmp_path}/", "")


WITHOUT_CAPABILITIES = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which(WITHOUT_CAPABILITIES[0]) is None, reason="no root, or no setpriv")
def test_run_directory_that_root_may_not_look_at_is_told() -> None:
    """Root without capabilities, as in a container, meets another user's closed directory: one line says so."""
    with TemporaryDirectory() as folder:  # the names of pytest's are so long that the report would cut the path
        path, closed = Path(folder) / "kvcached.toml", Path(folder) / "closed"
        path.write_text(f'run_dir = "{closed}/run"\n{HOST}')
        (closed / "run").mkdir(parents=True)
        os.chown(closed, 65534, 65534)
        closed.chmod(0o700)
        done = subprocess.run(
            [*WITHOUT_CAPABILITIES, sys.executable, "-m", "kvcached", "check-config"],
            env={**clean_environment(), "KVCACHED_CONFIG": str(path), "KVCACHED_RUN_DIR": ""},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    assert done.returncode == 2, done.stderr
    assert f'kvcached: {path}:1: run_dir = "{closed}/run": run directory {closed}/run: Permission' in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["serve", "check-config"])
def test_serve_and_check_config_refuse_the_same(command: str, tmp_path: Path) -> None:
    """Both end with exit code 2 and the mistake with its line, and `serve` before it has started or made anything."""
    path = tmp_path / "kvcached.toml"
    path.write_text(STORAGE.replace("[storage]\n", '[storage]\nbackend = "tape"\n', 1).replace("{disk}", str(tmp_path)))

    done = subprocess.run(
        [sys.executable, "-m", "kvcached", command, "--config", str(path), "--run-dir", str(tmp_path / "run")],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )

    assert (done.returncode, done.stdout) == (2, "")
    assert f'kvcached: {path}:8: storage.backend = "tape": there is no such backend; installed: disk' in done.stderr
    assert "KILL" not in done.stderr
    assert not (tmp_path / "run").exists()


def test_check_config_of_a_good_configuration_prints_it(tmp_path: Path) -> None:
    """What this machine can serve is printed as before."""
    path = tmp_path / "kvcached.toml"
    path.write_text(STORAGE.replace("{disk}", str(tmp_path / "disk")))

    result = CliRunner().invoke(main, ["check-config", "--config", str(path), "--json"])

    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["config"]["host"]["size_bytes"] == 8 << 20


@pytest.mark.parametrize(("shards", "parts"), [(63, 256), (64, 260)])
def test_check_config_warns_of_pools_that_nobody_keeps(
    shards: int, parts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More parts of pools than a service manager keeps are no mistake, but what a restart loses is told before."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY,) * 2)
    text = (ROOT / "configs/cpu-tp2.toml").read_text()
    text = text.replace("shards = 2", f"shards = {shards}").replace("slots = 256", "slots = 1")
    path = tmp_path / "kvcached.toml"
    path.write_text("".join(text.replace('"default"', f'"r{number}"') for number in range(4)))

    result = CliRunner().invoke(main, ["check-config", "--config", str(path)])

    assert result.exit_code == 0, result.output
    assert (f"kvcached: warning: the pools have {parts} parts" in result.stderr) == (parts > KEPT_MAX)


ACCESS = HOST + '\n[access]\noperate = ["root", "{user}"]\n\n[[access.engine]]\nusers = ["{group}"]\n'


@pytest.mark.parametrize(
    ("user", "group", "expected"),
    [
        (
            "nobody-of-this-name",
            "@0",
            ':8: access.operate = ["root", "nobody-of-this-name"]: \'nobody-of-this-name\' is no user',
        ),
        (
            "0",
            "@no-such-group",
            ":11: access.engine[0].users = [\"@no-such-group\"]: '@no-such-group' is no group of this",
        ),
        ("4294967295", "@0", ':8: access.operate = ["root", "4294967295"]: \'4294967295\' is no number of a user'),
    ],
)
def test_user_that_this_machine_does_not_know_is_told_with_its_line(
    tmp_path: Path, user: str, group: str, expected: str
) -> None:
    """A user or group that does not exist is told with line and fix; after a crash it is no reason to stay away."""
    text = ACCESS.replace("{user}", user).replace("{group}", group)

    (found,) = problems(tmp_path, text)
    assert expected in found
    assert "write its number" in found
    assert problems(tmp_path, text, is_restart=True) == []


def in_user_namespace(folder: Path, uids: str, gids: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on, the kernel's maps are these."""
    folder.mkdir()
    for name, text in (("uid_map", uids), ("gid_map", gids)):
        (folder / name).write_text(text)
    monkeypatch.setattr(user_names, "_own", folder)


@pytest.mark.parametrize("user", ["65534", pwd.getpwuid(65534).pw_name])
def test_user_who_stands_for_all_unknown_ones_is_refused(
    tmp_path: Path, user: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a user namespace, the user as whom the kernel shows all users without a number cannot get a role."""
    text = ACCESS.replace("{user}", user).replace("{group}", "@65534")
    assert problems(tmp_path, text) == []

    in_user_namespace(tmp_path / "proc", "0 1000 1\n1 100000 65535\n", "0 1000 65536\n", monkeypatch)
    (found,) = problems(tmp_path, text)
    assert f"'{user}' stands for every user whom this user namespace does not know" in found


def test_number_that_the_user_namespace_lacks_is_refused_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user or group that no map of the user namespace has is told with line and fix; the default root is no mistake.

    After a crash it is no reason to stay away.
    """
    in_user_namespace(tmp_path / "proc", "1000 1000 1\n2000 2000 10\n", "1000 1000 1\n", monkeypatch)
    assert problems(tmp_path, HOST) == []

    text = HOST + '\n[access]\noperate = ["1000", "2009"]\nlook = ["root", "2010", "@1000", "@2000"]\n'
    assert [each.partition(": access.look = ")[0] for each in problems(tmp_path, text)] == ["kvcached.toml:9"] * 3
    found = [each.partition("]: ")[2].partition(";")[0] for each in problems(tmp_path, text)]
    assert found == [
        "'root' is a user without a number in this user namespace",
        "'2010' is a user without a number in this user namespace",
        "'@2000' is a group without a number in this user namespace",
    ]
    assert problems(tmp_path, text)[0].endswith("name another one, or map it into the user namespace of the daemon")
    assert problems(tmp_path, text, is_restart=True) == []
