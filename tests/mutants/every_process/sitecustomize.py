"""Python runs this at its start, in each process of a mutant's test: it makes the mistake."""

import os
import traceback

import pytest

from tests.mutants.mutant import NOT_MADE, VARIABLE, found_at

try:
    found_at(os.environ[VARIABLE]).make(pytest.MonkeyPatch())
except Exception:  # noqa: BLE001 - Python would say so, and go on without the mistake
    traceback.print_exc()
    os._exit(NOT_MADE)
