"""Events at the start of a daemon: what becomes of a place that is taken, or that is forbidden."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import pytest

from kvcached import doors
from kvcached.config.schema import Config, load_config
from tests.service.office import Office

CONFIG = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n\n[events]\n'


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which somebody else listens."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        yield other.getsockname()[1]


def config_of(tmp_path: Path, **endpoints: str) -> Config:
    path, run_dir = tmp_path / "kvcached.toml", tmp_path / "run"
    run_dir.mkdir()
    path.write_text(CONFIG + "".join(f'{key} = "{place}"\n' for key, place in endpoints.items()))
    return load_config(path, environment={}, options={"run_dir": str(run_dir)})


def open_events(config: Config, *, is_takeover: bool, then: Callable[[Office], None] = lambda _: None) -> None:
    """What a start does for events, something behind it, and its end."""

    async def main() -> None:
        office = Office()
        async with AsyncExitStack() as parts:
            await doors.open_events(config, office.cache, office.service, None, parts, is_takeover=is_takeover)
            then(office)

    asyncio.run(main())


def failures(config: Config, *, is_takeover: bool, before: Callable[[], None] = lambda: None) -> dict[str, str]:
    """What health says to be wrong behind a start: the details by their parts. `before` is done first."""

    async def main() -> dict[str, str]:
        office = Office()
        async with AsyncExitStack() as parts:
            await doors.open_events(config, office.cache, office.service, None, parts, is_takeover=is_takeover)
            before()
            report = await office.health()
        assert report.ok is all(part.ok for part in report.parts)
        return {part.part: part.detail for part in report.parts if not part.ok}

    return asyncio.run(main())


def change(office: Office) -> None:
    """The index changes, and nobody has been told of it behind that."""
    told: Any = object()
    office.cache.index_changes.append(told)
    office.service.index_changed()
    assert office.cache.index_changes == []


def test_endpoint_that_is_taken_fails_the_start(taken: int, tmp_path: Path) -> None:
    """A daemon that has nothing to lose does not start without what was asked for, and says which key it is."""
    config = config_of(tmp_path, replay_endpoint=f"tcp://127.0.0.1:{taken}")

    with pytest.raises(OSError, match=rf"\[events\] replay_endpoint: Address already in use: 127.0.0.1, port {taken};"):
        open_events(config, is_takeover=False)
    assert list(config.run_dir.iterdir()) == []


def test_socket_of_a_living_process_fails_the_start(tmp_path: Path) -> None:
    """A place where somebody listens is not taken from there: the start fails, and what was opened is removed."""
    place = tmp_path / "other.sock"
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(place))
        other.listen()
        config = config_of(tmp_path, replay_endpoint=f"ipc://{place}")

        with pytest.raises(OSError, match=rf"\[events\] replay_endpoint: another process serves {place};"):
            open_events(config, is_takeover=False)
    assert place.is_socket()
    assert list(config.run_dir.iterdir()) == []


@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
@pytest.mark.parametrize("place", ["tcp://127.0.0.1:{taken}", "ipc:///missing/dir/e.sock"])
def test_takeover_goes_on_without_an_endpoint(
    key: str, place: str, taken: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A takeover logs which endpoint it is, listens at neither, and keeps no changes that nobody will take."""
    config = config_of(tmp_path, **{key: place.format(taken=taken)})

    open_events(config, is_takeover=True, then=change)

    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert record.getMessage().startswith(f"[events] {key}: ")
    assert record.getMessage().endswith("there are no events until the next start")
    assert list(config.run_dir.iterdir()) == []


def test_health_fails_while_events_stay_closed(tmp_path: Path) -> None:
    """No router hears a daemon that took over memory without its endpoint: health says so, with the reason."""
    place = tmp_path / "other.sock"
    with closing(socket.socket(socket.AF_UNIX)) as other:
        other.bind(str(place))
        other.listen()

        wrong = failures(config_of(tmp_path, endpoint=f"ipc://{place}"), is_takeover=True)

    assert wrong == {
        "events": f"[events] endpoint: another process serves {place}; make the place free, or name another one; there"
        " are no events until the next start"
    }


@pytest.mark.parametrize("name", ["events.sock", "replay.sock"])
def test_health_fails_when_a_socket_of_events_is_gone(name: str, tmp_path: Path) -> None:
    """A router that comes later does not find the daemon then: health names the file."""
    config = config_of(tmp_path)

    assert failures(config, is_takeover=False) == {}
    wrong = failures(config, is_takeover=False, before=(config.run_dir / name).unlink)

    assert list(wrong) == ["sockets"]
    assert wrong["sockets"].startswith(f"no file any more: {config.run_dir / name}; restart the daemon")


def test_ports_of_events_have_no_files(tmp_path: Path) -> None:
    """Health looks for no file of an endpoint that is a port."""
    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    config = config_of(tmp_path, endpoint=f"tcp://127.0.0.1:{port}")

    assert failures(config, is_takeover=False) == {}


def refuse(monkeypatch: pytest.MonkeyPatch, *families: int) -> None:
    """Sockets of these families are refused, as a unit does it."""
    create_server = socket.create_server

    def create(address: tuple[str, int], *, family: int, **options: Any) -> socket.socket:
        if family in families:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return create_server(address, family=family, **options)

    monkeypatch.setattr(socket, "create_server", create)


def test_family_that_the_unit_forbids_names_the_drop_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under a unit without IP sockets the start fails, and the error says which file allows them."""
    refuse(monkeypatch, socket.AF_INET, socket.AF_INET6)

    with pytest.raises(OSError, match=r"\[events\] endpoint: .*; under systemd see configs/http\.conf$"):
        open_events(config_of(tmp_path, endpoint="tcp://127.0.0.1:9410"), is_takeover=False)


def test_name_with_an_address_that_is_missing_is_served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the addresses of `localhost`, one that this machine has suffices."""
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        port = other.getsockname()[1]
    found = [
        (family, socket.SOCK_STREAM, 6, "", (address, port))
        for family, address in ((socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1"))
    ]
    refuse(monkeypatch, socket.AF_INET6)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)

    def connect(_: Office) -> None:
        with socket.socket() as peer:
            peer.connect(("127.0.0.1", port))

    open_events(config_of(tmp_path, endpoint=f"tcp://localhost:{port}"), is_takeover=False, then=connect)
