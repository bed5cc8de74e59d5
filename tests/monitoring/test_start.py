"""HTTP at the start of a daemon."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvcached import doors
from kvcached.config.schema import Config, load_config
from kvcached.process.access import Access
from kvcached_client.errors import RequestError
from kvcached_client.protocol.engine import HealthReport
from tests.service.office import Office
from tests.virtual_time import VirtualTimeLoop

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
    return config_listening(tmp_path, f"127.0.0.1:{port}")


def config_listening(tmp_path: Path, listen: str) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(f'{HOST}\n[http]\nlisten = "{listen}"\n')
    return load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})


def open_http(config: Config, *, is_takeover: bool, before_health: Callable[[], None] = lambda: None) -> dict[str, str]:
    """What a start does for HTTP, and its end; in between what health says to be wrong, by its parts."""

    async def main() -> dict[str, str]:
        async with AsyncExitStack() as parts:
            attach: Any = NoAttach()
            office = Office()
            doors.open_http(config, office.service, attach, parts, is_takeover=is_takeover)
            before_health()
            report = await office.health()
        assert report.ok is all(part.ok for part in report.parts)
        return {part.part: part.detail for part in report.parts if not part.ok}

    return asyncio.run(main())


def test_taken_port_fails_the_start(taken: int, tmp_path: Path) -> None:
    """A daemon that has nothing to lose does not start without what was asked for, and says which key it is."""
    expected = rf"\[http\] listen: Address already in use: 127.0.0.1, port {taken}; stop what listens there"
    with pytest.raises(OSError, match=expected):
        open_http(config_at(tmp_path, taken), is_takeover=False)


def test_takeover_goes_on_without_a_taken_port(taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A daemon that takes over an earlier one's memory keeps it: it serves without HTTP, and log and health say so."""
    wrong = open_http(config_at(tmp_path, taken), is_takeover=True)

    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert "Address already in use" in record.getMessage()
    assert wrong == {"http": record.getMessage()}


def test_taken_port_is_tried_again(tmp_path: Path) -> None:
    """A takeover without HTTP serves it within seconds of the port being free, and health is good again."""

    async def main(other: socket.socket) -> tuple[HealthReport, HealthReport]:
        async with AsyncExitStack() as parts:
            attach: Any = NoAttach()
            office = Office()
            place = other.getsockname()
            doors.open_http(config_at(tmp_path, place[1]), office.service, attach, parts, is_takeover=True)
            await asyncio.sleep(2.5 * doors.RETRY_S)
            before = await office.health()
            other.close()
            await asyncio.sleep(doors.RETRY_S)
            after = await office.health()
            with socket.create_connection(place):
                pass
        with pytest.raises(ConnectionRefusedError):  # closed with the rest of the daemon
            socket.create_connection(place)
        return before, after

    with (
        closing(socket.create_server(("127.0.0.1", 0))) as other,
        asyncio.Runner(loop_factory=VirtualTimeLoop) as runner,
    ):
        before, after = runner.run(main(other))
    assert [part.part for part in before.parts if not part.ok] == ["http"]
    assert after.ok


def test_health_fails_when_the_socket_of_http_is_gone(tmp_path: Path) -> None:
    """A scraper does not find the daemon then: health names the file."""
    place = tmp_path / "http.sock"
    config = config_listening(tmp_path, f"unix:{place}")

    assert open_http(config, is_takeover=False) == {}
    wrong = open_http(config, is_takeover=False, before_health=place.unlink)

    assert list(wrong) == ["sockets"]
    assert wrong["sockets"].startswith(f"no file any more: {place}; restart the daemon")


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
