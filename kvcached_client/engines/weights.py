"""The files that define a model, and the digest of what is in them.

Two fine-tunes of a model have files of the same names and sizes, with the same headers, and may differ in any byte. So
every byte is hashed, once: the digest of a file is remembered, and is used again as long as the file's inode, size and
times are the same.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import stat
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from blake3 import blake3

from kvcached_client.errors import KvcachedError

#: Finds a model's files on this machine: (model, revision, download directory) -> a directory, or None.
FindSnapshot = Callable[[str, str | None, str | None], str | None]

_WEIGHTS: Final = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".ckpt"})
#: Files beside the weights that may change what a model computes for the same tokens: its code, how its weights are
#: quantized, how images and sound become its input, and how much an adapter adds to which layers.
_BESIDE: Final = re.compile(r".*\.py|.*(processor|quant).*\.json|adapter_config\.json")
#: One of these is there in every directory of a model or of an adapter.
_CONFIGURATIONS: Final = ("config.json", "adapter_config.json")

#: Bytes read at a time. Between two pieces, the end of the process is noticed.
_PIECE_BYTES: Final = 8 << 20
#: A file that changed less than this before it was read may change again without another time of change.
SETTLED_S: Final = 2.0
#: Reading that takes longer than this is logged, and again after each further `_AGAIN_S`.
_TELL_S: Final = 2.0
_AGAIN_S: Final = 10.0
_NOTE: Final = re.compile(r"kvcached 1((?: \d+){5}) ([0-9a-f]{64})\n")
_NOTE_BYTES_MAX: Final = 256

_log: Final = logging.getLogger("kvcached_client")


class ReadingStopped(KvcachedError):
    """The process ends before its weights are read."""


class FileState(NamedTuple):
    """What a file system changes when a file changes: the last two are times in ns.

    A program can set the time of modification back, as copying programs do, but not that of the last change.
    """

    device: int
    inode: int
    size: int
    modified: int
    changed: int


@dataclass(frozen=True, slots=True)
class ModelFile:
    """A file of a model.

    Attributes:
        name: path in the model's directory.
        path: where it is.
        state: its state when the model was loaded.
        is_weights: whether it has weights.
    """

    name: str
    path: Path
    state: FileState
    is_weights: bool


def model_files(
    model: str, revision: str | None, download_dir: str | None, find_snapshot: FindSnapshot
) -> tuple[ModelFile, ...]:
    """The files that define a model, by name; none if they are not on this machine."""
    place = model if Path(model).exists() else find_snapshot(model, revision, download_dir)
    if place is None:
        return ()
    root = Path(place)
    files = [root] if root.is_file() else sorted(file for file in root.rglob("*") if file.is_file())
    return tuple(
        ModelFile(os.fspath(file.relative_to(root)), file, _state_of(file.stat()), is_weights)
        for file in files
        if (is_weights := file.suffix in _WEIGHTS or file is root) or _BESIDE.fullmatch(file.name)
    )


def find_snapshot(model: str, revision: str | None, download_dir: str | None) -> str | None:
    """The directory of a model or of an adapter in the Hugging Face cache; None if it is not there."""
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415 - engines that load models have it
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415 - as above

    for file in _CONFIGURATIONS:
        try:
            found = try_to_load_from_cache(model, file, cache_dir=download_dir, revision=revision)
        except HFValidationError:
            return None  # it is no name of the hub: a URL, or a path that is not here
        if isinstance(found, str):
            return str(Path(found).parent)
    return None


def default_notes_folder() -> Path | None:
    """The folder where digests are remembered; None if this user has no folder of caches."""
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "kvcached/weights"
    with contextlib.suppress(RuntimeError):
        return Path.home() / ".cache/kvcached/weights"
    return None


class WeightReader:
    """Hashes files of models.

    Args:
        notes: folder where digests are remembered; None = they are not.
        is_ending: whether the process ends, so that reading stops.
        now_ns: the time of day, as file systems count it.
        clock: in seconds.
        log: the engine's, for progress and warnings.
    """

    def __init__(
        self,
        notes: Path | None,
        *,
        is_ending: Callable[[], bool] = lambda: False,
        now_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
        log: logging.Logger = _log,
    ) -> None:
        self._notes = notes
        self._is_ending = is_ending
        self._now_ns = now_ns
        self._clock = clock
        self._log = log

    def digests(self, files: Sequence[ModelFile]) -> list[str]:
        """The digest of each file's bytes.

        Raises:
            OSError: a file cannot be read, or has changed since the model was loaded.
            ReadingStopped: the process ends.
        """
        progress = _Progress(sum(file.state.size for file in files), self._clock, self._log)
        found = [self._remembered(file) or self._read(file, progress) for file in files]
        progress.end()
        return found

    def _read(self, file: ModelFile, progress: _Progress) -> str:
        began_ns = self._now_ns()
        hasher, piece = blake3(), memoryview(bytearray(_PIECE_BYTES))
        with file.path.open("rb", buffering=0) as opened:
            _check_state(file, os.fstat(opened.fileno()))
            while size := opened.readinto(piece):
                if self._is_ending():
                    raise ReadingStopped("the engine ends before its weight files are read")
                hasher.update(piece[:size])
                progress.add(size)
            _check_state(file, os.fstat(opened.fileno()))
        _check_state(file, file.path.stat())
        digest = hasher.hexdigest()
        if began_ns - file.state.changed >= SETTLED_S * 1e9:
            self._remember(file.state, digest)
        return digest

    def _remembered(self, file: ModelFile) -> str | None:
        """The digest of a file that was read before and has not changed."""
        if self._notes is None:
            return None
        try:
            note = _NOTE.fullmatch(_read_own(self._note_of(self._notes, file.state)))
        except OSError:
            return None
        if note is None or tuple(map(int, note[1].split())) != file.state:
            return None
        return note[2]

    def _remember(self, state: FileState, digest: str) -> None:
        if self._notes is None:
            return
        try:
            self._notes.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._notes)
            with os.fdopen(descriptor, "w") as note:
                note.write(f"kvcached 1 {' '.join(map(str, state))} {digest}\n")
            Path(name).replace(self._note_of(self._notes, state))
        except OSError as error:
            self._log.warning(
                "kvcached: the next start reads the weight files again, their digests cannot be kept: %s", error
            )

    @staticmethod
    def _note_of(folder: Path, state: FileState) -> Path:
        return folder / f"{state.device}-{state.inode}"


class _Progress:
    """Logs reading that takes long.

    Args:
        total: bytes of all files.
        clock: in seconds.
        log: where to.
    """

    def __init__(self, total: int, clock: Callable[[], float], log: logging.Logger) -> None:
        self._log = log
        self._total = total
        self._clock = clock
        self._began = clock()
        self._done = 0
        self._told_at: float | None = None

    def add(self, size: int) -> None:
        """Count bytes that were read."""
        self._done += size
        now = self._clock()
        due = self._began + _TELL_S if self._told_at is None else self._told_at + _AGAIN_S
        if now >= due:
            self._told_at = now
            self._log.info(
                "kvcached: reads the weight files to identify the model, %.1f of %.1f GB so far; nothing is stored or "
                "loaded until then",
                self._done / 1e9,
                self._total / 1e9,
            )

    def end(self) -> None:
        """All files are read."""
        if self._told_at is not None:
            self._log.info("kvcached: read the weight files in %.1f s", self._clock() - self._began)


def _check_state(file: ModelFile, status: os.stat_result) -> None:
    if _state_of(status) != file.state:
        raise OSError(f"{file.path} has changed since the model was loaded")


def _state_of(status: os.stat_result) -> FileState:
    return FileState(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _read_own(path: Path) -> str:
    """The text of a small file that only this user can have written.

    Raises:
        OSError: there is none.
    """
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
            raise PermissionError(f"{path} is not a file that this user alone can write")
        return file.read(_NOTE_BYTES_MAX).decode(errors="replace")
