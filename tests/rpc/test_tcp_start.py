"""The TCP port at the start of a daemon."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, closing
from pathlib import Path

import pytest

from kvcached import doors
from kvcached.config.schema import Config, load_config
from kvcached_client.errors import RequestError
from kvcached_client.protocol.key_files import write_key_file
from tests.service.office import Office
from tests.virtual_time import VirtualTimeLoop

HOST = '[host]\nsize_bytes = "8MiB"\nslab_bytes = "1MiB"\n\n[offload]\n'
CLIENT = f'[[tcp.client]]\nname = "x"\npublic_key = "{"0" * 40}"\nrole = "look"\n'


def config_of(tmp_path: Path, port: int) -> Config:
    path = tmp_path / "kvcached.toml"
    path.write_text(f'{HOST}[tcp]\nlisten = "127.0.0.1:{port}"\nkey_file = "{tmp_path}/daemon.key"\n{CLIENT}')
    return load_config(path, environment={}, options={"run_dir": str(tmp_path / "run")})


def open_tcp(config: Config, *, is_takeover: bool) -> dict[str, str]:
    """What a start does for the port, and its end; in between what health says to be wrong, by its parts."""

    async def main() -> dict[str, str]:
        async with AsyncExitStack() as parts:
            office = Office()
            doors.open_tcp(config, office.service, parts, is_takeover=is_takeover)
            report = await office.health()
        return {part.part: part.detail for part in report.parts if not part.ok}

    return asyncio.run(main())


def take_the_port(key: Path, _: pytest.MonkeyPatch) -> None:
    write_key_file(key, bytes(32))


def lose_the_key(_key: Path, _: pytest.MonkeyPatch) -> None:
    """Nobody has made it."""


def lose_the_package(key: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_key_file(key, bytes(32))
    monkeypatch.setitem(sys.modules, "kvcached.server.tcp", None)  # as where what it imports is not there


@pytest.mark.parametrize(
    ("prepare", "error", "said"),
    [
        (take_the_port, OSError, "[tcp] listen: Address already in use: 127.0.0.1, port "),
        (lose_the_key, RequestError, "daemon.key: No such file or directory"),
        (lose_the_package, RequestError, "pip install PyNaCl"),
    ],
)
def test_takeover_goes_on_without_the_port(
    prepare: Callable[[Path, pytest.MonkeyPatch], None],
    error: type[Exception],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A port, key file or package that is missing fails a first start; a takeover serves without, and says so."""
    prepare(tmp_path / "daemon.key", monkeypatch)
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        config = config_of(tmp_path, other.getsockname()[1])

        wrong = open_tcp(config, is_takeover=True)
        with pytest.raises(error) as refused:
            open_tcp(config, is_takeover=False)

    (record,) = [each for each in caplog.records if each.levelno == logging.ERROR]
    assert said in record.getMessage()
    assert wrong == {"tcp": record.getMessage()}
    assert record.getMessage().endswith("other machines are not served until this is mended, which is tried every 5 s")
    assert said in str(refused.value)


def test_key_that_was_away_opens_the_port_when_it_is_there(tmp_path: Path) -> None:
    """A takeover without the TCP port serves it within seconds of its key file being there."""

    async def main(config: Config) -> list[bool]:
        async with AsyncExitStack() as parts:
            office = Office()
            doors.open_tcp(config, office.service, parts, is_takeover=True)
            found = [(await office.health()).ok]
            write_key_file(tmp_path / "daemon.key", bytes(32))
            await asyncio.sleep(doors.RETRY_S)
            found.append((await office.health()).ok)
            with socket.create_connection(("127.0.0.1", port)):
                return found

    with closing(socket.create_server(("127.0.0.1", 0))) as free:
        port = free.getsockname()[1]
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main(config_of(tmp_path, port))) == [False, True]
