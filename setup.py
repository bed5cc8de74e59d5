"""What pyproject.toml cannot say: a wheel also holds the folder `configs`, and, where asked for, a compiled core.

With KVCACHED_COMPILE=1 in the environment, the modules of `kvcached.core` are compiled by mypyc, from the same sources;
that takes a C compiler and minutes. The sources are in the wheel as well: tracebacks show them.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

#: Structures on the wire, which msgspec makes from their annotations.
NOT_COMPILED = {Path("kvcached/core/messages.py")}
#: What the compiler needs besides what runs.
COMPILER = ["mypy[mypyc]~=2.4.1", "numpy>=1.26", "msgspec>=0.19", "xxhash>=3.4"]
#: What examples and units are called. Anything else that somebody keeps beside them, such as Compose's .env, is secret.
CONFIGS = ("*.toml", "*.conf", "*.service", "*.yaml")


class BuildWithConfigs(build_py):
    """Copy the examples and the systemd unit into the package, unless the install is an editable one."""

    def run(self) -> None:
        """Build as usual, then copy."""
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib, "kvcached", "configs")
        shutil.rmtree(target, ignore_errors=True)  # what an earlier build has left would be in the wheel, too
        target.mkdir(parents=True)
        for source in sorted(path for pattern in CONFIGS for path in Path("configs").glob(pattern) if path.is_file()):
            self.copy_file(str(source), str(target / source.name))


class BuildCompiled(build_ext):
    """Compile, but not for an editable install: what is compiled would hide every later change of the sources."""

    def run(self) -> None:
        """Build as usual.

        Raises:
            SystemExit: the install is an editable one.
        """
        if self.editable_mode and self.extensions:
            raise SystemExit("KVCACHED_COMPILE is for wheels: an editable install runs the sources, leave it unset")
        super().run()


def compiled_core() -> list[Extension]:
    """The modules of the core, as extensions."""
    from mypyc.build import mypycify  # noqa: PLC0415 - only a compiled build has it

    modules = sorted(set(Path("kvcached/core").rglob("*.py")) - NOT_COMPILED)
    options = ["--config-file=", "--python-version=3.11", "--explicit-package-bases", "--ignore-missing-imports"]
    options += ["--follow-imports=silent"]  # what a later numpy calls an error elsewhere must not fail an install
    return mypycify([*options, *map(str, modules)])


wants_compiled = os.environ.get("KVCACHED_COMPILE") == "1"
#: The other commands only ask what the package needs, before the compiler is there.
builds = not {"bdist_wheel", "editable_wheel", "build_ext"}.isdisjoint(sys.argv)
setup(
    cmdclass={"build_py": BuildWithConfigs, "build_ext": BuildCompiled},
    ext_modules=compiled_core() if wants_compiled and builds else [],
    setup_requires=COMPILER if wants_compiled else [],
)
