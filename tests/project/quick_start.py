"""docs/quick-start.md, walked: the commands of a section as they stand there, in a folder with the checkout's files."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.project.daemon_process import STOP_TIMEOUT_S, clean_environment, wait_for_ready
from tests.project.documented_commands import in_blocks
from tests.project.source_tree import ROOT

PAGE = (ROOT / "docs/quick-start.md").read_text()
_TIMEOUT_S = 200


def section(title: str) -> str:
    """The text below a heading."""
    (text,) = re.findall(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def walk(title: str, folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run the commands of a section but its installations, the first that fails is an error; returns what they print.

    A daemon of the section lives until its last command has ended.
    """
    text = section(title)
    _save_programs(text, folder)
    environment = environment_of(folder, variables)
    said = ""
    with ExitStack() as daemons:
        for words in in_blocks(text):
            if words[0] == "pip":
                continue
            command = _resolved(words)
            if words[:2] == ["kvcached", "supervise"]:
                daemons.enter_context(_started(command, folder, environment))
                continue
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
            )
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            said += done.stdout if words[0] == "python" else ""
    return said


@contextmanager
def daemon_of(title: str, folder: Path) -> Iterator[None]:
    """The daemon that a section starts."""
    (command,) = [words for words in in_blocks(section(title)) if words[:2] == ["kvcached", "supervise"]]
    with _started(_resolved(command), folder, environment_of(folder, None)):
        yield


def shown(title: str) -> str:
    """What the section says that its programs print."""
    (text,) = re.findall(r"```text\n(.*?)```", section(title), re.DOTALL)
    return str(text)


def environment_of(folder: Path, variables: Mapping[str, str] | None) -> dict[str, str]:
    """Variables of all commands; the folder is given the configurations of the checkout."""
    if not (folder / "configs").exists():
        (folder / "configs").symlink_to(ROOT / "configs")
    return {**clean_environment(), "KVCACHED_RUN_DIR": str(folder / "run"), **(variables or {})}


def _save_programs(text: str, folder: Path) -> None:
    for name, program in re.findall(r"[Ss]ave this as `(\w+\.py)`.*?```python\n(.*?)```", text, re.DOTALL):
        (folder / name).write_text(program)


def _resolved(words: list[str]) -> list[str]:
    """With this environment's programs in place of those of a reader's."""
    return [sys.executable, "-m", *words] if words[0] == "kvcached" else [sys.executable, *words[1:]]


@contextmanager
def _started(command: list[str], folder: Path, environment: Mapping[str, str]) -> Iterator[None]:
    """The daemon of a command, from ready to stopped."""
    log_path, notify_path = folder / "daemon.log", folder / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as notices, log_path.open("ab") as log:
        notices.bind(str(notify_path))
        variables = {**environment, "NOTIFY_SOCKET": str(notify_path)}
        with subprocess.Popen(command, cwd=folder, env=variables, stderr=log) as daemon:
            try:
                wait_for_ready(daemon, notices, log_path)
                yield
            finally:
                daemon.terminate()
                daemon.wait(STOP_TIMEOUT_S)
    notify_path.unlink()
