from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from kvcached.process.notify import READY, STOPPING, notify


@pytest.mark.parametrize("is_abstract", [False, True])
def test_notify_reaches_the_manager(is_abstract: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each state is one datagram to the socket that the environment names, be it a path or an abstract name."""
    address = f"@{tmp_path}" if is_abstract else str(tmp_path / "notify.sock")
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(address.replace("@", "\0"))

        notify(READY)
        notify(STOPPING)

        assert [receiver.recv(100), receiver.recv(100)] == [b"READY=1", b"STOPPING=1"]


def test_notify_without_a_manager_does_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where nobody asked, nothing is sent and nothing is logged."""
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)

    notify(READY)

    assert caplog.messages == []


def test_notify_that_fails_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A manager that is gone is a warning and no error."""
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))

    with caplog.at_level(logging.WARNING, "kvcached"):
        notify(READY)

    assert ["READY=1" in message for message in caplog.messages] == [True]
