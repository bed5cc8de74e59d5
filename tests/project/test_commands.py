"""Every command line of the documents is one that the program that it calls accepts."""

from __future__ import annotations

import argparse
import importlib.util
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click
import pytest

from kvcached.cli.main import main
from tests.project.documented_commands import between_ticks, in_blocks
from tests.project.source_tree import ROOT
from tests.project.test_documents import DOCUMENTS

#: The changelog tells of the past.
PAGES = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
#: Programs of others, and those that a reader writes.
FOREIGN = {"build", "vllm.entrypoints.openai.api_server", "sglang.launch_server"}
#: What stands for a number.
NUMBER = "10"


def simple(words: list[str]) -> Iterator[list[str]]:
    """The commands of a line, those of a pipeline apart; without redirections, variables and brackets."""
    command: list[str] = []
    for word in [*words, "|"]:
        if word in {"|", "&&"}:
            if ">" in command:
                command = command[: command.index(">")]
            yield command
            command = []
        elif command or not re.match(r"[A-Z_]+=", word):
            plain = re.sub(r"^\[|\]$", "", word) if re.match(r"\[[-A-Z]|[-\w|]+\]$", word) else word
            command.append(NUMBER if plain == "N" else plain.partition("|")[0])


def commands(program: str, *, blocks: bool, ticks: bool) -> list[tuple[str, ...]]:
    """Each command of a program, once: those of blocks, of text, or both."""
    found: dict[tuple[str, ...], None] = {}
    for page in PAGES:
        text = page.read_text()
        for words in [*(in_blocks(text) if blocks else ()), *(between_ticks(text) if ticks else ())]:
            found.update((tuple(each), None) for each in simple(words) if each[:1] == [program])
    return list(found)


def parse(words: tuple[str, ...]) -> None:
    """Let `kvcached` parse its arguments, and do nothing.

    Raises:
        click.UsageError: it refuses them.
    """
    try:
        with main.make_context("kvcached", list(words[1:])) as context:
            name, command, arguments = main.resolve_command(context, [*context._protected_args, *context.args])
            assert command is not None
            with command.make_context(name, arguments, parent=context):
                pass
    except click.exceptions.Exit as done:  # of --help and --version
        assert done.exit_code == 0


def parse_mention(words: tuple[str, ...]) -> None:
    """The same for a command in a sentence, which may leave out what it works on, or name it in capitals."""
    try:
        parse(words)
    except click.MissingParameter:
        pass
    except click.BadOptionUsage as lacking:
        if "requires an argument" not in lacking.message:
            raise
    except click.BadParameter as refused:
        if not re.match(r"'[A-Z]+' is not ", refused.message):
            raise


@pytest.mark.parametrize("words", commands("kvcached", blocks=True, ticks=False), ids=" ".join)
def test_command_of_a_block_is_complete(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command that stands by itself has all arguments that it needs, and each option takes its value."""
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith(".json"):
            Path(word).write_text("[]")
    parse(words)


@pytest.mark.parametrize("words", commands("kvcached", blocks=False, ticks=True), ids=" ".join)
def test_command_in_the_text_exists(words: tuple[str, ...]) -> None:
    """A command that a sentence names exists with its options; what it works on may be left out."""
    if words[1] != "COMMAND":
        parse_mention(words)


class Parsed(BaseException):
    """A program has parsed its arguments; it is to do nothing else."""


@pytest.mark.parametrize("words", commands("python", blocks=True, ticks=True), ids=" ".join)
def test_module_takes_its_arguments(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """`python -m MODULE` names a module that is there, whose parser accepts the arguments."""
    if words[1] != "-m":
        assert re.fullmatch(r"\w+\.py", words[1])  # a reader's own program
        return
    name = words[2]
    if name in FOREIGN:
        return
    if name == "kvcached":
        parse_mention(words[2:])
        return
    assert importlib.util.find_spec(name) is not None
    if "argparse" not in source_of(name):
        return
    original = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        original(parser, *given)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    monkeypatch.setattr(sys, "argv", [name, *words[3:]])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # another test has imported it
        with pytest.raises((Parsed, SystemExit)) as ended:
            runpy.run_module(name, run_name="__main__", alter_sys=False)
    assert getattr(ended.value, "code", 0) == 0  # of --help


def source_of(name: str) -> str:
    """The text of a module, or of what a package is when it is called."""
    folder = ROOT / name.replace(".", "/")
    return (folder / "__main__.py" if folder.is_dir() else folder.with_suffix(".py")).read_text()


def test_make_has_every_target() -> None:
    """`make` knows how to make each target of the documents, and each variable is one that the Makefile reads."""
    words = [word for command in commands("make", blocks=True, ticks=True) for word in command[1:]]
    variables = {word.partition("=")[0] for word in words if "=" in word}
    targets = sorted({word for word in words if "=" not in word})

    assert {"env", "test", "docs"} <= set(targets)
    make = shutil.which("make")
    assert make is not None
    assert subprocess.run([make, "--dry-run", *targets], cwd=ROOT, capture_output=True, check=False).returncode == 0
    assert variables <= set(re.findall(r"^(\w+) \?=", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_pip_installs_what_is_there() -> None:
    """Each path that the documents install is a distribution of the checkout, and each extra is one of its extras."""
    extras = {}
    for folder in (ROOT, ROOT / "kvcached_client"):
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        for name in (project["name"], "." if folder == ROOT else folder.name):
            extras[name] = set(project.get("optional-dependencies", ()))
    options = {"-e", "--no-deps", "-w", "wheels", "wheels/*.whl"}  # of `pip wheel`, and what it has made
    called = commands("pip", blocks=True, ticks=True)
    installed = [word for command in called for word in command[2:] if word not in options]

    assert len(installed) > 4
    for word in installed:
        found = re.fullmatch(r"(?:\./)?([\w.-]+?)(?:\[(\w+)\])?", word)
        assert found, word
        assert found[1] in extras, word
        assert found[2] is None or found[2] in extras[found[1]], word


def test_files_in_commands_exist() -> None:
    """A file of the checkout that a command names is there."""
    named = {
        word
        for page in PAGES
        for words in [*in_blocks(page.read_text()), *between_ticks(page.read_text())]
        for word in words
        if re.match(r"(configs|tests|docs|examples|benchmarks)/", word)
    }

    assert "configs/offload-cpu.toml" in named
    assert [name for name in sorted(named) if not Path(ROOT, name).exists()] == []
