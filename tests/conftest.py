"""What all tests share. `make test` runs those that are quick and a few with a whole daemon, `make test-all` all."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from hypothesis import settings

from tests.parts import part

# A busy machine stops a process for longer than any example takes.
settings.register_profile("without deadlines", deadline=None)
settings.load_profile("without deadlines")

#: A folder whose tests start whole daemons: those that are marked are in the default run.
_WHOLE_DAEMONS = Path(__file__).parent / "daemon"


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--part K/N``."""
    meaning = "run every Nth file of those selected, from the Kth on (default: all)"
    parser.addoption("--part", default="0/1", type=part, metavar="K/N", help=meaning)


@pytest.hookimpl(tryfirst=True)  # before pytest looks at the markers
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what is not in the default run: folders outside pytest's `testpaths`, most tests of whole daemons."""
    default = tuple(f"{config.rootpath / folder}/" for folder in config.getini("testpaths"))
    for item in items:
        is_whole_daemon = item.path.parent == _WHOLE_DAEMONS and item.get_closest_marker("end_to_end") is None
        if is_whole_daemon or not str(item.path).startswith(default):
            item.add_marker(pytest.mark.full)


def pytest_collection_finish() -> None:
    """Leave what was imported and found out of Python's searches for garbage: tests ask for them, a second each."""
    gc.collect()
    gc.freeze()


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
