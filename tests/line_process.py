"""Programs that tests start as children and speak with in lines: what both ends have in common."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import IO, cast

from kvcached_client.errors import KvcachedError
from kvcached_client.failpoints import FailpointReached
from tests.project.source_tree import ROOT


class LineProcess:
    """The test's end: a program that speaks in lines, as a child."""

    def __init__(self, module: str, *arguments: str, environment: dict[str, str] | None = None) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        self._in = cast("IO[str]", self.process.stdin)
        self._out = cast("IO[str]", self.process.stdout)

    def say(self, line: str) -> None:
        self._in.write(line + "\n")
        self._in.flush()

    def hear(self) -> str:
        return self._out.readline().strip()

    def ask(self, line: str) -> str:
        self.say(line)
        return self.hear()

    def finish(self) -> None:
        """No further line comes: the program ends in order."""
        self._in.close()

    def end(self) -> None:
        """End the process, in whatever state it is."""
        self.process.kill()
        self.process.wait()
        with suppress(BrokenPipeError):
            self._in.close()
        self._out.close()


def serve(program: object) -> None:
    """The program's end: say ``ready``, then carry out lines until stdin ends.

    A line is the name of a method of `program` and its arguments; arguments in digits are passed as integers.
    """
    say("ready")
    for command, *words in map(str.split, sys.stdin):
        arguments = [int(word) if word.isdigit() else word for word in words]
        say(outcome(partial(getattr(program, command), *arguments)))


def outcome(action: Callable[[], object], *also: type[Exception]) -> str:
    """What an action returns, or how it failed, as one line; `also` are errors to report beside kvcached's own."""
    expected: tuple[type[Exception], ...] = (FailpointReached, KvcachedError, *also)
    try:
        done = action()
    except expected as error:
        return f"{type(error).__name__}: {error}".replace("\n", " ")
    return "done" if done is None else str(done)


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
