"""What importing the client costs and offers."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import kvcached_client


def test_import_brings_neither_torch_nor_the_daemon() -> None:
    """An engine's environment gets the client alone: no torch, nothing of the daemon's package."""
    code = "import sys, kvcached_client; print([name for name in ('torch', 'kvcached') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_sorted_and_complete() -> None:
    """`__all__` is sorted, and holds every name that the package imports for its users."""
    imported = {
        name
        for name, value in vars(kvcached_client).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    assert list(kvcached_client.__all__) == sorted(imported)


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
