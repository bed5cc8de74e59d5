"""A program of the tests as another user: `UID GID MODULE ARGUMENTS…`; `main()` of the module runs as that user.

Everything is imported before, for the interpreter may be where only this user can read it.
"""

from __future__ import annotations

import importlib
import os
import sys

#: What the programs import only when they need it.
_LATE = (
    "encodings.ascii",
    "kvcached.daemon",
    "kvcached.cli.serve",
    "kvcached.cli.control",
    "kvcached.config.machine",
    "kvcached_client",
)


def main(uid: str, gid: str, module: str, *arguments: str) -> None:
    """Become the user, and run."""
    program = importlib.import_module(module)
    for each in _LATE:
        importlib.import_module(each)
    os.setgroups([])
    os.setresgid(*[int(gid)] * 3)
    os.setresuid(*[int(uid)] * 3)
    sys.argv = [module, *arguments]
    program.main()


if __name__ == "__main__":
    main(*sys.argv[1:])
