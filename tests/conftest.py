"""What all tests share. `make test` runs those that are quick and a few with a whole daemon, `make test-all` all."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

from tests.parts import part

# A busy machine stops a process for longer than any example takes.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

_TESTS = Path(__file__).parent
#: Folders whose tests start no processes, or few. What is in another folder is for `make test-all`.
_QUICK = frozenset(
    {
        "access",
        "attach",
        "client",
        "config",
        "core",
        "cuda_driver",
        "events",
        "keys",
        "monitoring",
        "project",
        "protocol",
        "rpc",
        "service",
        "simulation",
    }
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part K/N``."""
    meaning = "run every Nth file of those selected, from the Kth on (default: all)"
    parser.addoption("--part", default="0/1", type=part, metavar="K/N", help=meaning)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of the other folders, but for those that are marked to be in every run."""
    for item in items:
        folder = item.path.relative_to(_TESTS).parts[0]
        if folder not in _QUICK and item.get_closest_marker("end_to_end") is None:
            item.add_marker(pytest.mark.full)


class _Parts:
    """Leaves out the files of other parts."""

    @pytest.hookimpl(trylast=True)  # when other options have left out what they leave out
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        chosen = set(sorted({item.path for item in items})[config.getoption("--part")])
        config.hook.pytest_deselected(items=[item for item in items if item.path not in chosen])
        items[:] = [item for item in items if item.path in chosen]


def pytest_configure(config: pytest.Config) -> None:
    """Choose a part last."""
    config.pluginmanager.register(_Parts())
