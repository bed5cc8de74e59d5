from __future__ import annotations

import ast
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvcached.log import OUTPUT_BYTES_MAX, open_log, set_up_logging
from kvcached.service.stories import _SHOWN
from tests.project.source_tree import ROOT, modules


@pytest.fixture(autouse=True)
def _restored_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("kvcached", "kvcached_client")]
    saved = [(logger.handlers, logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, (handlers, level, propagate) in zip(loggers, saved, strict=True):
        logger.handlers, logger.level, logger.propagate = handlers, level, propagate


def test_log_plain_line_has_time_level_logger_and_message(capfd: pytest.CaptureFixture[str]) -> None:
    """A plain line starts with the time in UTC and names level and logger; nothing goes to stdout."""
    set_up_logging("info", "plain")

    logging.getLogger("kvcached.service.service").info("session %d ended", 7)

    captured = capfd.readouterr()
    assert captured.out == ""
    time, rest = captured.err.split(" ", 1)
    assert time.endswith("Z")
    assert rest == "INFO kvcached.service.service: session 7 ended\n"


def test_log_escapes_what_could_forge_a_line(capfd: pytest.CaptureFixture[str]) -> None:
    """A message with a line break or an escape sequence stays one harmless line."""
    set_up_logging("info", "plain")

    logging.getLogger("kvcached").warning("client %s", "x\nERROR kvcached: fake\x1b[2J")

    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].endswith(r"client x\nERROR kvcached: fake\x1b[2J")


def test_log_escapes_tracebacks(capfd: pytest.CaptureFixture[str]) -> None:
    """What an error says drives no terminal, and the lines of its traceback stay lines."""
    set_up_logging("info", "plain")

    logging.getLogger("kvcached").error("failed", exc_info=ValueError("x\x1b[2J\ny"))

    assert capfd.readouterr().err.splitlines()[1:] == [r"ValueError: x\x1b[2J", "y"]


@pytest.mark.parametrize(("level", "expected"), [("debug", 2), ("info", 1), ("warning", 0), ("error", 0)])
def test_log_level_is_the_least_important_that_shows(
    level: str, expected: int, capfd: pytest.CaptureFixture[str]
) -> None:
    """Messages below the level are not logged."""
    set_up_logging(level, "plain")  # type: ignore[arg-type]

    logging.getLogger("kvcached.rpc").debug("a")
    logging.getLogger("kvcached.rpc").info("b")

    assert len(capfd.readouterr().err.splitlines()) == expected


def test_log_json_is_one_object_per_line(capfd: pytest.CaptureFixture[str]) -> None:
    """In JSON, each message is one line with time, level, logger and message, a traceback included."""
    set_up_logging("info", "json")

    logging.getLogger("kvcached.worker").error("lost", exc_info=ValueError("no\nsuch thing"))

    (line,) = capfd.readouterr().err.splitlines()
    entry = json.loads(line)
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "kvcached.worker", "lost")
    assert "ValueError: no\nsuch thing" in entry["traceback"]


def test_log_set_up_twice_logs_once(capfd: pytest.CaptureFixture[str]) -> None:
    """Setting up again replaces the earlier handler."""
    set_up_logging("info", "plain")
    set_up_logging("info", "plain")

    logging.getLogger("kvcached").info("once")

    assert len(capfd.readouterr().err.splitlines()) == 1


def test_log_json_has_the_fields_that_a_message_names(capfd: pytest.CaptureFixture[str]) -> None:
    """What a message names is a member of its own in JSON, and cannot replace the members of every line."""
    set_up_logging("info", "json")

    fields = {"session": 3, "lease": 7, "level": "mine"}
    logging.getLogger("kvcached").info("session %(session)d, lease %(lease)d: %(level)s", fields)

    entry = json.loads(capfd.readouterr().err)
    assert (entry["session"], entry["lease"], entry["level"]) == (3, 7, "info")
    assert entry["message"] == "session 3, lease 7: mine"


@pytest.mark.parametrize("log_format", ["plain", "json"])
def test_log_lines_in_the_journal_have_priorities(
    log_format: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where stderr is the journal's, each line, of a traceback too, begins with its priority; elsewhere none does."""
    status = os.fstat(2)
    monkeypatch.setenv("JOURNAL_STREAM", f"{status.st_dev}:{status.st_ino}")
    set_up_logging("debug", log_format)  # type: ignore[arg-type]
    log = logging.getLogger("kvcached")
    for level in (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR, logging.CRITICAL):
        log.log(level, "x", exc_info=ValueError("y") if level == logging.ERROR else None)
    lines = capfd.readouterr().err.splitlines()
    monkeypatch.setenv("JOURNAL_STREAM", "1:2")
    set_up_logging("debug", log_format)  # type: ignore[arg-type]
    log.info("elsewhere")

    assert [line[:3] for line in lines if "ValueError" not in line] == ["<7>", "<6>", "<4>", "<3>", "<2>"][
        : 5 if log_format == "plain" else 3
    ] + ["<2>"] * (log_format == "json")
    assert {line[:3] for line in lines if "ValueError" in line} == {"<3>"}
    assert not capfd.readouterr().err.startswith("<")


def test_log_lines_name_what_they_are_about() -> None:
    """Every message of the daemon that has a session, lease, transfer, … has it by name, so that it is a field."""
    about = re.compile(r"(session|lease|namespace|transfer|replica|shard|process)(s of session)? %[^(]")
    own_log = ("kvcached/worker/main.py", "kvcached/worker/executor.py", "kvcached/storage/")
    found = [
        f"{path}:{node.lineno}: {node.value}"
        for path, tree in modules("kvcached")
        if not path.startswith(own_log)
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and about.search(node.value)
    ]

    assert found == []


def test_documented_fields_are_named_by_messages() -> None:
    """Each field of docs/logs.md is one that some message names."""
    text = (ROOT / "docs/logs.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text.split("## Fields")[1].split("\n## ")[0], re.MULTILINE)
    sources = [ast.unparse(tree) for _, tree in modules("kvcached")]

    assert len(documented) == len(set(documented)) >= 10
    for name in set(documented).difference(_SHOWN):
        assert any(f"%({name})" in source for source in sources), name


def test_output_of_processes_is_put_aside_before_it_is_long(tmp_path: Path) -> None:
    """A file is appended to until it is long; then it is kept under another name until the next one is."""
    path, aside = tmp_path / "worker.log", tmp_path / "worker.log.1"
    path.write_bytes(bytes(OUTPUT_BYTES_MAX - 1))

    for text, sizes in (("a", (OUTPUT_BYTES_MAX, 0)), ("b", (1, OUTPUT_BYTES_MAX)), ("c", (2, OUTPUT_BYTES_MAX))):
        log = open_log(str(path))
        os.write(log, text.encode())
        os.close(log)
        assert (path.stat().st_size, aside.stat().st_size if aside.exists() else 0) == sizes
    assert path.read_text() == "bc"


def test_output_that_cannot_be_put_aside_grows(tmp_path: Path) -> None:
    """A directory in the other file's place costs the limit, and not the process."""
    path = tmp_path / "worker.log"
    path.write_bytes(bytes(OUTPUT_BYTES_MAX))
    (tmp_path / "worker.log.1").mkdir()

    os.close(open_log(str(path)))
    assert path.stat().st_size == OUTPUT_BYTES_MAX
