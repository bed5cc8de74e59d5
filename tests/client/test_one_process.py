"""An engine that is one process, without a session: what it says, and how often."""

from __future__ import annotations

import logging

import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.engines import one_process
from kvcached_client.engines.one_process import EngineIdentity, OneProcessEngine
from kvcached_client.errors import ErrorCode, request_error
from kvcached_client.protocol.engine import error_reply
from tests.client.fake_daemon import FakeDaemon
from tests.client.offload_rig import layer


@pytest.mark.parametrize(
    ("code", "until"),
    [
        (ErrorCode.BAD_VALUE, " until this is corrected"),
        (ErrorCode.FORBIDDEN, " until this is corrected"),
        (ErrorCode.DRAINING, ", and the daemon is tried again every 0 s"),
    ],
)
def test_mistakes_and_passing_failures_are_told_apart(
    daemon: FakeDaemon, code: ErrorCode, until: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What only a correction mends is told once, with what to do, and not as a failure that waiting may mend."""
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    refusal = request_error(code, "what is wrong", "what to do")
    daemon.script = lambda request, _: (error_reply(request.id, refusal), [])
    engine = OneProcessEngine(
        EngineIdentity("engine 1.0", bytes(32), "model", 16),
        EnginePages.of_tensors({"layer": layer(6, 512)}),
        run_dir=daemon.run_dir,
        deadline_ms=2000,
        log=logging.getLogger("kvcached_client"),
    )
    for _ in range(2):
        with engine.guarded() as session:
            assert session is None
    engine.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"kvcached: nothing is stored or loaded{until}: {code}: what is wrong (what to do)"
    ]
    assert len(daemon.requests) >= 2
