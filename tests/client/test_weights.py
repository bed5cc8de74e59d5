"""Digests of weight files: every byte counts, and no file is read twice."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from blake3 import blake3

from kvcached_client.engines import weights
from kvcached_client.engines.weights import (
    ModelFile,
    ReadingStopped,
    WeightReader,
    default_notes_folder,
    find_snapshot,
    model_files,
)

LATER_NS = time.time_ns() + 3_600_000_000_000


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with two weight files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "1.safetensors").write_bytes(b"first")
    (folder / "2.bin").write_bytes(b"second")
    return folder


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where digests are remembered; it does not exist yet."""
    return tmp_path / "cache/notes"


def files_of(model: Path) -> tuple[ModelFile, ...]:
    return model_files(str(model), None, None, lambda *_: None)


def digests(model: Path, notes: Path | None, *, now_ns: int = LATER_NS) -> list[str]:
    return WeightReader(notes, now_ns=lambda: now_ns).digests(files_of(model))


def spoil(notes: Path) -> None:
    """Let remembered digests be wrong, so that it shows who uses them."""
    for note in notes.iterdir():
        note.write_text(note.read_text()[:-65] + "0" * 64 + "\n")


def test_digests_are_of_all_bytes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A digest is the BLAKE3 of the whole file, in however many pieces it is read."""
    monkeypatch.setattr(weights, "_PIECE_BYTES", 2)
    assert digests(model, None) == [blake3(data).hexdigest() for data in (b"first", b"second")]


def test_files_are_read_once(model: Path, notes: Path) -> None:
    """A later start uses remembered digests, as long as the files are the same; only this user can read them."""
    first = digests(model, notes)
    assert notes.stat().st_mode & 0o077 == 0
    spoil(notes)
    assert digests(model, notes) == ["0" * 64] * 2
    (model / "1.safetensors").write_bytes(b"other")
    assert digests(model, notes) == [blake3(b"other").hexdigest(), "0" * 64]
    assert first[0] != blake3(b"other").hexdigest()


def test_a_change_with_old_times_is_seen(model: Path, notes: Path) -> None:
    """Other bytes of the same size with the old time of modification are read again."""
    file = model / "1.safetensors"
    before = file.stat()
    digests(model, notes)
    with file.open("r+b") as opened:
        opened.write(b"FIRST")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert digests(model, notes)[0] == blake3(b"FIRST").hexdigest()


def test_files_that_just_changed_are_not_remembered(model: Path, notes: Path) -> None:
    """A file that may change again within the resolution of its times is read again by the next start."""
    changed = min(file.state.changed for file in files_of(model))
    digests(model, notes, now_ns=changed + 1_999_999_999)
    assert not notes.exists()


@pytest.mark.parametrize("spoiled", ["", "kvcached 2 1 2 3 4 5 " + "0" * 64 + "\n", "x" * 10_000])
def test_damaged_notes_are_ignored(model: Path, notes: Path, spoiled: str) -> None:
    """A note that is not whole is not used."""
    first = digests(model, notes)
    for note in notes.iterdir():
        note.write_text(spoiled)
    assert digests(model, notes) == first


def test_notes_of_others_are_ignored(model: Path, notes: Path) -> None:
    """A note that another user may have written, or a link, is not used."""
    first = digests(model, notes)
    spoil(notes)
    writable, linked = sorted(notes.iterdir())
    writable.chmod(0o666)
    linked.rename(notes / "target")
    linked.symlink_to(notes / "target")
    assert digests(model, notes) == first


def test_without_room_for_notes(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If digests cannot be kept, the files are read at each start, and the user is told."""
    (tmp_path / "file").write_text("")
    assert digests(model, tmp_path / "file/notes") == digests(model, None)
    assert "cannot be kept" in caplog.text


def test_a_file_that_changes_while_it_is_read(model: Path) -> None:
    """A file whose state is not that at the load of the model gives no digest."""
    files = files_of(model)
    (model / "2.bin").write_bytes(b"other")
    with pytest.raises(OSError, match="has changed since the model was loaded"):
        WeightReader(None).digests(files)


def test_reading_stops_when_the_process_ends(model: Path) -> None:
    """Files of many gigabytes do not delay the end of vLLM."""
    with pytest.raises(ReadingStopped):
        WeightReader(None, is_ending=lambda: True).digests(files_of(model))


def test_long_reading_is_logged(model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Reading for more than two seconds is logged with its progress, then every ten seconds, and at its end."""
    monkeypatch.setattr(weights, "_PIECE_BYTES", 1)
    seconds = iter(range(100))
    with caplog.at_level("INFO", "kvcached_client"):
        WeightReader(None, clock=lambda: next(seconds)).digests(files_of(model))
    assert [record.message.split(",")[0] for record in caplog.records] == [
        "kvcached: reads the weight files to identify the model",
        "kvcached: read the weight files in 12.0 s",
    ]


def test_short_reading_is_not_logged(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Small models are read without a word."""
    with caplog.at_level("INFO", "kvcached_client"):
        digests(model, None)
    assert not caplog.records


def test_where_digests_are_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They are in the user's folder of caches; a user without one has none."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_notes_folder() == tmp_path / "kvcached/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/x")
    assert default_notes_folder() == Path("/home/x/.cache/kvcached/weights")


@pytest.mark.parametrize("configuration", ["config.json", "adapter_config.json"])
def test_models_and_adapters_of_the_hub_are_found(tmp_path: Path, configuration: str) -> None:
    """A directory of the hub's cache is that of a model, or of an adapter, whose configuration counts."""
    pytest.importorskip("huggingface_hub")
    repository, commit = tmp_path / "models--org--name", "0" * 40
    (snapshot := repository / "snapshots" / commit).mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    (snapshot / configuration).write_text("{}")
    assert find_snapshot("org/name", None, str(tmp_path)) == str(snapshot)
    assert find_snapshot("org/other", None, str(tmp_path)) is None
    files = model_files("org/name", None, str(tmp_path), find_snapshot)
    assert [file.name for file in files] == ([configuration] if configuration.startswith("adapter") else [])


@pytest.mark.parametrize("name", ["s3://bucket/model", "org/name/more", "/nowhere", "-name"])
def test_what_is_no_name_of_the_hub_is_not_found(tmp_path: Path, name: str) -> None:
    """Hugging Face's refusal of a name says that there is no such model, and is no failure."""
    pytest.importorskip("huggingface_hub")
    assert find_snapshot(name, None, str(tmp_path)) is None
