"""The client as engines get it: a wheel in an environment of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from kvcached_client import KeyChain

ROOT = Path(__file__).parents[2]
#: Prints what the environment has, where the client is, and the keys of a chain.
PROGRAM = """
import importlib.metadata, importlib.util, json, kvcached_client
chain = kvcached_client.KeyChain(bytes(32), 16, range(40))
names = ("kvcached", "torch", "pydantic")
print(json.dumps({
    "distributions": sorted(each.metadata["Name"].lower() for each in importlib.metadata.distributions()),
    "importable": [name for name in names if importlib.util.find_spec(name)],
    "file": kvcached_client.__file__,
    "keys": chain.keys.hex(),
}))
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_client_installs_alone(tmp_path: Path) -> None:
    """The wheel and its declared dependencies, and nothing else, are enough for the client to hash a chain of keys."""
    project = tomllib.loads((ROOT / "kvcached_client" / "pyproject.toml").read_text())["project"]
    source = tmp_path / "source"  # a copy, for the build writes beside its sources
    built = shutil.ignore_patterns("*.so", "*.egg-info", "build", "__pycache__")
    shutil.copytree(ROOT / "kvcached_client", source, ignore=built)
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source))
    (wheel,) = tmp_path.glob("kvcached_client-*.whl")
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = str(tmp_path / "env" / "bin" / "python")
    pip(python, "install", *project["dependencies"])
    pip(python, "install", "--no-deps", str(wheel))

    done = subprocess.run(
        [python, "-I", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=True, timeout=60
    )
    found = json.loads(done.stdout)
    declared = {requirement.partition(">")[0] for requirement in project["dependencies"]}
    assert declared | {"kvcached-client"} <= set(found["distributions"])
    assert found["importable"] == []
    assert Path(found["file"]).is_relative_to(tmp_path / "env")
    assert found["keys"] == KeyChain(bytes(32), 16, range(40)).keys.hex()


def pip(python: str, *arguments: str) -> None:
    """Run pip; what it says shows if it fails."""
    command = [python, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_both_wheels_serve_in_an_empty_environment(tmp_path: Path) -> None:
    """Installed alone and without torch, `kvcached init` writes what `serve` serves, and `health` and `doctor` pass."""
    source = tmp_path / "source"
    left_out = shutil.ignore_patterns("*.so", "*.egg-info", "build", "__pycache__", ".*", "tests")
    shutil.copytree(ROOT, source, ignore=left_out, symlinks=True)
    pip(
        sys.executable, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(source / "kvcached_client"), str(source)
    )

    done = subprocess.run(
        [sys.executable, "-m", "tests.project.empty_environment", str(tmp_path), str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 failed" in done.stdout
