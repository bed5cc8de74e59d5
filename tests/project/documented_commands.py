"""Command lines of documents: in blocks that name no language, in indented blocks, and between ticks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

#: What a block of commands begins with; diagrams, output and messages begin with something else.
PROGRAMS = ("kvcached", "make", "pip", "python", "docker", "kubectl", "systemctl", "tests/gpu/run.sh", ".ci/run")
_STARTS = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:{'|'.join(map(re.escape, PROGRAMS))})(?= |$)")
_FENCED = re.compile(r"^ *```(.*)\n((?:.*\n)*?) *```$", re.MULTILINE)
_INDENTED = re.compile(r"(?:^ {4,}\S.*\n)+", re.MULTILINE)
#: In a diagram.
_ARROW = "<--"
#: What stands for something else in an excerpt.
_ELLIPSIS = "…"


def in_blocks(text: str) -> Iterator[list[str]]:
    """Words of each command of the blocks: of the fenced ones in order, then of the others; comments are left out."""
    for language, block in _FENCED.findall(text):
        if language in {"", "console"}:
            yield from _commands(block)
    for block in _INDENTED.findall(_FENCED.sub("", text)):
        yield from _commands(block)


def between_ticks(text: str) -> Iterator[list[str]]:
    """Words of each command between ticks that has more than its name, without those that have an ellipsis."""
    for span in re.findall(r"`([^`\n]+)`", _FENCED.sub("", text)):
        if _STARTS.match(span) and " " in span and _ELLIPSIS not in span:
            yield shlex.split(span)


def _commands(block: str) -> Iterator[list[str]]:
    pending = ""
    for line in block.splitlines():
        text = re.sub(r"^\$ ", "", line.strip())
        if not pending and (not _STARTS.match(text) or _ARROW in text):
            continue
        pending = f"{pending}\n{text}" if pending else text
        try:
            words = shlex.split(pending.replace("\\\n", ""), comments=True)
        except ValueError:  # an open quote, or a backslash at the end
            continue
        if not text.endswith("\\"):
            pending = ""
            yield words
    assert not pending, f"a command without an end: {pending}"
