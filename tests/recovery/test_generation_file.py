"""The record of generations as a file."""

from __future__ import annotations

import asyncio
import json
import threading
from pathlib import Path

import pytest
from msgspec import structs

from kvcached.config.tables import StorageLayout
from kvcached.recovery.generations import EditionRecord, Record, RecordFile, read_record, recorded_layout

ROOT = b"r" * 32
RECORD = Record(
    editions=(EditionRecord(namespace=ROOT.hex(), generation=7, weights_version="step 9"),), forgets=("ab" * 16,)
)


def test_file_says_what_was_written(tmp_path: Path) -> None:
    """A record is read as it was written, and nobody but its owner reads it."""
    path = tmp_path / "generations.json"

    assert asyncio.run(written(path, RECORD)) == ("", RECORD)
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(("layout", "told"), [("engine", None), ("canonical", "canonical")])
def test_file_names_its_format_and_a_layout_that_not_all_daemons_know(
    tmp_path: Path, layout: StorageLayout, told: str | None
) -> None:
    """Each file says of which format it is; one of the engines' layout has no field that an older daemon refuses."""
    path = tmp_path / "generations.json"
    record = structs.replace(RECORD, layout=recorded_layout(layout))

    assert asyncio.run(written(path, record)) == ("", record)
    content = json.loads(path.read_bytes())
    assert (content["format"], content.get("layout")) == (1, told)


async def written(path: Path, record: Record) -> tuple[str, Record | None]:
    """Why it could not be written, and what is read then."""
    over: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    RecordFile(path).write(record, over.set_result)
    why = await over
    return why, await read_record(path)


def test_file_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    """A directory that is not there is not made: storage makes it, and what is mounted there may come yet."""
    why, found = asyncio.run(written(tmp_path / "gone" / "generations.json", RECORD))

    assert ("No such file" in why, found) == (True, None)


def test_write_without_a_thread_fails_and_the_next_one_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a limit of processes is reached the caller gets the reason as that of any failed write."""
    path = tmp_path / "generations.json"

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def twice() -> list[str]:
        loop = asyncio.get_running_loop()
        recorder = RecordFile(path)
        first, second = loop.create_future(), loop.create_future()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            recorder.write(RECORD, first.set_result)
        assert not first.done()
        recorder.write(RECORD, second.set_result)
        return [await first, await second]

    assert asyncio.run(twice()) == ["can't start new thread", ""]


@pytest.mark.parametrize(
    "content", [b"", b"\0" * 100, b'{"format":2}', b'{"editions":[{"namespace":"zz","generation":1}]}', b"[" * 100_000]
)
def test_damaged_file_is_no_record(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever lies there, the start goes on without it, and says what that means."""
    path = tmp_path / "generations.json"
    path.write_bytes(content)

    assert asyncio.run(read_record(path)) is None
    assert "nothing is found that was stored before" in caplog.text
