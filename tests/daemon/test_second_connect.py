"""A process whose calls were interrupted, and that connects again to the same daemon."""

from __future__ import annotations

import pytest

from kvcached_client import Client
from tests.daemon.conftest import RunningDaemon


def test_process_connects_again_at_once_after_an_interrupt(
    daemon: RunningDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After Ctrl-C in the middle of a reading, a client that was closed holds the pool no longer."""

    def interrupt(*_: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    client = Client.connect(daemon.run_dir, deadline_ms=10_000)
    monkeypatch.setattr(client._channel, "_take", interrupt)
    with pytest.raises(KeyboardInterrupt), client:
        client.match(client.chain(range(8)))
    monkeypatch.setattr("kvcached_client.transport.session.SessionChannel._take", interrupt)
    with pytest.raises(KeyboardInterrupt):
        Client.connect(daemon.run_dir, deadline_ms=10_000)
    with Client.connect(daemon.run_dir, deadline_ms=10_000) as after:
        assert after.match(after.chain(range(8))) == 0
