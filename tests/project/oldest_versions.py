"""The oldest versions of other packages that both distributions allow, for pip: ``make oldest`` tests them.

torch is left out: its old builds for the CPU are not everywhere, and no test depends on its version.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Final

_ROOT: Final = Path(__file__).resolve().parents[2]
_PROJECTS: Final = ("pyproject.toml", "kvcached_client/pyproject.toml")
#: Extras that no user needs, whose tools judge the code or draw.
_TOOLS: Final = frozenset({"dev", "docs", "plots"})
_BOUND: Final = re.compile(r"([A-Za-z0-9_.-]+)>=([0-9.]+)")


def oldest_versions() -> dict[str, str]:
    """The lower bound of each package that a user of some extra gets."""
    found: dict[str, str] = {}
    for name in _PROJECTS:
        project = tomllib.loads((_ROOT / name).read_text(encoding="utf-8"))["project"]
        extras = [each for extra, each in project["optional-dependencies"].items() if extra not in _TOOLS]
        for requirement in sum(extras, project["dependencies"]):
            bound = _BOUND.fullmatch(requirement)
            if bound is not None and bound[1] != "torch":
                found[bound[1]] = bound[2]
    return found


if __name__ == "__main__":
    sys.stdout.write(" ".join(f"{name}=={version}" for name, version in oldest_versions().items()))
