"""HTTP at the start of a daemon."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvcached.config.schema import Config, load_config
from kvcached.daemon import _open_http
from kvcached.process.access import Access
from kvcached_client.errors import RequestError
from tests.service.office import Office

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'


class NoAttach:
    """The attach socket of a daemon that nobody has asked anything."""

    def __init__(self) -> None:
        self.refusals: dict[Any, int] = {}
        self.access = Access()


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        yield other.getsockname()[1]


def config_at(tmp_path: Path, port: int) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(f'{HOST}\n[http]\nlisten = "127.0.0.1:{port}"\n')
    return load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})


def open_http(config: Config, *, is_takeover: bool) -> None:
    """What a start does for HTTP, and its end."""

    async def main() -> None:
        async with AsyncExitStack() as parts:
            attach: Any = NoAttach()
            _open_http(config, Office().service, attach, parts, is_takeover=is_takeover)

    asyncio.run(main())


def test_taken_port_fails_the_start(taken: int, tmp_path: Path) -> None:
    """A daemon that has nothing to lose does not start without what was asked for, and says which key it is."""
    expected = rf"\[http\] listen: Address already in use: 127.0.0.1, port {taken}; stop what listens there"
    with pytest.raises(OSError, match=expected):
        open_http(config_at(tmp_path, taken), is_takeover=False)


def test_takeover_goes_on_without_a_taken_port(taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A daemon that takes over an earlier one's memory keeps it: it logs the error and serves without HTTP."""
    open_http(config_at(tmp_path, taken), is_takeover=True)

    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "Address already in use" in record.getMessage()


def test_family_that_the_unit_forbids_names_the_drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a unit without IP sockets the error says which file allows them."""

    def refuse(*_: object, **__: object) -> socket.socket:
        raise OSError(97, "Address family not supported by protocol")

    monkeypatch.setattr(socket, "create_server", refuse)
    with pytest.raises(OSError, match=r"under systemd see configs/http\.conf"):
        open_http(config_at(tmp_path, 9410), is_takeover=False)


@pytest.mark.parametrize("module", ["kvcached.server.http", "kvcached.monitoring.pages"])
def test_missing_package_costs_a_takeover_its_metrics_alone(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A takeover goes on without the extra, and logs how to install it; any other start fails with that."""
    monkeypatch.setitem(sys.modules, module, None)  # as where what it imports is not there

    open_http(config_at(tmp_path, 9410), is_takeover=True)

    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "pip install prometheus_client h11; there are no metrics" in record.getMessage()
    with pytest.raises(RequestError, match=r"\[http\] listen: .*pip install"):
        open_http(config_at(tmp_path, 9410), is_takeover=False)
