from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from kvcached.log import set_up_logging


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("kvcached", "kvcached_client")]
    saved = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, saved, strict=True):
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_log_plain_line_has_time_level_logger_and_message(capsys: pytest.CaptureFixture[str]) -> None:
    """A plain line starts with the time in UTC and names level and logger; nothing goes to stdout."""
    set_up_logging("info", "plain")

    logging.getLogger("kvcached.service.service").info("session %d ended", 7)

    captured = capsys.readouterr()
    assert captured.out == ""
    time, rest = captured.err.split(" ", 1)
    assert time.endswith("Z")
    assert rest == "INFO kvcached.service.service: session 7 ended\n"


def test_log_escapes_what_could_forge_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A message with a line break or an escape sequence stays one harmless line."""
    set_up_logging("info", "plain")

    logging.getLogger("kvcached").warning("client %s", "x\nERROR kvcached: fake\x1b[2J")

    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(r"client x\nERROR kvcached: fake\x1b[2J")


@pytest.mark.parametrize(("level", "expected"), [("debug", 2), ("info", 1), ("warning", 0), ("error", 0)])
def test_log_level_is_the_least_important_that_shows(
    level: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Messages below the level are not logged."""
    set_up_logging(level, "plain")  # type: ignore[arg-type]

    logging.getLogger("kvcached.rpc").debug("a")
    logging.getLogger("kvcached.rpc").info("b")

    assert len(capsys.readouterr().err.splitlines()) == expected


def test_log_json_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    """In JSON, each message is one line with time, level, logger and message, a traceback included."""
    set_up_logging("info", "json")

    logging.getLogger("kvcached.worker").error("lost", exc_info=ValueError("no\nsuch thing"))

    (line,) = capsys.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "kvcached.worker", "lost")
    assert "ValueError: no\nsuch thing" in entry["traceback"]


def test_log_set_up_twice_logs_once(capsys: pytest.CaptureFixture[str]) -> None:
    """Setting up again replaces the earlier handler."""
    set_up_logging("info", "plain")
    set_up_logging("info", "plain")

    logging.getLogger("kvcached").info("once")

    assert len(capsys.readouterr().err.splitlines()) == 1
