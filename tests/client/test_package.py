"""What importing the client costs and offers."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import subprocess
import sys

import pytest

import kvcached_client
from tests.project.source_tree import ROOT


def test_import_brings_neither_torch_nor_the_daemon() -> None:
    """An engine's environment gets the client alone: no torch, no libzmq, nothing of the daemon's package."""
    code = """
import sys
from kvcached_client import Admin, Client
from kvcached_client.offload import OffloadClient
print([name for name in ("torch", "zmq", "kvcached") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_import_waits_for_nothing_that_a_worker_has_no_use_for() -> None:
    """The package and its modules of the host pool do not bring numpy; a name brings what it needs."""
    modules = "copy, header, host_layout, pages, progress, transfers"
    code = f"""
import sys
from kvcached_client.blocks import {modules}
heavy = [name for name in ("numpy",) if name in sys.modules]
from kvcached_client import Client
print(heavy, Client.__module__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "kvcached_client.client"]


def test_public_names_are_sorted_and_complete() -> None:
    """`__all__` is sorted; checkers see every name in it as imported, and users get it from where it is imported."""
    tree = ast.parse(inspect.getsource(kvcached_client))
    (typed,) = (node for node in tree.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in typed.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }

    assert list(kvcached_client.__all__) == sorted(imported)
    for name, module in imported.items():
        assert module is not None
        assert getattr(kvcached_client, name) is getattr(importlib.import_module(module), name)
    assert set(imported) <= set(dir(kvcached_client))


def test_package_has_no_other_names() -> None:
    """A name that is not there is missing in the usual way."""
    with pytest.raises(AttributeError, match="'Clinet'"):
        _ = kvcached_client.Clinet


def test_public_names_have_docstrings() -> None:
    """Everything public says what it is, methods included."""
    for name in kvcached_client.__all__:
        value = getattr(kvcached_client, name)
        assert value.__doc__, name
        members = (
            vars(value).items() if inspect.isclass(value) and value.__module__.startswith("kvcached_client") else ()
        )
        for member, attribute in members:
            if not member.startswith("_") and (inspect.isfunction(attribute) or isinstance(attribute, property)):
                assert attribute.__doc__, f"{name}.{member}"


#: What needs more than the dependencies of the client's package, and stays in modules of its own.
EXTRAS = frozenset({"StreamFences", "LayerGates", "PromptCache"})


def test_what_the_documents_name_is_in_the_package() -> None:
    """A class of the SDK that the guide or the reference names is had from `kvcached_client` itself."""
    defined = {
        node.name
        for path in (ROOT / "kvcached_client").rglob("*.py")
        if "build" not in path.parts and "protocol" not in path.parts
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }
    documents = [(ROOT / "docs" / name).read_text() for name in ("sdk.md", "sdk-reference.md")]
    code = re.findall(r"```.*?```|`[^`\n]+`", "\n".join(documents), re.DOTALL)
    named = {word for piece in code for word in re.findall(r"\b[A-Z][A-Za-z]+\b", piece)} & defined
    assert {"AsyncClient", "BlockJob", "StreamFences"} <= named
    assert named - EXTRAS <= set(kvcached_client.__all__)
