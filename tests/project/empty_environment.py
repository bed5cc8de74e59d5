"""Both wheels in an environment with nothing else: what a newcomer does first works, without torch.

    python -m tests.project.empty_environment WHEELS DIRECTORY

Makes DIRECTORY/venv, installs the wheels of the folder WHEELS there, and runs `kvcached init`, `check-config`,
`supervise`, `health` and `doctor` from DIRECTORY, away from the checkout.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import venv
from pathlib import Path

READY_TIMEOUT_S = 60
STOP_TIMEOUT_S = 30


def main(wheels: Path, directory: Path) -> None:
    """Run every step; the first that fails ends it with an exception."""
    environment = directory / "venv"
    venv.create(environment, with_pip=True)
    python, kvcached = environment / "bin/python", str(environment / "bin/kvcached")
    found = [str(wheel) for wheel in sorted(wheels.glob("kvcached_*.whl"))]
    assert len(found) == 2, found
    call = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *found]
    subprocess.run(call, check=True)
    absent = "import importlib.util as u; assert not u.find_spec('torch'); import kvcached; print(kvcached.__file__)"
    assert str(environment) in said([str(python), "-c", absent], directory)

    configured = directory / "configured"
    said([kvcached, "init", "--for", "vllm", str(configured)], directory)
    configuration = str(configured / "kvcached.toml")
    said([kvcached, "check-config", "--config", configuration], directory)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices:
        notices.bind(str(directory / "notify.sock"))
        variables = {**variables_for(directory), "NOTIFY_SOCKET": str(directory / "notify.sock")}
        with subprocess.Popen(
            [kvcached, "supervise", "--config", configuration], env=variables, cwd=directory
        ) as daemon:
            try:
                wait_until_ready(daemon, notices)
                sys.stdout.write(said([kvcached, "health"], directory))
                sys.stdout.write(said([kvcached, "doctor", "--python", str(python)], directory))
                sys.stdout.write(said([kvcached, "stats"], directory))
            finally:
                daemon.terminate()
                daemon.wait(STOP_TIMEOUT_S)
    assert daemon.returncode == 0, daemon.returncode


def variables_for(directory: Path) -> dict[str, str]:
    """The environment without anything that was set for another kvcached, or that leads to the checkout."""
    others = {name: value for name, value in os.environ.items() if not name.startswith(("KVCACHED_", "PYTHON"))}
    return {**others, "KVCACHED_RUN_DIR": str(directory / "run")}


def said(call: list[str], directory: Path) -> str:
    """What a command prints; it must succeed."""
    sys.stdout.write(f"$ {' '.join(call)}\n")
    done = subprocess.run(
        call, env=variables_for(directory), cwd=directory, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return done.stdout


def wait_until_ready(daemon: subprocess.Popen[bytes], notices: socket.socket) -> None:
    """Until the daemon says so; its end, or a minute, is an error."""
    pidfd = os.pidfd_open(daemon.pid)
    try:
        notice = b""
        while b"READY=1" not in notice:
            readable, _, _ = select.select([notices.fileno(), pidfd], [], [], READY_TIMEOUT_S)
            assert notices.fileno() in readable, f"not ready; exit status {daemon.poll()}"
            notice = notices.recv(4096)
    finally:
        os.close(pidfd)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), Path(sys.argv[2]).absolute())
