"""Build the fake driver: `python -m tests.cuda_driver.build FOLDER` leaves a `libcuda.so.1` there."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parent / "source"
#: What `LD_LIBRARY_PATH` finds.
LIBRARY = "libcuda.so.1"
FLAGS = ("-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fvisibility=hidden", "-pthread")


def compiler() -> str | None:
    """Path of the C compiler, or None where there is none."""
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")


def _compile(*arguments: str) -> None:
    found = compiler()
    if found is None:
        message = "no C compiler: install gcc or clang"
        raise FileNotFoundError(message)
    done = subprocess.run([found, *FLAGS, *arguments], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = f"the fake CUDA driver does not compile:\n{done.stderr}"
        raise RuntimeError(message)


def build(folder: Path) -> Path:
    """Compile the driver into the folder; returns the library. Raises RuntimeError with the compiler's words."""
    library = folder / LIBRARY
    sources = sorted(str(path) for path in SOURCE.glob("*.c"))
    _compile("-fPIC", "-shared", "-Wl,-z,defs", f"-Wl,-soname,{LIBRARY}", *sources, "-o", str(library))
    return library


def build_program(program: Path, main: Path, *flags: str) -> Path:
    """Compile the driver together with a C program that calls it, as the thread sanitizer needs it."""
    _compile(*flags, *sorted(str(path) for path in SOURCE.glob("*.c")), str(main), "-o", str(program))
    return program


if __name__ == "__main__":
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"{build(Path(sys.argv[1]))}\n")
