"""An engine that is one process, without a session: what it says, and how often."""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any
from unittest.mock import Mock

import pytest

from kvcached_client.blocks.pages import EnginePages
from kvcached_client.engines import one_process
from kvcached_client.engines.one_process import EngineIdentity, OneProcessEngine, Silence
from kvcached_client.errors import DaemonUnreachable, ErrorCode, request_error
from kvcached_client.protocol.engine import HelloOffload, error_reply
from tests.client.fake_daemon import FakeDaemon
from tests.client.offload_rig import layer


def engine_on(daemon: FakeDaemon, silence: Silence | None = None) -> OneProcessEngine:
    return OneProcessEngine(
        EngineIdentity("engine 1.0", bytes(32), "model", 16),
        EnginePages.of_tensors({"layer": layer(6, 512)}),
        run_dir=daemon.run_dir,
        deadline_ms=2000,
        log=logging.getLogger("kvcached_client"),
        silence=silence,
    )


def has_no_session(engine: OneProcessEngine) -> bool:
    with engine.guarded() as session:
        return session is None


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


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
    with contextlib.closing(engine_on(daemon)) as engine:
        for _ in range(2):
            assert has_no_session(engine)
    assert warnings(caplog) == [f"kvcached: nothing is stored or loaded{until}: {code}: what is wrong (what to do)"]
    assert len(daemon.requests) >= 2


def test_refusals_of_several_engines_are_told_once_each(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines of one process tell the same refusal once, one of another reason too, and one in other words no more."""
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    said = iter("aabbc")

    def refuse(request: Any, _: Any) -> Any:
        if isinstance(request, HelloOffload):
            return error_reply(request.id, request_error(ErrorCode.BAD_VALUE, next(said), "what to do")), []
        return None

    daemon.script = refuse
    silence = Silence()
    with contextlib.ExitStack() as stack:
        first, second, third = (stack.enter_context(contextlib.closing(engine_on(daemon, silence))) for _ in range(3))
        for engine in (first, second, first, second, third):
            assert has_no_session(engine)
    words = f"kvcached: nothing is stored or loaded until this is corrected: {ErrorCode.BAD_VALUE}: {{}} (what to do)"
    assert warnings(caplog) == [words.format(reason) for reason in "ac"]


def test_refusal_is_told_again_where_the_daemon_was_lost_before_it_came_back(
    daemon: FakeDaemon, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refusal is over once there is a session, also if the daemon was lost in between: the next one is told."""
    monkeypatch.setattr(one_process, "RETRY_S", 0.0)
    refusal = request_error(ErrorCode.BAD_VALUE, "what is wrong", "what to do")
    opened = Mock(side_effect=[refusal, DaemonUnreachable("gone"), Mock(since_s=math.inf), refusal, refusal])
    monkeypatch.setattr(OneProcessEngine, "_open", opened)
    with contextlib.closing(engine_on(daemon)) as engine:
        assert [has_no_session(engine) for _ in range(3)] == [True, True, False]
        with engine.guarded():
            raise DaemonUnreachable("gone again")
        assert [has_no_session(engine) for _ in range(2)] == [True, True]
    refused = f"kvcached: nothing is stored or loaded until this is corrected: {refusal}"
    told = warnings(caplog)
    assert [told[0], told[2], told[4]] == [refused, "kvcached: the daemon is back", refused]
    assert ["tried again" in told[1], "tried again" in told[3], len(told)] == [True, True, 5]
