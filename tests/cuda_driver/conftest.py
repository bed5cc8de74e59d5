"""One build of the driver a session; for each test a device of its own and a copy of the driver that is new."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cuda_driver import build
from tests.cuda_driver.calls import Driver
from tests.cuda_driver.device import device_directory, settings

#: Longer than any test: what nobody waits for is not done.
NEVER_US = 3_600_000_000
StartDriver = Callable[..., Driver]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A wait inside the driver hears no signal: what hangs there is ended with its process."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(60, method="thread"))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The driver, built; the tests skip where nothing can build it."""
    if build.compiler() is None:
        pytest.skip("no C compiler here: the fake CUDA driver cannot be built")
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent  # which the workers share
    with (folder / "cuda_driver.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        library = folder / build.LIBRARY
        return library if library.exists() else build.build(folder)


@pytest.fixture
def device() -> Iterator[Path]:
    """The directory of a device that no other test uses."""
    with device_directory() as directory:
        yield directory


@pytest.fixture
def load_driver(library: Path, device: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StartDriver]:
    """Load a fresh driver into this process: `load_driver(seed=3)`; nothing is initialised."""
    loaded: list[Driver] = []

    def load(**values: object) -> Driver:
        defaults = {"delay_us": NEVER_US, "register_us_per_mib": 0, "memory_mib": 64, "trace": tmp_path / "trace"}
        for name, value in settings(**{"directory": device, **defaults, **values}).items():
            monkeypatch.setenv(name, value)
        copy = tmp_path / f"libcuda-{len(loaded)}.so"
        shutil.copy(library, copy)
        loaded.append(Driver(copy))
        return loaded[-1]

    yield load
    for driver in loaded:
        driver.attempt("cuDevicePrimaryCtxReset_v2", 0)


@pytest.fixture
def start_driver(load_driver: StartDriver) -> StartDriver:
    """As `load_driver`, with the primary context of device 0 current."""

    def start(**values: object) -> Driver:
        driver = load_driver(**values)
        driver.start()
        return driver

    return start


@pytest.fixture
def driver(start_driver: StartDriver) -> Driver:
    """A driver whose streams do only what somebody waits for."""
    return start_driver()
