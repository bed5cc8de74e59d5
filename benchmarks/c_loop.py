"""The floor of scattered copies in C, compiled when it is asked for."""

from __future__ import annotations

import ctypes
import os
import shlex
import subprocess
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Final

#: int64 numbers of a piece: offset at the destination, offset at the source, size.
_PIECE_ITEMS: Final = 3

CopyLoop = Callable[["array[int]", int, int], None]


def compile_copy_loop(directory: Path) -> CopyLoop:
    """A loop of memcpy over pieces, called as `kvcached_client.blocks.copy.copy_all` is.

    Args:
        directory: where the library is written; it may go as soon as this has returned.

    Raises:
        RuntimeError: there is no C compiler, or it failed.
    """
    library = directory / "scatter_loop.so"
    source = Path(__file__).with_name("scatter_loop.c")
    compiler = shlex.split(os.environ.get("CC", "cc"))
    command = [*compiler, "-O3", "-shared", "-fPIC", "-o", str(library), str(source)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except FileNotFoundError:
        raise RuntimeError(f"the suite copy has its floor in C, and there is no compiler {compiler[0]!r}") from None
    except subprocess.CalledProcessError as error:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{error.stderr}") from None
    loop = ctypes.CDLL(str(library)).scatter_loop
    loop.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    loop.restype = None

    def copy(pieces: array[int], destination: int, source: int) -> None:
        address, items = pieces.buffer_info()
        loop(address, items // _PIECE_ITEMS, destination, source)

    return copy
